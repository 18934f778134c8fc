"""`/admin`: draining, what runs, ending it, the cache. Needs an admin key; off without one."""

from __future__ import annotations

import time

import msgspec
from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from starlette.responses import Response

from lockstep.server.errors import NotFound
from lockstep.server.generation import service_of
from lockstep.server.openapi import returns
from lockstep.server.operations import Operations, Watch

router = APIRouter(prefix="/admin", tags=["admin"])


class DrainState(msgspec.Struct):
    """Reply of `POST /admin/drain` and `/admin/undrain`."""

    draining: bool
    in_flight: int  # engine requests


class LiveRequest(msgspec.Struct):
    """A request in the engine, in the reply of `GET /admin/requests`."""

    id: str
    request_id: str | None  # the HTTP request's; None for the server's own work
    path: str | None
    client: str | None
    key: str | None
    seconds: float
    priority: int
    choices: int
    prompt_tokens: int
    generated_tokens: int


class LiveRequests(msgspec.Struct):
    """Reply of `GET /admin/requests`, the oldest first."""

    data: list[LiveRequest]
    object: str = "list"


class Cancelled(msgspec.Struct):
    """Reply of `POST /admin/cancel/{name}`: what was ended."""

    cancelled: list[str]


class CacheStats(msgspec.Struct):
    """Reply of `GET /admin/cache`.

    Attributes:
        pages_used: held by live sequences. pages_cached: only kept for reuse.
        queries, hits: prompt tokens looked up and found since the engine started.
    """

    page_tokens: int
    pages_total: int
    pages_used: int
    pages_cached: int
    pages_free: int
    queries: int
    hits: int
    hit_rate: float
    preemptions: int


class Flushed(msgspec.Struct):
    """Reply of `POST /admin/cache/flush`."""

    flushed: bool


def operations_of(request: HTTPRequest) -> Operations:
    """The operations behind a request."""
    operations: Operations = request.app.state.operations
    return operations


@router.post("/drain", responses=returns(DrainState))
async def drain(request: HTTPRequest) -> Response:
    """Turn new requests away; what runs goes on."""
    operations = operations_of(request)
    operations.drain()
    return _json(DrainState(draining=True, in_flight=len(operations.live)))


@router.post("/undrain", responses=returns(DrainState))
async def undrain(request: HTTPRequest) -> Response:
    """Take requests again."""
    operations = operations_of(request)
    operations.undrain()
    return _json(DrainState(draining=False, in_flight=len(operations.live)))


@router.get("/requests", responses=returns(LiveRequests))
async def list_requests(request: HTTPRequest) -> Response:
    """What is in the engine."""
    now = time.monotonic()
    live = operations_of(request).live.values()
    return _json(LiveRequests(data=[_shown(watch, now) for watch in live]))


@router.post("/cancel/{name}", responses=returns(Cancelled))
async def cancel(name: str, request: HTTPRequest) -> Response:
    """End requests; `name` is an id of theirs, of their answer's, or an `x-request-id`."""
    ended = operations_of(request).cancel(name)
    if not ended:
        raise NotFound(f"nothing called {name!r} runs here", code="request_not_found")
    return _json(Cancelled(cancelled=ended))


@router.get("/cache", responses=returns(CacheStats))
async def cache_statistics(request: HTTPRequest) -> Response:
    """The page pool and how often it served a prefix."""
    llm = service_of(request).llm
    stats, info = llm.stats(), llm.info
    return _json(
        CacheStats(
            page_tokens=info.page_tokens,
            pages_total=stats.pages_total,
            pages_used=stats.pages_used,
            pages_cached=stats.pages_cached,
            pages_free=stats.pages_total - stats.pages_used - stats.pages_cached,
            queries=stats.prompt_tokens,
            hits=stats.cached_tokens,
            hit_rate=stats.cached_tokens / max(1, stats.prompt_tokens),
            preemptions=stats.preemptions,
        )
    )


@router.post("/cache/flush", responses=returns(Flushed))
async def flush_cache(request: HTTPRequest) -> Response:
    """Forget every prefix that no live sequence reads, before any later request."""
    service_of(request).llm.flush_cache()
    return _json(Flushed(flushed=True))


def _shown(watch: Watch, now: float) -> LiveRequest:
    request, call = watch.request, watch.call
    return LiveRequest(
        id=request.id,
        request_id=call.id if call else None,
        path=call.path if call else None,
        client=call.client if call else None,
        key=call.key.name if call and call.key else None,
        seconds=round(now - watch.submitted, 3),
        priority=request.priority,
        choices=request.sampling.n,
        prompt_tokens=len(request.prompt),
        generated_tokens=watch.generated,
    )


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
