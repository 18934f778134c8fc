"""Connections whose client has gone silent, does not read, or is one too many.

uvicorn leaves these to a proxy in front: a connection that never sends the head of a request, a
body that stops halfway, and an answer that nobody takes would each stay open for ever, and a
crowd of them would leave no file descriptor for the engine, for files, or for other clients.
"""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

LOOK_SECONDS = 1.0
SPARE_FILES = 128  # for what is no connection (the engine's pipes, files), and for what knocks
LEAST_CONNECTIONS = 8
LINGER_SECONDS = 2.0


def raise_file_limit() -> None:
    """Let this process open as many files as the system allows it: a connection is a file."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def connection_limit() -> float:
    """How many connections leave enough descriptors for the rest."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return float("inf")
    return max(LEAST_CONNECTIONS, files - SPARE_FILES)


class Connection(H11Protocol):
    """One client's connection, with what a `Watchman` needs to know of it.

    Attributes:
        heard: bytes that came so far.
    """

    heard = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse the connection if there are too many."""
        super().connection_made(transport)
        self.transport = _Lingering(transport, self.loop, self._is_sent_to)  # type: ignore[assignment]
        if len(self.connections) > connection_limit():
            transport.write(_reply(503, "there are too many connections", "too_many_connections"))
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Count, and hand on what somebody still wants."""
        self.heard += len(data)
        if not self.transport.is_closing():
            super().data_received(data)

    def _is_sent_to(self) -> bool:
        """Whether the client may be in the middle of sending."""
        return self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP gets its error in the shape of all others."""
        self.transport.write(_reply(400, msg, "invalid_http"))
        self.transport.close()

    def owes(self) -> tuple[str, object]:
        """What is up to the client, and a mark that moves while the client does its part."""
        cycle = self.cycle
        if self.flow.write_paused:
            return "reading", self.transport.get_write_buffer_size()
        if cycle is None or cycle.response_complete:
            return "head", id(cycle)  # a head has one time limit, however it trickles in
        if cycle.more_body and not self.flow.read_paused:
            return "body", self.heard
        return "", None


class _Lingering:
    """A transport that ends a connection without taking the last answer back.

    A socket that is closed with bytes of its client unread resets the connection, and the
    client loses what it had not read yet: the very error that says why its long body is not
    wanted. So while the client may be sending, only this side is shut; what still comes is
    read and dropped until the client is done or `LINGER_SECONDS` are over (RFC 9112, 9.6).
    TLS has no half-closed state and closes at once.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        is_sent_to: Callable[[], bool],
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._is_sent_to = is_sent_to
        self._closing = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Whether nothing more is read or written for anybody."""
        return self._closing or self._transport.is_closing()

    def close(self) -> None:
        """End the connection; calling again does nothing."""
        if self.is_closing():
            return
        self._closing = True
        if not self._transport.can_write_eof() or not self._is_sent_to():
            self._transport.close()
            return
        self._transport.write_eof()  # after what is still to be written
        self._transport.resume_reading()
        self._loop.call_later(LINGER_SECONDS, self._transport.close)


@dataclass(slots=True)
class _Seen:
    owes: tuple[str, object]
    since: float


class Watchman:
    """Ends connections that stand still.

    Args:
        connections: those that are open.
        head_seconds: for the next head, idling included.
        stall_seconds: without a byte of a body that has begun, or with an answer that waits to
            be read; 0 is for ever.
    """

    def __init__(
        self, connections: Iterable[object], head_seconds: float, stall_seconds: float
    ) -> None:
        self._connections = connections
        self._patience = {
            "": float("inf"),
            "head": head_seconds,
            "body": stall_seconds or float("inf"),
            "reading": stall_seconds or float("inf"),
        }
        self._seen: dict[Connection, _Seen] = {}

    async def watch(self) -> None:
        """Look every second, for ever."""
        while True:
            self.look(time.monotonic())
            await asyncio.sleep(LOOK_SECONDS)

    def look(self, now: float) -> None:
        """Compare every connection with how it stood when it last moved."""
        seen: dict[Connection, _Seen] = {}
        for connection in [each for each in self._connections if isinstance(each, Connection)]:
            owes, before = connection.owes(), self._seen.get(connection)
            if before is None or before.owes != owes:
                before = _Seen(owes, now)
            seen[connection] = before
            if now - before.since >= self._patience[owes[0]]:
                connection.transport.abort()
        self._seen = seen


def _reply(status: int, message: str, code: str) -> bytes:
    """A whole reply for whom no request can be told apart."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    body = json.dumps({"error": error}).encode()
    reason = {400: "Bad Request", 503: "Service Unavailable"}[status]
    head = (
        f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n"
    )
    if status == 503:
        head += "Retry-After: 1\r\n"
    return head.encode() + b"\r\n" + body
