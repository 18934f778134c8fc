"""Llama 3: an answer that is `{"name": ..., "parameters": {...}}`, several divided by ";".

Llama 3 writes the object bare or behind `<|python_tag|>`. An object that begins the
answer and is no call of a declared function is content.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.text.events import Reader
from lockstep.text.tools.base import Function, ToolFormat
from lockstep.text.tools.json_calls import JsonCallReader, json_call
from lockstep.text.tools.rules import Rules, any_of

TAG = "<|python_tag|>"


class LlamaFormat(ToolFormat):
    """Bare objects."""

    name = "llama3_json"
    special = (TAG,)

    def reader(self, functions: Sequence[Function], *, eager: bool) -> Reader:
        """As `ToolFormat.reader`."""
        return JsonCallReader(functions, eager=eager, start=TAG, bare=True, separators=";,")

    def calls(self, rules: Rules, functions: Sequence[Function], *, several: bool) -> str:
        """As `ToolFormat.calls`."""
        call = rules.rule(any_of(*(json_call(function, "parameters") for function in functions)))
        return f'{call} ("; " {call})*' if several else call

    def mixed(self, rules: Rules, functions: Sequence[Function], *, several: bool) -> str:
        """As `ToolFormat.mixed`: what begins with a brace is calls."""
        text = rules.terminal(r"/([^{\s](.|\n)*)?/")
        return any_of(text, rules.rule(self.calls(rules, functions, several=several)))
