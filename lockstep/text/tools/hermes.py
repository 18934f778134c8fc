"""Hermes, Qwen 2.5 and Qwen 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

SmolLM2 writes a list of calls between the same markers, which is read as well.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.text.events import Reader
from lockstep.text.grammar import literal
from lockstep.text.tools.base import Function, ToolFormat
from lockstep.text.tools.json_calls import JsonCallReader, json_call
from lockstep.text.tools.rules import ANY_TEXT, Rules, any_of

START, END = "<tool_call>", "</tool_call>"


class HermesFormat(ToolFormat):
    """One object between two markers a call."""

    name = "hermes"
    special = (START, END)

    def reader(self, functions: Sequence[Function], *, eager: bool) -> Reader:
        """As `ToolFormat.reader`."""
        return JsonCallReader(functions, eager=eager, start=START, end=END)

    def calls(self, rules: Rules, functions: Sequence[Function], *, several: bool) -> str:
        """As `ToolFormat.calls`."""
        call = rules.rule(f"{rules.marker(START)} {self._body(rules, functions)}")
        return f'{call} ("\\n" {call})*' if several else call

    def mixed(self, rules: Rules, functions: Sequence[Function], *, several: bool) -> str:
        """As `ToolFormat.mixed`."""
        text = rules.terminal(ANY_TEXT)
        call = rules.rule(f"{rules.until(START)} {self._body(rules, functions)}")
        return f"{call}* {text}" if several else any_of(text, call)

    def _body(self, rules: Rules, functions: Sequence[Function]) -> str:
        """A call behind its marker."""
        calls = [json_call(function, "arguments") for function in functions]
        return f"{literal(chr(10))} {any_of(*calls)} {literal(chr(10))} {rules.marker(END)}"
