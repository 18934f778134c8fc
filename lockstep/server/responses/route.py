"""The routes under `/v1/responses`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from fastapi import Request as HTTPRequest
from starlette.responses import Response as HTTPResponse

from lockstep.config import ServerConfig
from lockstep.server import calls, replies
from lockstep.server.errors import NotFound
from lockstep.server.generation import service_of
from lockstep.server.openapi import returns
from lockstep.server.responses.bodies import ResponseBody
from lockstep.server.responses.call import Call, count
from lockstep.server.responses.events import AnyEvent, Event, frame
from lockstep.server.responses.objects import Deleted, InputTokens, ItemList, Response
from lockstep.server.responses.store import Limits, ResponseStore
from lockstep.server.sse import FrameStream, until_disconnect
from lockstep.types import RequestError

router = APIRouter(prefix="/v1/responses")

MAX_PAGE = 100


def make_store(config: ServerConfig) -> ResponseStore:
    """A store as large as the server's settings say; stands at `app.state.responses`."""
    return ResponseStore(
        Limits(
            config.stored_responses,
            config.stored_response_bytes,
            config.stored_response_seconds,
        )
    )


@router.post("", responses=returns(Response, event=AnyEvent))
async def create_response(body: ResponseBody, request: HTTPRequest) -> HTTPResponse:
    """The model's next items in a conversation."""
    submitting = Call.submit(service_of(request), _store(request), calls.owner(), body)
    call = await until_disconnect(request, submitting)
    if body.stream:
        return FrameStream(_frames(call.stream()), call.cancel)
    try:
        response = await until_disconnect(request, call.whole())
    finally:
        call.cancel()
    return _json(replies.encode(response))


@router.post("/input_tokens", responses=returns(InputTokens))
async def count_input_tokens(body: ResponseBody, request: HTTPRequest) -> HTTPResponse:
    """How many tokens the model would read; nothing is computed."""
    tokens = await count(service_of(request), _store(request), calls.owner(), body)
    return _json(replies.encode(InputTokens(input_tokens=tokens)))


@router.get("/{response_id}", responses=returns(Response))
async def get_response(
    response_id: str, request: HTTPRequest, stream: bool = False
) -> HTTPResponse:
    """A stored response, as it was when it ended."""
    if stream:
        raise RequestError(
            "stream: only responses that run in the background can be streamed later, and this "
            "server has none",
            field="stream",
            code="unsupported_parameter",
        )
    reply = _store(request).reply(calls.owner(), response_id)
    if reply is None:
        raise _unknown(response_id)
    return _json(reply)


@router.delete("/{response_id}", responses=returns(Deleted))
async def delete_response(response_id: str, request: HTTPRequest) -> HTTPResponse:
    """Forget a stored response. What was built on it keeps the conversation."""
    if not _store(request).delete(calls.owner(), response_id):
        raise _unknown(response_id)
    return _json(replies.encode(Deleted(id=response_id)))


@router.post("/{response_id}/cancel")
async def cancel_response(response_id: str, request: HTTPRequest) -> HTTPResponse:
    """Always refused: what is stored has ended, and nothing runs in the background."""
    if _store(request).reply(calls.owner(), response_id) is None:
        raise _unknown(response_id)
    raise RequestError(
        f"the response {response_id!r} has ended; to cancel one under way, close its connection",
        field="response_id",
        code="not_cancellable",
    )


@router.get("/{response_id}/input_items", responses=returns(ItemList))
async def list_input_items(
    response_id: str,
    request: HTTPRequest,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> HTTPResponse:
    """What the model read for a stored response, the conversation before it included."""
    turn = _store(request).turn(calls.owner(), response_id)
    if turn is None:
        raise _unknown(response_id)
    found = turn.inputs()
    if order == "desc":
        found = found[::-1]
    if after is not None:
        places = [index for index, item in enumerate(found) if item.id == after]
        if not places:
            raise RequestError(f"after: there is no input item {after!r}", field="after")
        found = found[places[0] + 1 :]
    page = found[:limit]
    reply = ItemList(
        data=page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=len(found) > len(page),
    )
    return _json(replies.encode(reply))


async def _frames(steps: AsyncGenerator[list[Event], None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(steps):
        async for made in steps:
            yield b"".join(frame(event) for event in made)


def _store(request: HTTPRequest) -> ResponseStore:
    store: ResponseStore = request.app.state.responses
    return store


def _unknown(response_id: str) -> NotFound:
    return NotFound(
        f"there is no stored response {response_id!r}",
        field="response_id",
        code="response_not_found",
    )


def _json(body: bytes) -> HTTPResponse:
    return HTTPResponse(body, media_type="application/json")
