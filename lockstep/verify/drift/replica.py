"""Which replica answered, where replies let one see it: by a header, else by the fingerprint."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar

import httpx

from lockstep.verify.drift.baseline import Answered
from lockstep.verify.endpoint import Source
from lockstep.verify.probe import ProbeRequest

HEADERS = ("x-replica", "x-served-by", "x-backend", "x-instance-id", "x-pod-name", "x-upstream")
SHOWN = 100  # characters of a name

_seen: ContextVar[list[str] | None] = ContextVar("seen", default=None)


class ReplicaTransport(httpx.AsyncBaseTransport):
    """Passes requests on, and tells `ask` what replies say about who made them.

    Args:
        headers: the first one that a reply has names the replica.
    """

    def __init__(
        self, inner: httpx.AsyncBaseTransport | None = None, headers: Sequence[str] = HEADERS
    ) -> None:
        self._inner = inner or httpx.AsyncHTTPTransport()
        self._headers = tuple(headers)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """As httpx has it."""
        reply = await self._inner.handle_async_request(request)
        seen = _seen.get()
        if seen is not None:
            names = [reply.headers[name] for name in self._headers if name in reply.headers]
            seen.extend(name[:SHOWN] for name in names[:1])
        return reply

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()


async def ask(source: Source, request: ProbeRequest) -> Answered:
    """What a request gave, and the replica that answered it."""
    seen: list[str] = []
    token = _seen.set(seen)
    try:
        reading = await source.ask(request)
    finally:
        _seen.reset(token)
    return Answered(reading, seen[-1] if seen else reading.fingerprint[:SHOWN])
