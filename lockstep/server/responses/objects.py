"""What `/v1/responses` stores and sends: a response, its items and their parts.

One struct a JSON object; names and nesting are OpenAI's. Items are what a conversation is
made of: the input that a client sent and the output of the model, in one order. They are
frozen: an item is made once, when all of it is known.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from lockstep.server.replies import ChatLogprob, Reply

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["in_progress", "completed", "incomplete", "failed"]


class Part(msgspec.Struct, kw_only=True, frozen=True, tag_field="type"):
    """A piece of an item's content; `type` says which."""


class InputText(Part, frozen=True, tag="input_text"):
    """Text that the client wrote, or that a tool returned."""

    text: str


class OutputText(Part, frozen=True, tag="output_text"):
    """Text that the model wrote. `annotations` is always empty: no tool here cites."""

    text: str = ""
    annotations: tuple[()] = ()
    logprobs: tuple[ChatLogprob, ...] = ()


class Refusal(Part, frozen=True, tag="refusal"):
    """A refusal that a client sends back from another server; none is made here."""

    refusal: str


class ReasoningText(Part, frozen=True, tag="reasoning_text"):
    """What the model thought, word for word."""

    text: str = ""


class SummaryText(Part, frozen=True, tag="summary_text"):
    """A summary of reasoning that a client sends back; none is made here."""

    text: str


class Item(msgspec.Struct, kw_only=True, frozen=True, tag_field="type"):
    """One item of a conversation."""

    id: str
    status: ItemStatus = "completed"


class Message(Item, frozen=True, tag="message"):
    """A message; the assistant's have `output_text` parts, all others `input_text` parts."""

    role: Literal["user", "system", "developer", "assistant"]
    content: tuple[InputText | OutputText | Refusal, ...] = ()
    phase: str | UnsetType = UNSET


class FunctionCall(Item, frozen=True, tag="function_call"):
    """A call that the model made; `arguments` is JSON text (cut short if incomplete)."""

    call_id: str
    name: str
    arguments: str = ""


class FunctionCallOutput(Item, frozen=True, tag="function_call_output"):
    """What the client's function returned."""

    call_id: str
    output: str | tuple[InputText, ...]


class Reasoning(Item, frozen=True, tag="reasoning"):
    """What the model thought before it answered or called."""

    summary: tuple[SummaryText, ...] = ()
    content: tuple[ReasoningText, ...] = ()
    encrypted_content: str | None = None


AnyItem = Message | FunctionCall | FunctionCallOutput | Reasoning

_PREFIXES: dict[type[Item], str] = {
    Message: "msg",
    FunctionCall: "fc",
    FunctionCallOutput: "fco",
    Reasoning: "rs",
}


def new_id(kind: type[Item]) -> str:
    """A fresh id for an item of this kind."""
    return f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"


class InputTokensDetails(Reply):
    """Where input tokens came from; `cache_write_tokens` were computed and kept for later."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokensDetails(Reply):
    """What output tokens were for."""

    reasoning_tokens: int = 0


class ResponseUsage(Reply):
    """Token counts of one response."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens_details: OutputTokensDetails


class ResponseError(Reply):
    """Why a response failed."""

    message: str
    code: str = "server_error"


class IncompleteDetails(Reply):
    """Why a response ends early."""

    reason: str


class ReasoningSettings(Reply):
    """What was asked for about reasoning."""

    effort: str | None = None
    summary: str | None = None


class TextSettings(Reply):
    """What was asked for about text."""

    format: dict[str, Any] = msgspec.field(default_factory=lambda: {"type": "text"})
    verbosity: str = "medium"


class Response(Reply):
    """One response. What does not apply here is sent with the value that says so.

    Attributes:
        output: items that are done; the one under way stands in no response.
        system_fingerprint: extension: changes whenever bits may change.
    """

    id: str
    created_at: int
    model: str
    system_fingerprint: str
    status: Status = "in_progress"
    output: tuple[AnyItem, ...] = ()
    usage: ResponseUsage | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    completed_at: int | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_logprobs: int = 0
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    reasoning: ReasoningSettings = msgspec.field(default_factory=ReasoningSettings)
    text: TextSettings = msgspec.field(default_factory=TextSettings)
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    store: bool = True
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str = "default"
    truncation: str = "disabled"
    background: bool = False
    object: str = "response"


class Deleted(Reply):
    """Reply of `DELETE /v1/responses/{id}`."""

    id: str
    object: str = "response"
    deleted: bool = True


class ItemList(Reply):
    """One page of a response's input items."""

    data: tuple[AnyItem, ...]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class InputTokens(Reply):
    """Reply of `POST /v1/responses/input_tokens`."""

    input_tokens: int
    object: str = "response.input_tokens"


_encode_items = msgspec.json.Encoder().encode
_decode_items = msgspec.json.Decoder(tuple[AnyItem, ...]).decode


def pack(items: Sequence[AnyItem]) -> bytes:
    """Items as the store keeps them."""
    return _encode_items(items)


def unpack(data: bytes) -> tuple[AnyItem, ...]:
    """The items of `pack`, equal to what they were."""
    return _decode_items(data)
