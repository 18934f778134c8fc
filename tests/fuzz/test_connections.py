"""Clients that misbehave below HTTP, three hundred at once, over real sockets."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.fuzz.target import MODEL, memory, open_files
from tests.server.support import ServerThread, fake_llm, wait_until

CROWD = 300
ROUNDS = 4
GOOD = {"model": MODEL, "prompt": "one two three four five", "seed": 5, "logprobs": 2}
LONG = {"model": MODEL, "prompt": "a b c d e f g h " * 30, "max_tokens": 200, "stream": True}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    with ServerThread(fake_llm, max_body_bytes=100_000, access_log=False) as made:
        yield made


class Client:
    """One connection that does one bad thing, or a good one."""

    def __init__(self, url: str, rng: random.Random) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._address = (parts.hostname, parts.port)
        self._rng = rng
        self.expected = b""  # tokens of the good answer

    async def act(self) -> str:
        name = self._rng.choice(list(ACTS))
        self._reader, self._writer = await asyncio.open_connection(*self._address)
        try:
            async with asyncio.timeout(60):
                await ACTS[name](self)
        except TimeoutError:
            raise AssertionError(name) from None
        except (ConnectionError, asyncio.IncompleteReadError):
            assert name not in ("good", "pipelined", "dribble", "chunked", "half_closed"), name
        finally:
            self._writer.close()
        return name

    def request(self, body: Any, *, path: str = "/v1/completions", length: int = -1) -> bytes:
        content = json.dumps(body).encode()
        size = len(content) if length < 0 else length
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {size}\r\n\r\n"
        )
        return head.encode() + content

    async def answer(self) -> tuple[int, bytes]:
        """Status and body of one reply with a length."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        status = int(head.split()[1])
        length = next(
            int(line.split(b":")[1])
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length")
        )
        return status, await self._reader.readexactly(length)

    async def check_good(self) -> None:
        status, body = await self.answer()
        assert status == 200, body
        assert tokens_of(body) == self.expected

    def abort(self) -> None:
        """Break the connection off, with a reset."""
        link = self._writer.get_extra_info("socket")
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    # --- what clients do ----------------------------------------------------------------------

    async def good(self) -> None:
        self._writer.write(self.request(GOOD))
        await self.check_good()

    async def pipelined(self) -> None:
        self._writer.write(self.request(GOOD) * 3)
        for _ in range(3):
            await self.check_good()

    async def half_closed(self) -> None:
        """Says that it will send no more: for HTTP servers it has gone, or gets its answer."""
        self._writer.write(self.request({**GOOD, "prompt": 3}))
        self._writer.write_eof()
        await self._reader.read()

    async def dribble(self) -> None:
        content = self.request(GOOD)
        cuts = sorted(self._rng.randrange(len(content)) for _ in range(6))
        for start, end in zip([0, *cuts], [*cuts, len(content)], strict=True):
            self._writer.write(content[start:end])
            await asyncio.sleep(self._rng.random() * 0.2)
        await self.check_good()

    async def half(self) -> None:
        content = self.request(GOOD)
        self._writer.write(content[: self._rng.randrange(len(content))])
        await asyncio.sleep(self._rng.random() * 0.2)
        if self._rng.random() < 0.5:
            self.abort()

    async def chunked(self) -> None:
        content = json.dumps(GOOD).encode()
        self._writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        for byte in range(0, len(content), 7):
            piece = content[byte : byte + 7]
            self._writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        self._writer.write(b"0\r\n\r\n")
        await self.check_good()

    async def bad_chunks(self) -> None:
        self._writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            + self._rng.choice([b"zz\r\n", b"-5\r\nx", b"ffffffffffffffffff\r\n", b"5\r\nabc"])
        )
        await asyncio.sleep(0.1)

    async def two_lengths(self) -> None:
        """What request smuggling is made of; never two requests."""
        self._writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
            b"Content-Length: 50\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
            b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        )
        answer = await self._reader.read()
        assert answer.startswith(b"HTTP/1.1 400"), answer
        assert answer.count(b"HTTP/1.1") == 1

    async def streamed(self) -> None:
        """Reads a part of a stream and goes."""
        self._writer.write(self.request(LONG))
        await self._reader.read(self._rng.randrange(1, 3000))
        if self._rng.random() < 0.5:
            self.abort()

    async def unread(self) -> None:
        """Asks for much, and reads nothing."""
        self._writer.write(self.request(LONG))
        await asyncio.sleep(self._rng.random() * 0.5)

    async def large(self) -> None:
        self._writer.write(self.request({**GOOD, "prompt": "x" * 150_000}))
        status, body = await self.answer()
        assert status == 413
        assert json.loads(body)["error"]["code"] == "request_too_large"

    async def noise(self) -> None:
        self._writer.write(
            self._rng.choice(
                [
                    b"\x16\x03\x01\x02\x00\x01\x00",  # TLS to a plain port
                    b"GET / HTTP/9.9\r\n\r\n",
                    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                    b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\n\r\n",
                    b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
                    b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
                    b"GET /health HTTP/1.1\r\nHost: x\r\n folded: x\r\n\r\n",
                    self._rng.randbytes(200) + b"\r\n\r\n",
                ]
            )
        )
        answer = b""
        with suppress(TimeoutError):  # some of it may be the beginning of a request
            answer = await asyncio.wait_for(self._reader.read(100), 1)
        assert b" 5" not in answer[:14], answer

    async def upgrade(self) -> None:
        self._writer.write(
            b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        head = await self._reader.readuntil(b"\r\n\r\n")
        assert b" 101 " not in head

    async def idle(self) -> None:
        await asyncio.sleep(self._rng.random() * 0.5)

    async def cancels(self) -> None:
        """Names of things that others may have."""
        for path in ("/admin/cancel/x", "/v1/responses/resp_x/cancel", "/v1/batches/x/cancel"):
            self._writer.write(self.request({}, path=path))
            status, _ = await self.answer()
            assert status in (403, 404)


ACTS: dict[str, Callable[[Client], Awaitable[None]]] = {
    name: getattr(Client, name)
    for name in (
        *("good", "pipelined", "half_closed", "dribble", "half", "chunked", "bad_chunks"),
        *("two_lengths", "streamed", "unread", "large", "noise", "upgrade", "idle", "cancels"),
    )
}


def tokens_of(body: bytes) -> bytes:
    """A reply without what differs from call to call."""
    reply = json.loads(body)
    return json.dumps(reply["choices"]).encode()


def left(server: ServerThread) -> dict[str, int]:
    client, stats = server.llm.client, server.llm.stats()
    keeper: Any = server.llm.doorkeeper
    found = {
        "queues": len(client._queues),
        "admissions": len(client._admissions),
        "live": len(keeper.live),
        "in flight": keeper.metrics.in_flight,
        "running": stats.running,
        "waiting": stats.waiting,
        "pages": stats.pages_used,
    }
    return {name: value for name, value in found.items() if value}


def test_three_hundred_at_once_of_any_kind(server: ServerThread) -> None:
    """Good ones get the same bits as alone; of the others nothing stays."""
    with httpx.Client(base_url=server.url) as client:
        expected = tokens_of(client.post("/v1/completions", json=GOOD).content)
    pid = server.llm.client.pid
    files = held = 0
    for number in range(ROUNDS):
        acts = asyncio.run(crowd(server.url, expected, seed=number))
        assert set(acts) == set(ACTS)
        wait_until(lambda: not left(server), 20)
        if number == 0:  # what is made once has been made
            wait_until(lambda: open_files() < CROWD)
            files, held = open_files(), memory()
    wait_until(lambda: open_files() <= files + 5)
    assert memory() < held + 64 * 2**20
    assert server.llm.client.pid == pid
    assert server.llm.client.restarts == 0
    with httpx.Client(base_url=server.url) as client:
        assert tokens_of(client.post("/v1/completions", json=GOOD).content) == expected


async def crowd(url: str, expected: bytes, *, seed: int) -> list[str]:
    clients = [Client(url, random.Random(f"{seed} {index}")) for index in range(CROWD)]
    for client in clients:
        client.expected = expected
    return await asyncio.gather(*(client.act() for client in clients))
