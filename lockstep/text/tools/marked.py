"""Formats that put every call between `<tool_call>` and `</tool_call>`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from lockstep.text.tools.base import Function, ToolFormat
from lockstep.text.tools.rules import ANY_TEXT, Rules, any_of

START, END = "<tool_call>", "</tool_call>"


class MarkedFormat(ToolFormat):
    """Where calls may stand; a subclass says what stands in one."""

    special = (START, END)

    @abstractmethod
    def body(self, rules: Rules, functions: Sequence[Function]) -> str:
        """A Lark expression of a call behind its first marker, the second one included."""

    def calls(self, rules: Rules, functions: Sequence[Function], *, several: bool) -> str:
        """As `ToolFormat.calls`."""
        call = rules.rule(f"{rules.marker(START)} {self.body(rules, functions)}")
        return f'{call} ("\\n" {call})*' if several else call

    def mixed(self, rules: Rules, functions: Sequence[Function], *, several: bool) -> str:
        """As `ToolFormat.mixed`."""
        text = rules.terminal(ANY_TEXT)
        call = rules.rule(f"{rules.until(START)} {self.body(rules, functions)}")
        return f"{call}* {text}" if several else any_of(text, call)
