"""The ASGI application."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import lockstep
from lockstep.async_llm import AsyncLLM
from lockstep.config import ConfigError, ServerConfig
from lockstep.server import (
    admin,
    admin_branches,
    chat,
    classify,
    completions,
    decisions,
    embeddings,
    errors,
    models,
    openapi,
    page,
    score,
    status,
    tokens,
)
from lockstep.server.batches import routes as batches
from lockstep.server.batches.runner import Batches
from lockstep.server.frontdoor import FrontDoor
from lockstep.server.generation import Service
from lockstep.server.operations import Operations
from lockstep.server.responses import route as responses
from lockstep.server.sse import ClientGone

FORM_BYTES = 64 * 1024  # of an upload, beside its file
EXPOSED_HEADERS = [
    "x-request-id",
    "retry-after",
    *(
        f"x-ratelimit-{what}-{kind}"
        for what in ("limit", "remaining", "reset")
        for kind in ("requests", "tokens")
    ),
]


def create_app(llm: AsyncLLM, config: ServerConfig | None = None) -> FastAPI:
    """An application over a started `AsyncLLM`; whoever started it closes it.

    Raises:
        ConfigError: a branch with the model's own name; see also `Operations`.
    """
    config = config or ServerConfig()
    app = FastAPI(
        title="Lockstep",
        version=lockstep.__version__,
        lifespan=_lifespan,
        redirect_slashes=False,  # to wherever the Host header says
        docs_url=None,  # FastAPI's pages run scripts from elsewhere beside the keys of ours
        redoc_url=None,
        responses=openapi.errors(),
    )
    app.state.service = service = Service(llm=llm, config=config, started=int(time.time()))
    if service.model_name in dict(llm.client.config.branches.load):
        raise ConfigError(f"branches: {service.model_name!r} is the name of the model itself")
    app.state.throughput = status.Throughput()
    app.state.operations = operations = Operations(llm, config)
    operations.metrics.tool_calls = service.tool_calls
    operations.metrics.decided = service.decided
    app.openapi = openapi.describe(app, operations)  # type: ignore[method-assign]
    for router in (
        page.router,
        status.router,
        admin.router,
        admin_branches.router,
        models.router,
        completions.router,
        chat.router,
        responses.router,
        decisions.router,
        classify.router,
        embeddings.router,
        score.router,
        tokens.router,
        batches.router,
    ):
        app.include_router(router)
    errors.install(app)
    app.state.batches = batches_running = Batches(app)
    operations.metrics.batches = lambda: batches_running.in_progress
    app.state.responses = responses.make_store(config)

    @app.exception_handler(ClientGone)
    async def on_client_gone(request: object, error: Exception) -> Response:
        return errors.client_closed()

    # The last one added is the outermost.
    uploads = {"/v1/files": config.max_file_bytes + FORM_BYTES}
    app.add_middleware(errors.OneShape)
    app.add_middleware(BodyLimit, limit=config.max_body_bytes, larger=uploads)
    app.add_middleware(FrontDoor, operations=operations)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """What works beside the requests."""
    batches: Batches = app.state.batches
    async with batches.running():
        yield


class BodyLimit:
    """Answers 413 to bodies over `limit` bytes, declared or counted.

    Args:
        larger: other limits, by path.
    """

    def __init__(self, app: ASGIApp, limit: int, larger: Mapping[str, int]) -> None:
        self._app = app
        self._limit = limit
        self._larger = larger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._larger.get(scope["path"], self._limit)
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > limit:
            response = errors.too_large(limit)
            await response(scope, receive, send)
            return
        counted = 0

        async def counting() -> Message:
            nonlocal counted
            message = await receive()
            counted += len(message.get("body", b""))
            if counted > limit:
                raise HTTPException(413, errors.too_large_message(limit))
            return message

        await self._app(scope, counting, send)
