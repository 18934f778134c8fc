"""The ASGI application."""

from __future__ import annotations

import time

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import lockstep
from lockstep.async_llm import AsyncLLM
from lockstep.config import ServerConfig
from lockstep.server import chat, completions, errors, models, page
from lockstep.server.generation import Service
from lockstep.server.sse import ClientGone

CLIENT_CLOSED_REQUEST = 499  # nobody reads it; it shows in the access log


def create_app(llm: AsyncLLM, config: ServerConfig | None = None) -> FastAPI:
    """An application over a started `AsyncLLM`; whoever started it closes it."""
    config = config or ServerConfig()
    app = FastAPI(title="Lockstep", version=lockstep.__version__)
    app.state.service = Service(llm=llm, config=config, started=int(time.time()))
    app.state.throughput = models.Throughput()
    for router in (page.router, models.router, completions.router, chat.router):
        app.include_router(router)
    errors.install(app)

    @app.exception_handler(ClientGone)
    async def on_client_gone(request: object, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_middleware(BodyLimit, limit=config.max_body_bytes)
    return app


class BodyLimit:
    """Answers 413 to bodies over `limit` bytes, declared or counted."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._limit:
            response = errors.too_large(self._limit)
            await response(scope, receive, send)
            return
        counted = 0

        async def counting() -> Message:
            nonlocal counted
            message = await receive()
            counted += len(message.get("body", b""))
            if counted > self._limit:
                raise HTTPException(413, errors.too_large_message(self._limit))
            return message

        await self._app(scope, counting, send)
