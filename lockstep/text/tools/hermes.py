"""Hermes, Qwen 2.5 and Qwen 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

SmolLM2 writes a list of calls between the same markers, which is read as well.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.text.events import Reader
from lockstep.text.tools.base import Function, ToolFormat
from lockstep.text.tools.json_calls import JsonCallReader

START, END = "<tool_call>", "</tool_call>"


class HermesFormat(ToolFormat):
    """One object between two markers a call."""

    name = "hermes"

    def reader(self, functions: Sequence[Function], *, eager: bool) -> Reader:
        """As `ToolFormat.reader`."""
        return JsonCallReader(functions, eager=eager, start=START, end=END)
