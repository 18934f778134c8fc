"""Llama 3: an answer that is `{"name": ..., "parameters": {...}}`, several divided by ";".

Llama 3 writes the object bare or behind `<|python_tag|>`. An object that begins the
answer and is no call of a declared function is content.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from lockstep.text.grammar import json_rule
from lockstep.text.tools.base import DEFINITIONS, CallReader, Function, ToolFormat
from lockstep.text.tools.json_calls import JsonCallReader, json_call
from lockstep.text.tools.rules import Rules, any_of

TAG = "<|python_tag|>"
_TO_DEFINITIONS = tuple(f"#/{key}/" for key in DEFINITIONS)


class LlamaFormat(ToolFormat):
    """Bare objects."""

    name = "llama3_json"
    special = (TAG,)
    one_by_one = True

    def reader(self, functions: Sequence[Function], *, eager: bool) -> CallReader:
        """As `ToolFormat.reader`."""
        return JsonCallReader(functions, eager=eager, start=TAG, bare=True, separators=";,")

    def calls(self, rules: Rules, functions: Sequence[Function], *, several: bool) -> str:
        """As `ToolFormat.calls`."""
        call = rules.rule(any_of(*map(_call, functions)))
        return f'{call} ("; " {call})*' if several else call

    def mixed(self, rules: Rules, functions: Sequence[Function], *, several: bool) -> str:
        """As `ToolFormat.mixed`: what begins with a brace is calls."""
        text = rules.terminal(r"/([^{\s](.|\n)*)?/")
        return any_of(text, rules.rule(self.calls(rules, functions, several=several)))


def _call(function: Function) -> str:
    """A call as one schema, so that it can begin like the object of a response format does.

    References are to definitions, which move to the root; other references need the
    schema's own root, and there the call's beginning is a text.
    """
    schema = function.schema
    inner = {key: value for key, value in schema.items() if key not in DEFINITIONS}
    if any(not ref.startswith(_TO_DEFINITIONS) for ref in _references(schema)):
        return json_call(function, "parameters")
    return json_rule(
        {
            "type": "object",
            "properties": {"name": {"const": function.name}, "parameters": inner},
            "required": ["name", "parameters"],
            "additionalProperties": False,
            **{key: schema[key] for key in DEFINITIONS if key in schema},
        }
    )


def _references(schema: object) -> Iterator[str]:
    if isinstance(schema, Mapping):
        if isinstance(reference := schema.get("$ref"), str):
            yield reference
        for value in schema.values():
            yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)
