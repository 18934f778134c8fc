"""What the server says about itself: `/health`, `/ready`, `/stats`, `/metrics`."""

from __future__ import annotations

import time
from collections import deque

import msgspec
from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from starlette.responses import Response

from lockstep.engine.client import EngineState, EngineUnavailable
from lockstep.server import errors
from lockstep.server.admin import operations_of
from lockstep.server.generation import service_of
from lockstep.server.metrics import CONTENT_TYPE
from lockstep.server.openapi import returns, returns_other
from lockstep.types import EngineInfo, EngineStats

router = APIRouter()

RATE_WINDOW_SECONDS = 10.0


class Health(msgspec.Struct):
    """Reply of `GET /health`."""

    status: str
    model: str
    engine: str
    restarts: int


class Ready(msgspec.Struct):
    """Reply of `GET /ready`."""

    status: str


class Stats(msgspec.Struct):
    """Reply of `GET /stats`.

    Attributes:
        tokens_per_second: generated tokens over the time between the polls of the last
            ten seconds; 0 on the first poll.
        cache_hit_rate: share of admitted prompt tokens that came from the prefix cache.
        branch_bytes: of the device's memory that each loaded branch holds, beside the trunk's
            `info.weight_bytes`.
    """

    state: str
    running: int
    waiting: int
    tokens_per_second: float
    cache_hit_rate: float
    restarts: int
    engine: EngineStats
    info: EngineInfo
    branch_bytes: dict[str, int]


class Throughput:
    """Tokens per second from a counter that is looked at now and then."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def sample(self, now: float, count: int) -> float:
        """The rate since the oldest sample of the window."""
        if self._samples and count < self._samples[-1][1]:
            self._samples.clear()  # a restarted engine counts from zero
        self._samples.append((now, count))
        while now - self._samples[0][0] > RATE_WINDOW_SECONDS and len(self._samples) > 2:
            self._samples.popleft()
        before, counted = self._samples[0]
        return (count - counted) / (now - before) if now > before else 0.0


@router.head("/health", include_in_schema=False)
@router.get("/health", responses=returns(Health))
async def health(request: HTTPRequest) -> Response:
    """200 while this process runs: a restarting engine is no reason to kill the server."""
    service = service_of(request)
    client = service.llm.client
    body = Health(
        status="ok", model=service.model_name, engine=client.state, restarts=client.restarts
    )
    return Response(msgspec.json.encode(body), media_type="application/json")


@router.head("/ready", include_in_schema=False)
@router.get("/ready", responses=returns(Ready))
async def ready(request: HTTPRequest) -> Response:
    """200 when requests are taken, else 503 with the reason: for load balancers."""
    client = service_of(request).llm.client
    operations = operations_of(request)
    if operations.draining:
        return errors.response(operations.refusal())
    if client.state is not EngineState.READY:
        return errors.response(
            EngineUnavailable(f"the engine is {client.state}", retry_after=client.retry_after)
        )
    return Response(msgspec.json.encode(Ready(status="ready")), media_type="application/json")


@router.get("/metrics", responses=returns_other("text/plain"))
async def metrics(request: HTTPRequest) -> Response:
    """For Prometheus."""
    text = operations_of(request).metrics.text()
    return Response(text, headers={"Content-Type": CONTENT_TYPE})


@router.get("/stats", responses=returns(Stats))
async def stats(request: HTTPRequest) -> Response:
    """Gauges and counters of the engine."""
    service = service_of(request)
    client = service.llm.client
    engine = service.llm.stats()
    throughput: Throughput = request.app.state.throughput
    body = Stats(
        state=client.state,
        running=engine.running,
        waiting=engine.waiting,
        tokens_per_second=throughput.sample(time.monotonic(), engine.generated_tokens),
        cache_hit_rate=engine.cached_tokens / max(1, engine.prompt_tokens),
        restarts=client.restarts,
        engine=engine,
        info=service.llm.info,
        branch_bytes={name: own.weight_bytes for name, own in service.branches.items()},
    )
    return Response(msgspec.json.encode(body), media_type="application/json")
