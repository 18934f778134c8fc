"""Input items as clients write them, and the conversation that a chat template reads.

A client may send back any item that it was given, so whatever OpenAI's clients add to
one (ids, statuses, parsed values, nulls) is taken too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import UNSET
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from lockstep.server.responses.objects import (
    AnyItem,
    FunctionCall,
    FunctionCallOutput,
    InputText,
    ItemStatus,
    Message,
    OutputText,
    Reasoning,
    ReasoningText,
    Refusal,
    SummaryText,
    new_id,
)
from lockstep.server.responses.parts import (
    MESSAGE,
    REASONING,
    TEXT,
    is_nothing,
    read_parts,
    unknown,
)
from lockstep.types import RequestError

MAX_ITEMS = 8192
MAX_ID = 128  # characters


class _Input(BaseModel):
    """Base of input items: other fields may be present if they are null or empty."""

    model_config = ConfigDict(strict=True, extra="allow")

    def refuse_unknown(self, where: str) -> None:
        """
        Raises:
            RequestError: a field that this server does not know, with a value.
        """
        for name, value in (self.model_extra or {}).items():
            if not is_nothing(value):
                raise unknown(f"{where}.{name}")


def _text_or(several: str) -> Discriminator:
    """Chooses between a string and a list, so that errors are about the one that was sent."""

    def tag(value: Any) -> str | None:
        return "text" if isinstance(value, str) else several if isinstance(value, list) else None

    return Discriminator(
        tag,
        custom_error_type="text_or_list",
        custom_error_message=f"must be a string or a list of {several}",
    )


TextOrParts = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[Any], Tag("parts")],  # see `parts`
    _text_or("parts"),
]
ItemId = Annotated[str, Field(min_length=1, max_length=MAX_ID)]


class InputMessage(_Input):
    """A message, in its short or its long form."""

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: TextOrParts
    id: ItemId | None = None
    status: ItemStatus | None = None
    phase: Literal["commentary", "final_answer"] | None = None

    def item(self, where: str) -> Message:
        """The message as it is kept."""
        own = self.role == "assistant"
        parts = self.content
        if isinstance(parts, str):
            parts = [{"type": "input_text", "text": parts}]
        content: list[InputText | OutputText | Refusal] = []
        for kind, text in read_parts(parts, f"{where}.content", MESSAGE):
            if kind == "refusal":
                content.append(Refusal(refusal=text))
            else:
                content.append(OutputText(text=text) if own else InputText(text=text))
        return Message(
            id=self.id or new_id(Message),
            status=self.status or "completed",
            role=self.role,
            content=tuple(content),
            phase=self.phase or UNSET,
        )


class InputFunctionCall(_Input):
    """A call that the model made earlier."""

    type: Literal["function_call"]
    call_id: ItemId
    name: str
    arguments: str
    id: ItemId | None = None
    status: ItemStatus | None = None
    caller: dict[str, Any] | None = None
    parsed_arguments: Any = None  # openai's `responses.parse` puts it there

    def item(self, where: str) -> FunctionCall:
        """The call as it is kept."""
        if self.caller not in (None, {"type": "direct"}):
            raise RequestError(f"{where}.caller must be 'direct'", field="input")
        return FunctionCall(
            id=self.id or new_id(FunctionCall),
            status=self.status or "completed",
            call_id=self.call_id,
            name=self.name,
            arguments=self.arguments,
        )


class InputFunctionCallOutput(_Input):
    """What a function of the client returned."""

    type: Literal["function_call_output"]
    call_id: ItemId
    output: TextOrParts
    id: ItemId | None = None
    status: ItemStatus | None = None
    name: str | None = None
    caller: dict[str, Any] | None = None

    def item(self, where: str) -> FunctionCallOutput:
        """The output as it is kept."""
        output: str | tuple[InputText, ...]
        if isinstance(self.output, str):
            output = self.output
        else:
            output = tuple(
                InputText(text=text) for _, text in read_parts(self.output, f"{where}.output", TEXT)
            )
        return FunctionCallOutput(
            id=self.id or new_id(FunctionCallOutput),
            status=self.status or "completed",
            call_id=self.call_id,
            output=output,
        )


class InputReasoning(_Input):
    """What the model thought earlier. Without `content` there is nothing to give back to it."""

    type: Literal["reasoning"]
    id: ItemId | None = None
    summary: list[Any] = Field(default_factory=list)
    content: list[Any] | None = None
    encrypted_content: str | None = None
    status: ItemStatus | None = None

    def item(self, where: str) -> Reasoning:
        """The reasoning as it is kept."""
        return Reasoning(
            id=self.id or new_id(Reasoning),
            status=self.status or "completed",
            summary=tuple(
                SummaryText(text=text)
                for _, text in read_parts(self.summary, f"{where}.summary", REASONING)
            ),
            content=tuple(
                ReasoningText(text=text)
                for _, text in read_parts(self.content or (), f"{where}.content", REASONING)
            ),
            encrypted_content=self.encrypted_content,
        )


class ItemReference(_Input):
    """An output item of a stored response, by its id."""

    type: Literal["item_reference"] | None = None
    id: ItemId


class OtherItem(_Input):
    """An item of a type that this server does not take."""

    type: Any = None


_ITEMS = {
    "message": "message",
    "function_call": "call",
    "function_call_output": "output",
    "reasoning": "reasoning",
    "item_reference": "reference",
}


def _type_of(value: Any) -> Any:
    return value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)


def _item_tag(value: Any) -> str:
    kind = _type_of(value)
    if kind is None and isinstance(value, Mapping):
        return "message" if "role" in value else "reference" if "id" in value else "other"
    return _ITEMS.get(kind, "other") if isinstance(kind, str) else "other"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputFunctionCall, Tag("call")]
    | Annotated[InputFunctionCallOutput, Tag("output")]
    | Annotated[InputReasoning, Tag("reasoning")]
    | Annotated[ItemReference, Tag("reference")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(_item_tag),
]

TextOrItems = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[InputItem], Field(max_length=MAX_ITEMS, fail_fast=True), Tag("items")],
    _text_or("items"),
]


def read(items: Sequence[BaseModel], find: Callable[[str], AnyItem | None]) -> tuple[AnyItem, ...]:
    """The items as they are kept, each with an id.

    Args:
        find: an output item of a stored response by its id, for references.

    Raises:
        RequestError: an item or a part of a type that this server does not take, a field
            that it does not know, or a reference to what is not stored.
    """
    result: list[AnyItem] = []
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if isinstance(item, ItemReference):
            found = find(item.id)
            if found is None:
                raise RequestError(
                    f"{where}: no stored response has an output item {item.id!r}",
                    field="input",
                    code="item_not_found",
                )
            result.append(found)
        elif isinstance(
            item, InputMessage | InputFunctionCall | InputFunctionCallOutput | InputReasoning
        ):
            item.refuse_unknown(where)
            result.append(item.item(where))
        else:
            raise RequestError(
                f"{where}: items of type {_type_of(item)!r} are not supported by this server; "
                f"there are {', '.join(_ITEMS)}",
                field="input",
                code="unsupported_parameter",
            )
    return tuple(result)


def user_message(text: str) -> Message:
    """What an input that is one string stands for."""
    return Message(id=new_id(Message), role="user", content=(InputText(text=text),))


def messages_of(instructions: str | None, items: Sequence[AnyItem]) -> list[dict[str, Any]]:
    """The items as OpenAI's chat messages.

    What the model wrote in one turn (reasoning, text, calls) becomes one assistant message,
    as a chat client would send it back.

    Raises:
        RequestError: a call without its output right behind it, or an output without its call.
    """
    conversation = _Conversation()
    if instructions is not None:
        conversation.say("system", instructions)
    for item in items:
        match item:
            case Message(role="assistant"):
                conversation.text(_joined(item.content))
            case Message():
                role = "system" if item.role == "developer" else item.role
                conversation.say(role, _joined(item.content))
            case Reasoning(content=content) if content:
                conversation.thought("".join(part.text for part in content))
            case FunctionCall():
                conversation.call(item)
            case FunctionCallOutput(output=output):
                text = output if isinstance(output, str) else _joined(output)
                conversation.result(item.call_id, text)
    conversation.end_turn()
    return conversation.messages


class _Conversation:
    """Chat messages under construction."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._turn: dict[str, Any] | None = None  # the assistant's message, still open
        self._waiting: dict[str, None] = {}  # ids of calls without a result

    def say(self, role: str, text: str) -> None:
        """A message of somebody else than the model."""
        self.end_turn()
        self.messages.append({"role": role, "content": text})

    def text(self, text: str) -> None:
        """Text of the model; behind other text without calls it is a message of its own."""
        if self._turn is not None and "content" in self._turn and "tool_calls" not in self._turn:
            self.end_turn()
        turn = self._open()
        turn["content"] = turn.get("content", "") + text

    def thought(self, text: str) -> None:
        """Reasoning of the model: a turn begins with it."""
        if self._turn is not None and self._turn.keys() & {"content", "tool_calls"}:
            self.end_turn()
        turn = self._open()
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def call(self, item: FunctionCall) -> None:
        """A call of the model."""
        turn = self._open()
        if item.call_id in self._waiting:
            raise RequestError(f"input: there are two calls {item.call_id!r}", field="input")
        self._waiting[item.call_id] = None
        function = {"name": item.name, "arguments": item.arguments}
        turn.setdefault("tool_calls", []).append(
            {"id": item.call_id, "type": "function", "function": function}
        )

    def result(self, call_id: str, text: str) -> None:
        """What a call gave."""
        if call_id not in self._waiting:
            raise RequestError(
                f"input: the function_call_output of {call_id!r} answers no function_call "
                "before it",
                field="input",
            )
        del self._waiting[call_id]
        self._turn = None
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def end_turn(self) -> None:
        """Somebody else is about to speak, or the model anew."""
        self._turn = None
        for call_id in self._waiting:
            raise RequestError(
                f"input: the function_call {call_id!r} has no function_call_output behind it",
                field="input",
            )

    def _open(self) -> dict[str, Any]:
        if self._turn is None:
            self.end_turn()
            self._turn = {"role": "assistant"}
            self.messages.append(self._turn)
        return self._turn


def _joined(parts: Sequence[InputText | OutputText | Refusal]) -> str:
    return "".join(part.refusal if isinstance(part, Refusal) else part.text for part in parts)
