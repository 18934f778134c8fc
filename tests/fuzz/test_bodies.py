"""Thousands of requests that nobody would send, and a server that does not mind."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz import bodies
from tests.fuzz.target import GOOD, MODEL, Sent, Target, memory, open_files, post

PER_EXAMPLE = 20
SHARE = 0.9  # of all requests; test_openapi.py sends the rest
LARGEST = 48_000  # bytes of lines in a file
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    made = Target(max_body_bytes=200_000, max_file_bytes=50_000, stored_responses=50)
    yield made
    made.close()


@pytest.fixture(scope="module")
def names(target: Target) -> dict[bytes, bytes]:
    """Ids of things that there are, by what stands for them."""
    line = {**LINE, "body": {"model": MODEL, "prompt": "a b", "max_tokens": 2}}
    file = upload(target, [bodies.written(line)])
    asked = post("/v1/responses", {"model": MODEL, "input": "hello", "max_output_tokens": 2})
    (answer,) = target.send([asked])
    response = answer.json()["id"]
    return {b"@@file": file.encode(), b"@@response": response.encode()}


def upload(target: Target, lines: list[bytes]) -> str:
    """Keep a file; returns its id."""
    head = b"Content-Disposition: form-data; name="
    form = (
        b"--b\r\n" + head + b'"purpose"\r\n\r\nbatch\r\n'
        b"--b\r\n" + head + b'"file"; filename="a"\r\n\r\n' + b"\n".join(lines) + b"\r\n--b--\r\n"
    )
    kind = (b"content-type", b"multipart/form-data; boundary=b")
    (answer,) = target.send([Sent("POST", "/v1/files", (form,), (kind,))])
    assert answer.status == 200
    found: str = answer.json()["id"]
    return found


def filled(request: Sent, names: dict[bytes, bytes]) -> Sent:
    path, pieces = request.path, request.pieces
    for name, instead in names.items():
        path = path.replace(name.decode(), instead.decode())
        pieces = tuple(piece.replace(name, instead) for piece in pieces)
    return replace(request, path=path, pieces=pieces)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # `--fuzz-requests` may be large
def test_requests_that_nobody_would_send(
    target: Target, names: dict[bytes, bytes], fuzz_requests: int
) -> None:
    """No 5xx, every error in the shape, the same bits for good requests, nothing left behind."""
    examples = max(1, int(fuzz_requests * SHARE) // PER_EXAMPLE)
    done = 0

    @settings(
        max_examples=examples,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(bodies.requests, min_size=PER_EXAMPLE, max_size=PER_EXAMPLE))
    def fuzz(made: list[Sent]) -> None:
        nonlocal done
        requests = [filled(request, names) for request in made]
        target.send(requests)
        last.append(requests)
        done += 1
        if done % 50 == 0:
            target.check_health()

    last: deque[list[Sent]] = deque(maxlen=50)
    fuzz()
    target.check_health()
    held = []
    for _ in range(3):  # the same again, since hypothesis remembers whatever it has made
        for requests in last:
            target.send(requests)
        target.check_health()
        held.append((memory(), open_files()))
    assert held[-1][0] < held[0][0] + 8 * 2**20, held
    assert held[-1][1] <= held[0][1] + 2, held
    assert target.statuses[200] > target.sent // 20  # it is no use to be refused each time


def test_lines_of_batches_that_nobody_would_send(target: Target) -> None:
    """Each line gets one answer or one error, whatever it asks for; or the file is refused."""
    endpoints = [path for path, _ in bodies.SEEDS if path.startswith("/v1/")]
    ended = dict.fromkeys(("completed", "failed"), 0)

    @settings(max_examples=20, suppress_health_check=list(HealthCheck))
    @given(st.lists(bodies.mutated(), min_size=20, max_size=20), st.booleans())
    def fuzz(made: list[tuple[str, object]], hurt: bool) -> None:
        endpoint = next((path for path, _ in made if path in endpoints), "/v1/completions")
        own = [body for path, body in made if path == endpoint]
        lines = [
            bodies.written({**LINE, "url": endpoint, "custom_id": str(index), "body": body})
            for index, body in enumerate(own)
        ]
        while sum(map(len, lines)) > LARGEST:
            own.pop()
            lines.pop()
        if hurt:
            lines = [line[:-1] if index % 3 else line for index, line in enumerate(lines)]
        asked = {"endpoint": endpoint, "completion_window": "1h"}
        (answer,) = target.send(
            [post("/v1/batches", {**asked, "input_file_id": upload(target, lines)})]
        )
        if answer.status != 200:  # no endpoint of batches
            assert answer.status == 400
            return
        target.check_health()
        (answer,) = target.send([Sent("GET", f"/v1/batches/{answer.json()['id']}")])
        batch = answer.json()
        ended[batch["status"]] += 1
        if batch["status"] == "failed":
            assert batch["errors"]["data"]
            return
        counts = batch["request_counts"]
        assert counts["total"] == len(own) == counts["completed"] + counts["failed"]
        seen = []
        for name, allowed in (("output_file_id", (200,)), ("error_file_id", range(400, 500))):
            if batch[name] is not None:
                (content,) = target.send([Sent("GET", f"/v1/files/{batch[name]}/content")])
                for line in map(json.loads, content.body.splitlines()):
                    if line["response"] is None:  # refused before it was sent anywhere
                        assert line["error"]["code"], line
                    else:
                        assert line["response"]["status_code"] in allowed, line
                    seen.append(line["custom_id"])
        assert len(seen) == len(own)
        known = [name for name in seen if name is not None]  # a line that is no JSON has none
        assert len(set(known)) == len(known)
        assert {str(index) for index in range(len(own))} >= set(known)

    fuzz()
    assert ended["completed"]


def test_only_draining_answers_503(target: Target) -> None:
    """And only to new work; reading goes on, and afterwards all is as it was."""
    operations = target.app.state.operations
    good = [post(path, body) for path, body in GOOD.items()]
    reading = [Sent("GET", path) for path in ("/v1/models", "/health", "/v1/files", "/stats")]

    @settings(max_examples=10, suppress_health_check=list(HealthCheck))
    @given(st.lists(bodies.requests, min_size=PER_EXAMPLE, max_size=PER_EXAMPLE))
    def fuzz(made: list[Sent]) -> None:
        operations.drain()
        try:
            answers = target.send([*made, *good, *reading], draining=True)
        finally:
            operations.undrain()
        assert [a.status for a in answers[-8:]] == [503] * 4 + [200] * 4

    fuzz()
    target.check_health()
