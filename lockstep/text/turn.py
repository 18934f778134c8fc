"""A conversation whose next message is asked for, with the functions that it may call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.text.tools import Function, ToolChoice
from lockstep.types import RequestError

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True)
class Turn:
    """What a client asks the model to go on from.

    Attributes:
        messages: role "system", "user", "assistant" or "tool" and a content of text; the
            assistant's may have `tool_calls` and `reasoning_content`, a tool's has its
            `tool_call_id`.
        functions: those that the model is told of.
        choice: whether it calls them.
        effort: how much it is to think, one of `EFFORTS`; None leaves it to the template.
        template_arguments: further variables of the chat template.
    """

    messages: Sequence[Mapping[str, Any]]
    functions: Sequence[Function] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    effort: str | None = None
    template_arguments: Mapping[str, Any] | None = None

    def callable(self) -> list[Function]:
        """The functions that the answer may call."""
        if self.choice.mode == "none":
            return []
        allowed = self.choice.allowed
        return [f for f in self.functions if allowed is None or f.name in allowed]

    def length(self) -> int:
        """Characters of text, about."""
        texts = sum(len(message.get("content") or "") for message in self.messages)
        calls = sum(len(str(message.get("tool_calls") or "")) for message in self.messages)
        return texts + calls + sum(len(str(each.parameters)) for each in self.functions)


def functions_of(tools: Sequence[Mapping[str, Any]] | None) -> tuple[Function, ...]:
    """The functions of `tools`, which is as in a body of `/v1/chat/completions`.

    Raises:
        RequestError: no list of functions, two of one name, or one that cannot be called.
    """
    if tools is not None and not isinstance(tools, list | tuple):
        raise RequestError(f"tools must be a list of functions, got {tools!r:.100}", field="tools")
    found: dict[str, Function] = {}
    for index, tool in enumerate(tools or ()):
        own = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(own, Mapping) or not isinstance(own.get("name"), str):
            raise RequestError(
                f'tools[{index}] must be {{"type": "function", "function": {{"name": ..., '
                f'"description": ..., "parameters": ...}}}}, got {tool!r:.100}',
                field="tools",
            )
        name = own["name"]
        if name in found:
            raise RequestError(f"tools: {name!r} is there twice", field="tools")
        described, parameters = own.get("description") or "", own.get("parameters") or {}
        found[name] = Function(name, described, parameters, bool(own.get("strict")))
    return tuple(found.values())
