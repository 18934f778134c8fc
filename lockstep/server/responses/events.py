"""The typed events of a streamed response, one struct each.

`output_index` counts items, `content_index` parts of an item (there is only ever one),
and `sequence_number` every event of a response, from 0.
"""

from __future__ import annotations

import msgspec

from lockstep.server.replies import ChatLogprob
from lockstep.server.responses.objects import AnyItem, OutputText, ReasoningText, Response


class Event(msgspec.Struct, kw_only=True, frozen=True, tag_field="type"):
    """One server-sent event; `type` is also its name on the wire."""

    sequence_number: int


class Created(Event, frozen=True, tag="response.created"):
    """The first event: the response without output."""

    response: Response


class InProgress(Event, frozen=True, tag="response.in_progress"):
    """The engine has taken the request."""

    response: Response


class Completed(Event, frozen=True, tag="response.completed"):
    """The last event of a response that the model ended."""

    response: Response


class Incomplete(Event, frozen=True, tag="response.incomplete"):
    """The last event of a response that ran out of tokens."""

    response: Response


class Failed(Event, frozen=True, tag="response.failed"):
    """The last event of a response that the engine could not finish."""

    response: Response


class OutputItemAdded(Event, frozen=True, tag="response.output_item.added"):
    """An item begins, still empty."""

    output_index: int
    item: AnyItem


class OutputItemDone(Event, frozen=True, tag="response.output_item.done"):
    """An item is as it will stay."""

    output_index: int
    item: AnyItem


class _OfItem(Event, frozen=True):
    item_id: str
    output_index: int


class _OfPart(_OfItem, frozen=True):
    content_index: int


class ContentPartAdded(_OfPart, frozen=True, tag="response.content_part.added"):
    """A part of a message or of reasoning begins, still empty."""

    part: OutputText | ReasoningText


class ContentPartDone(_OfPart, frozen=True, tag="response.content_part.done"):
    """A part is as it will stay."""

    part: OutputText | ReasoningText


class OutputTextDelta(_OfPart, frozen=True, tag="response.output_text.delta"):
    """Characters to append to a text, and the logprobs of its new tokens."""

    delta: str
    logprobs: tuple[ChatLogprob, ...]


class OutputTextDone(_OfPart, frozen=True, tag="response.output_text.done"):
    """A whole text and the logprobs of its tokens."""

    text: str
    logprobs: tuple[ChatLogprob, ...]


class ReasoningTextDelta(_OfPart, frozen=True, tag="response.reasoning_text.delta"):
    """Characters to append to reasoning."""

    delta: str


class ReasoningTextDone(_OfPart, frozen=True, tag="response.reasoning_text.done"):
    """Reasoning in whole."""

    text: str


class FunctionCallArgumentsDelta(
    _OfItem, frozen=True, tag="response.function_call_arguments.delta"
):
    """Characters to append to a call's arguments."""

    delta: str


class FunctionCallArgumentsDone(_OfItem, frozen=True, tag="response.function_call_arguments.done"):
    """A call's arguments in whole."""

    arguments: str


AnyEvent = (
    Created
    | InProgress
    | Completed
    | Incomplete
    | Failed
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | FunctionCallArgumentsDelta
    | FunctionCallArgumentsDone
)

_encode = msgspec.json.Encoder().encode


def frame(event: Event) -> bytes:
    """An event as it stands in the stream."""
    name: str = type(event).__struct_config__.tag  # type: ignore[assignment]
    return b"event: " + name.encode() + b"\ndata: " + _encode(event) + b"\n\n"
