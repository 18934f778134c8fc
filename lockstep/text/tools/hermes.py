"""Hermes, Qwen 2.5 and Qwen 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

SmolLM2 writes a list of calls between the same markers, which is read as well.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.text.grammar import literal
from lockstep.text.tools.base import CallReader, Function
from lockstep.text.tools.json_calls import JsonCallReader, json_call
from lockstep.text.tools.marked import END, START, MarkedFormat
from lockstep.text.tools.rules import Rules, any_of


class HermesFormat(MarkedFormat):
    """One object between two markers a call."""

    name = "hermes"

    def reader(self, functions: Sequence[Function], *, eager: bool) -> CallReader:
        """As `ToolFormat.reader`."""
        return JsonCallReader(functions, eager=eager, start=START, end=END)

    def body(self, rules: Rules, functions: Sequence[Function]) -> str:
        """As `MarkedFormat.body`."""
        calls = [json_call(function, "arguments") for function in functions]
        return f"{literal(chr(10))} {any_of(*calls)} {literal(chr(10))} {rules.marker(END)}"
