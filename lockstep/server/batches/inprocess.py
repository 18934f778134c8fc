"""A request to the application without a socket, and the engine at low priority.

A batch line takes the same route as a client's request, with the same checks and the same
reply. What stands before the routes for the sake of clients (keys, rates, logs) is left out:
the batch was checked when it came in.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import State
from starlette.types import Message, Scope

from lockstep.async_llm import AnswerStream, AsyncLLM
from lockstep.requests import MAX_PRIORITY
from lockstep.server import calls
from lockstep.server.auth import Key
from lockstep.server.calls import Call
from lockstep.server.generation import Service
from lockstep.types import Request

BACKGROUND = 1_000_000  # added to a line's own priority, so that a client's request comes first


class BackgroundLLM(AsyncLLM):
    """A door on a started engine whose requests yield to those of every other door."""

    def __init__(self, llm: AsyncLLM) -> None:
        vars(self).update(vars(llm))  # everything is shared
        self._llm = llm

    async def submit(
        self,
        requests: Sequence[Request],
        *,
        shown: frozenset[int] = frozenset(),
        begins: Sequence[Sequence[str]] = (),
    ) -> list[AnswerStream]:
        """As `AsyncLLM.submit`, behind what is not background work."""
        return await self._llm.submit(
            [replace(request, priority=_lowered(request.priority)) for request in requests],
            shown=shown,
            begins=begins,
        )


def _lowered(priority: int) -> int:
    """Lines of a batch keep their order among each other."""
    return min(MAX_PRIORITY, BACKGROUND + max(-BACKGROUND + 1, priority))


class InProcess:
    """Calls an application's routes, past its middleware, as background work."""

    def __init__(self, app: FastAPI) -> None:
        service: Service = app.state.service
        background = replace(service, llm=BackgroundLLM(service.llm))
        self._app = copy.copy(app)
        self._app.user_middleware = []
        self._app.middleware_stack = None
        # Everything else that routes keep in the application's state is shared.
        self._app.state = State({**app.state._state, "service": background})

    async def post(self, path: str, body: bytes, owner: str) -> tuple[int, bytes]:
        """Status and body of the reply to a JSON body; cancelling the call ends the request.

        Args:
            owner: name of the key that the line belongs to; "" without keys.
        """
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [
                (b"host", b"batch"),
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
            ],
            "client": ("batch", 0),
            "server": ("batch", 80),
        }
        incoming: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        status = 500
        reply = bytearray()

        async def receive() -> Message:
            if incoming:
                return incoming.pop()
            await asyncio.Event().wait()  # this client never hangs up
            raise AssertionError

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                reply.extend(message.get("body", b""))

        # Nobody waits for the line, but it is somebody's: for accounts and for what it stores.
        call = Call(
            id="", method="POST", path=path, key=Key(owner, "") if owner else None, ended=True
        )
        token = calls.current.set(call)
        try:
            await self._app(scope, receive, send)
        except Exception:  # Starlette raises it again behind the reply, for the server to log
            if not reply:
                raise
        finally:
            calls.current.reset(token)
        return status, bytes(reply)


def batch_endpoints(app: FastAPI) -> frozenset[str]:
    """The paths under /v1 that take a JSON body and answer with one: what a batch may name."""
    return frozenset(
        path
        for path, methods in app.openapi()["paths"].items()
        if "post" in methods and _is_batchable(path, methods["post"])
    )


def _is_batchable(path: str, operation: Mapping[str, Any]) -> bool:
    content: Iterable[str] = operation.get("requestBody", {}).get("content", {})
    own = path.startswith(("/v1/files", "/v1/batches"))
    return path.startswith("/v1/") and "{" not in path and not own and "application/json" in content
