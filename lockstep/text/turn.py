"""A conversation whose next message is asked for, with the functions that it may call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.text.tools import Function, ToolChoice

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
        return texts + sum(len(str(function.parameters)) for function in self.functions)
