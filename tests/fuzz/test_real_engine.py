"""Some hundreds of the same requests to a server on the real SmolLM2, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from urllib.parse import urlsplit

import h11
import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.async_llm import AsyncLLM
from tests.fuzz import bodies
from tests.fuzz.target import GOOD, MODEL, Answer, Sent, check
from tests.server.support import ServerThread, wait_until

pytestmark = pytest.mark.slow

REQUESTS = 400
PER_EXAMPLE = 20
OWN_LENGTH = (b"content-length", b"transfer-encoding", b"connection", b"expect", b"upgrade")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    with ServerThread(
        lambda: AsyncLLM("smollm2", threads=1, cache_bytes=64 << 20, max_context=256),
        served_name=MODEL,
        max_output_tokens=8,
        max_body_bytes=200_000,
        access_log=False,
    ) as made:
        yield made


def test_the_real_engine_does_not_mind_either(server: ServerThread) -> None:
    pid, before = server.llm.client.pid, good_answers(server)
    sent = 0

    @settings(max_examples=REQUESTS // PER_EXAMPLE, suppress_health_check=list(HealthCheck))
    @given(st.lists(bodies.requests, min_size=PER_EXAMPLE, max_size=PER_EXAMPLE))
    def fuzz(made: list[Sent]) -> None:
        nonlocal sent
        asyncio.run(send_all(server.url, made))
        sent += len(made)

    fuzz()
    assert sent >= REQUESTS
    client = server.llm.client
    wait_until(lambda: not client._queues and not client._admissions, 30)
    wait_until(lambda: server.llm.stats().running + server.llm.stats().pages_used == 0, 30)
    assert client.pid == pid
    assert client.restarts == 0
    assert good_answers(server) == before


def good_answers(server: ServerThread) -> list[object]:
    """What does not depend on the call of every good reply."""
    found: list[object] = []
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for path, body in GOOD.items():
            reply = client.post(
                path, json={**body, **({"max_tokens": 8} if "seed" in body else {})}
            )
            assert reply.status_code == 200, reply.text
            found.append(reply.json().get("choices") or reply.json()["data"])
    return found


async def send_all(url: str, made: list[Sent]) -> None:
    answers = await asyncio.gather(*(send(url, request) for request in made))
    for request, answer in zip(made, answers, strict=True):
        if answer is not None and b'"invalid_http"' not in answer.body:
            check(request, answer)


async def send(url: str, request: Sent) -> Answer | None:
    """The answer; None to a client that hangs up."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    content = b"".join(request.pieces)
    lines = [f"{request.method} {request.path} HTTP/1.1".encode(), b"host: fuzz"]
    lines += [
        name + b": " + value
        for name, value in request.headers
        if name not in (*OWN_LENGTH, b"host") and not set(value) & set(b"\r\n\0")
    ]
    lines += [b"connection: close", b"content-length: %d" % len(content)]
    try:
        writer.write(b"\r\n".join(lines) + b"\r\n\r\n")
        if request.breaks or request.leaves is not None:
            writer.write(content[: len(content) // 2 if request.breaks else len(content)])
            await asyncio.sleep(0.05)
            return None
        writer.write(content)
        async with asyncio.timeout(60):
            return read(request.method, await reader.read(-1))
    finally:
        writer.close()


def read(method: str, data: bytes) -> Answer:
    """A reply from its bytes."""
    parser = h11.Connection(h11.CLIENT)
    parser.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
    parser.send(h11.EndOfMessage())
    parser.receive_data(data)
    parser.receive_data(b"")
    answer = Answer()
    while not answer.ended:
        event = parser.next_event()
        if isinstance(event, h11.Response):
            answer.status, answer.headers = event.status_code, list(event.headers)
        elif isinstance(event, h11.Data):
            answer.body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            answer.ended = True
        else:
            raise AssertionError(f"{event} in {data[:300]!r}")
    return answer
