"""The body of `POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, SkipValidation

from lockstep.server.protocol.gate import GateBody
from lockstep.server.protocol.generation import GenerationBody
from lockstep.server.protocol.tools import (
    MAX_TOOLS,
    Choice,
    ToolBody,
    ToolCallBody,
    choice_of,
    functions_of,
)
from lockstep.text.turn import Turn
from lockstep.types import RequestError

MAX_MESSAGES = 8192
MAX_CALLS = 1024  # of one message


class ChatMessageBody(BaseModel):
    """One message. Fields that this server does not know may be present if null or empty."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | list[dict[str, Any]] | None, SkipValidation] = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCallBody], Field(max_length=MAX_CALLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def rendered(self, index: int) -> dict[str, Any]:
        """The message as a chat template reads it; "developer" is called "system" there.

        Raises:
            RequestError: content other than text, or a field that this server does not
                know or that belongs to another role.
        """
        for name, value in (self.model_extra or {}).items():
            if value not in (None, [], {}):
                raise RequestError(
                    f"messages[{index}].{name} is not supported by this server",
                    field="messages",
                    code="unsupported_parameter",
                )
        for name, role in (
            ("tool_calls", "assistant"),
            ("reasoning_content", "assistant"),
            ("tool_call_id", "tool"),
        ):
            if getattr(self, name) and self.role != role:
                raise RequestError(
                    f"messages[{index}].{name} belongs to role {role!r} only", field="messages"
                )
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self._text(index),
        }
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.rendered() for call in self.tool_calls]
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.role == "tool":
            if self.tool_call_id is None:
                raise RequestError(f"messages[{index}].tool_call_id is missing", field="messages")
            message["tool_call_id"] = self.tool_call_id
        return message

    def _text(self, index: int) -> str:
        if self.content is None and self.tool_calls:
            return ""
        if self.content is None:
            raise RequestError(f"messages[{index}].content is missing", field="messages")
        content: Any = self.content
        if isinstance(content, str):
            return content
        if not isinstance(content, list):
            raise RequestError(
                f"messages[{index}].content must be a string or a list of parts, "
                f"got {type(content).__name__}",
                field="messages",
            )
        texts: list[str] = []
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            text = part.get("text") if isinstance(part, dict) else None
            if kind != "text" or not isinstance(text, str):
                raise RequestError(
                    f"messages[{index}].content: only parts of type 'text' are supported, "
                    f"got type {kind!r}",
                    field="messages",
                )
            texts.append(text)
        return "".join(texts)


class ChatBody(GenerationBody):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessageBody], FailFast(), Field(max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    gate: GateBody | None = None

    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: Annotated[list[str], Field(max_length=8)] | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None  # a hint for speed; the answer is the same
    reasoning_effort: str | None = None
    verbosity: str | None = None
    web_search_options: dict[str, Any] | None = None

    aliases: ClassVar[dict[str, str]] = {"logprobs": "top_logprobs"}
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    def turn(self) -> Turn:
        """What the model is to go on from.

        Raises:
            RequestError: messages or tools that are none.
        """
        functions = functions_of(self.tools)
        return Turn(
            messages=[message.rendered(index) for index, message in enumerate(self.messages)],
            functions=functions,
            choice=choice_of(self.tool_choice, functions, self.parallel_tool_calls),
            effort=self.reasoning_effort,
            template_arguments=self.chat_template_kwargs,
        )

    def _own_sampling(self) -> dict[str, Any]:
        values: dict[str, Any] = {"max_tokens": self.max_completion_tokens}
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise RequestError(
                "give max_completion_tokens or max_tokens, not both", field="max_tokens"
            )
        if self.logprobs:
            values["logprobs"] = self.top_logprobs or 0
        else:
            for name in ("top_logprobs", "logprob_token_ids"):
                if getattr(self, name):
                    raise RequestError(f"{name} needs logprobs: true", field=name)
        return values
