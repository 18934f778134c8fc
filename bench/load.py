"""Load on an OpenAI-compatible server: streamed requests, and when each piece of them came.

A client that costs little, because it shares its machine with the server that it measures:
plain HTTP/1.1 over asyncio, one connection a request.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import msgspec

WORDS = [  # each with its space is one token in most vocabularies
    word
    for line in (
        "the of and to in is that for it was on as with be by this had not are but from or have",
        "an they which one you were all her she there would their we him been has when who will",
        "no more if out so up said what its about than into them can only other time new some",
        "could these two may first then do any like my now over such our man me even most made",
    )
    for word in line.split()
]


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None

    @property
    def shows(self) -> bool:
        """Whether there is something for the client to read."""
        return bool(self.text or (self.delta is not None and self.delta.content))


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


_chunk = msgspec.json.Decoder(_Chunk).decode


@dataclass(frozen=True)
class Target:
    """A server, and how it is asked.

    Attributes:
        url: e.g. "http://127.0.0.1:8000".
        model: the name that it serves.
        route: "chat" or "completions".
    """

    url: str
    model: str
    route: str = "chat"

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.url)
        return parts.hostname or "127.0.0.1", parts.port or 80

    def body(self, prompt: str, new_tokens: int) -> dict[str, object]:
        """The body of a streamed greedy request that ends after exactly `new_tokens`."""
        body: dict[str, object] = {
            "model": self.model,
            "max_tokens": new_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.route == "chat":
            return {**body, "messages": [{"role": "user", "content": prompt}]}
        return {**body, "prompt": prompt}

    @property
    def path(self) -> str:
        """Of the route."""
        return "/v1/chat/completions" if self.route == "chat" else "/v1/completions"


@dataclass
class Answer:
    """When a streamed answer came, in seconds of `time.perf_counter`.

    Attributes:
        due: when it was to be asked for: its delays count from here, so that a client that
            falls behind hides nothing.
        times: of the events with text.
        problem: why there is no whole answer; "" when there is.
    """

    due: float
    times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0
    problem: str = ""

    @property
    def first(self) -> float:
        """Seconds to the first text."""
        return self.times[0] - self.due

    @property
    def gaps(self) -> list[float]:
        """Seconds between texts that follow one another."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]

    @property
    def per_token(self) -> float:
        """Mean seconds of a token after the first."""
        return (self.times[-1] - self.times[0]) / max(1, self.tokens - 1)


def prompts(seed: int, count: int, words: int) -> list[str]:
    """Texts of random words; no two begin alike, so that no prefix is shared."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=words)) for _ in range(count)]


def arrivals(seed: int, rate: float, seconds: float) -> list[float]:
    """Moments of a Poisson process in [0, seconds)."""
    rng = random.Random(seed)
    moments: list[float] = []
    now = rng.expovariate(rate)
    while now < seconds:
        moments.append(now)
        now += rng.expovariate(rate)
    return moments


async def ask(target: Target, prompt: str, new_tokens: int, due: float) -> Answer:
    """Send one request and read its stream to the end."""
    answer = Answer(due)
    try:
        await _ask(target, prompt, new_tokens, answer)
    except (OSError, ValueError, asyncio.IncompleteReadError) as error:
        answer.problem = f"{type(error).__name__}: {error}"
    if not answer.problem and (not answer.times or answer.tokens != new_tokens):
        answer.problem = f"{answer.tokens} of {new_tokens} tokens came"
    return answer


async def _ask(target: Target, prompt: str, new_tokens: int, answer: Answer) -> None:
    host, port = target.address
    body = msgspec.json.encode(target.body(prompt, new_tokens))
    head = (
        f"POST {target.path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(head.encode() + body)
        status = (await reader.readline()).split(b" ", 2)[1]
        if status != b"200":
            answer.problem = f"status {status.decode()}"
            return
        # Servers put whole events into the chunks of the transfer, so lines are enough.
        async for line in reader:
            if not line.startswith(b"data: {"):
                continue
            chunk = _chunk(line[6:])
            if chunk.usage is not None:
                answer.prompt_tokens = chunk.usage.prompt_tokens
                answer.tokens = chunk.usage.completion_tokens
            if any(choice.shows for choice in chunk.choices):
                answer.times.append(time.perf_counter())
    finally:
        writer.close()


async def together(target: Target, texts: Sequence[str], new_tokens: int) -> list[Answer]:
    """All requests at once."""
    now = time.perf_counter()
    return await asyncio.gather(*(ask(target, text, new_tokens, now) for text in texts))


async def open_loop(
    target: Target, moments: Sequence[float], texts: Sequence[str], new_tokens: int
) -> list[Answer]:
    """Send each request at its moment, whatever became of those before it."""
    start = time.perf_counter() + 0.1

    async def one(moment: float, text: str) -> Answer:
        due = start + moment
        await asyncio.sleep(due - time.perf_counter())
        return await ask(target, text, new_tokens, due)

    return await asyncio.gather(*map(one, moments, texts))


class IdleConnections:
    """Connections that have asked once and then stay silent; use as a context manager."""

    def __init__(self, target: Target, count: int) -> None:
        self._target = target
        self._count = count
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> IdleConnections:
        host, port = self._target.address
        request = f"GET /health HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()
        for _ in range(self._count):
            connection = socket.create_connection((host, port), timeout=60)
            self._sockets.append(connection)
            connection.sendall(request)
            if not connection.recv(4096).startswith(b"HTTP/1.1 200"):
                raise RuntimeError("the server is not well")
        return self

    def __exit__(self, *exc: object) -> None:
        for connection in self._sockets:
            connection.close()

    def alive(self) -> int:
        """How many the server has left open."""
        count = 0
        for connection in self._sockets:
            connection.setblocking(False)
            try:
                count += bool(connection.recv(1))
            except BlockingIOError:
                count += 1
            except OSError:
                continue
        return count
