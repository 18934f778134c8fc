"""OpenAI's input items as the messages that a client of chat completions would send.

So that a decision about a conversation reads what a chat reads. A call of a tool that takes
text is one of a function that takes `input`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from lockstep.server.protocol.body import Body
from lockstep.server.protocol.parts import json_text
from lockstep.types import RequestError

MAX_ITEMS = 8192


class TextPart(Body):
    """Text. The breakpoint is accepted: prefixes are shared down to the token anyway."""

    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None


class JSONPart(Body):
    """JSON, shown as text."""

    type: Literal["input_json"]
    data: dict[str, Any] | list[dict[str, Any]]


class ImagePart(Body):
    """An image, which no model here can see."""

    type: Literal["input_image"]
    image_url: str | None = None
    detail: str | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class OutputTextPart(Body):
    """What an assistant wrote."""

    type: Literal["output_text"]
    text: str


class RefusalPart(Body):
    """What an assistant refused with."""

    type: Literal["refusal"]
    refusal: str


InputPart = Annotated[TextPart | JSONPart | ImagePart, Field(discriminator="type")]
OutputPart = Annotated[OutputTextPart | RefusalPart, Field(discriminator="type")]
Part = TextPart | JSONPart | ImagePart | OutputTextPart | RefusalPart


class UserMessage(Body):
    """A message from the user."""

    role: Literal["user"]
    content: str | list[InputPart]
    type: Literal["message"] = "message"


class SystemMessage(Body):
    """Instructions."""

    role: Literal["system", "developer"]
    content: str | list[TextPart]
    type: Literal["message"] = "message"


class AssistantMessage(Body):
    """A message from the assistant."""

    role: Literal["assistant"]
    content: str | list[OutputPart]
    phase: Literal["commentary", "final_answer"] | None = None
    type: Literal["message"] = "message"


Status = Literal["in_progress", "completed", "incomplete"]


class FunctionCall(Body):
    """The assistant called a function."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    namespace: str | None = None
    status: Status | None = None


class CustomToolCall(Body):
    """The assistant called a tool that takes text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    id: str | None = None
    namespace: str | None = None
    status: Status | None = None


class CallOutput(Body):
    """What a function or a tool returned."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | list[InputPart]
    id: str | None = None
    status: Status | None = None


def _kind(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    kind, role = value.get("type"), value.get("role")
    if kind in ("function_call", "custom_tool_call"):
        return str(kind)
    if kind in ("function_call_output", "custom_tool_call_output"):
        return "output"
    if kind in (None, "message") and role in ("user", "assistant", "system", "developer"):
        return "system" if role == "developer" else str(role)
    return None


Item = Annotated[
    Annotated[UserMessage, Tag("user")]
    | Annotated[SystemMessage, Tag("system")]
    | Annotated[AssistantMessage, Tag("assistant")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[CustomToolCall, Tag("custom_tool_call")]
    | Annotated[CallOutput, Tag("output")],
    Discriminator(
        _kind,
        custom_error_type="unknown_item",
        custom_error_message=(
            "must be a message of role user, assistant, system or developer, a function_call, "
            "a custom_tool_call, or the output of one"
        ),
    ),
]
Input = str | Annotated[list[Item], Field(max_length=MAX_ITEMS)]


def conversation(given: Input) -> str | list[dict[str, Any]]:
    """The input as a text, or as messages of a chat.

    Raises:
        RequestError: an image, an output without its call, JSON beyond its limits.
    """
    if not given:
        raise RequestError("input must not be empty", field="input")
    if isinstance(given, str):
        return given
    calls: set[tuple[str, str]] = set()
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(given):
        where = f"input[{index}]"
        match item:
            case UserMessage() | SystemMessage() | AssistantMessage():
                role = "system" if item.role == "developer" else item.role
                text = parts_text(item.content, f"{where}.content")
                messages.append({"role": role, "content": text})
            case FunctionCall():
                calls.add((item.type, item.call_id))
                _add_call(messages, item.call_id, item.name, item.arguments)
            case CustomToolCall():
                calls.add((item.type, item.call_id))
                arguments = json.dumps({"input": item.input}, ensure_ascii=False)
                _add_call(messages, f"{item.call_id} (text)", item.name, arguments)
            case CallOutput():
                kind = item.type.removesuffix("_output")
                if (kind, item.call_id) not in calls:
                    raise RequestError(
                        f"{where}.call_id: no {kind} before it has the id {item.call_id!r}",
                        field=f"{where}.call_id",
                    )
                own = item.call_id if kind == "function_call" else f"{item.call_id} (text)"
                text = parts_text(item.output, f"{where}.output")
                messages.append({"role": "tool", "tool_call_id": own, "content": text})
    return messages


def _add_call(messages: list[dict[str, Any]], own: str, name: str, arguments: str) -> None:
    """A call belongs to the assistant's message before it, as what the model wrote in one turn."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    call = {"id": own, "type": "function", "function": {"name": name, "arguments": arguments}}
    messages[-1].setdefault("tool_calls", []).append(call)


def parts_text(
    content: str | list[InputPart] | list[TextPart] | list[OutputPart], where: str
) -> str:
    """Content as one text, its parts on lines of their own.

    Raises:
        RequestError: an image, or JSON beyond its limits.
    """
    if isinstance(content, str):
        return content
    return "\n".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: Part, where: str) -> str:
    match part:
        case TextPart() | OutputTextPart():
            return part.text
        case RefusalPart():
            return part.refusal
        case JSONPart():
            return json_text(part.data, f"{where}.data")
        case ImagePart():
            raise RequestError(
                f"{where}: images are not supported by this server",
                field=where,
                code="unsupported_parameter",
            )
