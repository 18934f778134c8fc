"""`POST /tokenize` and `POST /detokenize`: vLLM's shapes.

`token_strs` are the tokens as logprobs show them: readable text, not names of a vocabulary.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from pydantic import Field
from starlette.responses import Response

from lockstep.requests import RequestBuilder
from lockstep.server.conversation import prepare
from lockstep.server.generation import Service, off_loop, service_of
from lockstep.server.openapi import returns
from lockstep.server.paths import PathRoute
from lockstep.server.protocol import MAX_MESSAGES, Body
from lockstep.server.protocol.chat import ChatMessageBody
from lockstep.server.protocol.tools import ToolBody, functions_of
from lockstep.server.replies import Reply, encode
from lockstep.text.turn import Turn
from lockstep.types import RequestError, SamplingParams

router = APIRouter(route_class=PathRoute)


class TokenizeBody(Body):
    """Body of `POST /tokenize`: a prompt or messages.

    Attributes:
        model: by default the one that is served.
        add_special_tokens: what the model wants around every prompt, as completions have it by
            default; a chat template writes it itself.
        add_generation_prompt: open the assistant's turn behind the messages.
        return_token_strs: every token as text beside its id.
    """

    model: str | None = None
    prompt: str | None = None
    messages: (
        Annotated[list[ChatMessageBody], Field(min_length=1, max_length=MAX_MESSAGES)] | None
    ) = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    tools: list[ToolBody] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """Body of `POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


class TokenizeReply(Reply):
    """Token ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(Reply):
    """The text of token ids; bytes that are no UTF-8 become U+FFFD."""

    prompt: str


@router.post("/tokenize", responses=returns(TokenizeReply))
async def tokenize(body: TokenizeBody, request: HTTPRequest) -> Response:
    """The token ids of a prompt or of messages, as the generating routes would read them."""
    service = _checked(request, body.model)
    builder = service.builder
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give prompt or messages, one of them", field="prompt")
    characters = len(body.prompt or "")
    characters += sum(len(str(m.content)) + len(str(m.tool_calls)) for m in body.messages or ())
    ids = await off_loop(
        lambda: (
            _prompt_ids(builder, body) if body.messages is None else _message_ids(service, body)
        ),
        characters,
    )
    reply = TokenizeReply(
        count=len(ids),
        max_model_len=service.llm.info.max_context,
        tokens=ids,
        token_strs=list(map(builder.tokenizer.token_text, ids)) if body.return_token_strs else None,
    )
    return Response(encode(reply), media_type="application/json")


@router.post("/detokenize", responses=returns(DetokenizeReply))
async def detokenize(body: DetokenizeBody, request: HTTPRequest) -> Response:
    """The text that token ids stand for, control tokens included."""
    builder = _checked(request, body.model).builder
    ids = builder.encode(body.tokens, field="tokens") if body.tokens else []
    text = await off_loop(
        lambda: builder.tokenizer.decode(ids, skip_special_tokens=False), len(ids)
    )
    return Response(encode(DetokenizeReply(prompt=text)), media_type="application/json")


def _checked(request: HTTPRequest, model: str | None) -> Service:
    service = service_of(request)
    if model is not None:
        service.check_model(model)
    return service


def _prompt_ids(builder: RequestBuilder, body: TokenizeBody) -> list[int]:
    for name in ("tools", "chat_template_kwargs"):
        if getattr(body, name) is not None:
            raise RequestError(f"{name} needs messages", field=name)
    if not body.prompt:
        return []
    return builder.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)


def _message_ids(service: Service, body: TokenizeBody) -> list[int]:
    if body.add_special_tokens:
        raise RequestError(
            "add_special_tokens: the chat template writes the special tokens of messages itself",
            field="add_special_tokens",
        )
    turn = Turn(
        messages=[message.rendered(index) for index, message in enumerate(body.messages or ())],
        functions=functions_of(body.tools),
        template_arguments=body.chat_template_kwargs,
    )
    if body.add_generation_prompt:
        return prepare(service, turn, SamplingParams()).ids
    tokenizer = service.llm.tokenizer
    text = service.builder.show(turn).text(tokenizer, opened=False)
    return tokenizer.encode(text, add_special_tokens=False)
