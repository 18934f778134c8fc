"""Thousands of requests that nobody would send, and a server that does not mind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz import bodies
from tests.fuzz.target import MODEL, Sent, Target, post

PER_EXAMPLE = 20
SHARE = 0.9  # of all requests; test_openapi.py sends the rest
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    made = Target(max_body_bytes=200_000, max_file_bytes=50_000, stored_responses=50)
    yield made
    made.close()


@pytest.fixture(scope="module")
def names(target: Target) -> dict[bytes, bytes]:
    """Ids of things that there are, by what stands for them."""
    content = bodies.written({**LINE, "body": {"model": MODEL, "prompt": "a b", "max_tokens": 2}})
    form = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        + content
        + b"\r\n--b--\r\n"
    )
    sent = [
        Sent(
            "POST", "/v1/files", (form,), ((b"content-type", b"multipart/form-data; boundary=b"),)
        ),
        post("/v1/responses", {"model": MODEL, "input": "hello", "max_output_tokens": 2}),
    ]
    file, response = (answer.json()["id"].encode() for answer in target.send(sent))
    return {b"@@file": file, b"@@response": response}


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
        target.send(filled(request, names) for request in made)
        done += 1
        if done % 50 == 0:
            target.check_health()

    fuzz()
    target.check_health()
    assert target.statuses[200] > target.sent // 20  # it is no use to be refused each time
