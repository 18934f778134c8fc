"""Mistral: `[TOOL_CALLS]` and a list of calls, or `[TOOL_CALLS]name[ARGS]{...}` a call.

The first form is that of the tokenizers up to version 7, the second of those since 11
(with `[CALL_ID]...` between name and arguments in some).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from lockstep.text.grammar import json_rule, literal
from lockstep.text.tools.base import CallReader, Function, ToolFormat
from lockstep.text.tools.json_calls import JsonCallReader, json_call
from lockstep.text.tools.rules import ANY_TEXT, Rules, any_of
from lockstep.text.tools.scan import JsonArguments

START, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_LONGEST_HEAD = 256  # characters between the marker and the arguments


class _MistralReader(JsonCallReader):
    def _before(self) -> bool:
        """A list or an object as elsewhere, or a name with its arguments."""
        if self._in_list or self._buffer[0].isspace() or self._buffer[0] in "[{":
            return super()._before()
        head, brace, _ = self._buffer.partition("{")
        if not brace and len(head) <= _LONGEST_HEAD:
            return False
        name = head.partition(ARGUMENTS)[0].partition(CALL_ID)[0].strip()
        if len(head) > _LONGEST_HEAD or name not in self._functions:
            self._give_up()
            return True
        self._raw.append(self._take_buffer(len(head)))
        self._scanner = JsonArguments(name)
        self._state = self._inside
        return True


class MistralFormat(ToolFormat):
    """Calls behind a control token.

    Args:
        named: the model writes the name before the arguments, not a list of objects.
    """

    special = (START, CALL_ID, ARGUMENTS)
    short_ids = True

    def __init__(self, *, named: bool) -> None:
        self.name = "mistral_named" if named else "mistral"
        self._named = named

    def reader(self, functions: Sequence[Function], *, eager: bool) -> CallReader:
        """As `ToolFormat.reader`; both forms are read."""
        return _MistralReader(functions, eager=eager, start=START)

    def calls(self, rules: Rules, functions: Sequence[Function], *, several: bool) -> str:
        """As `ToolFormat.calls`."""
        return self._calls(rules, functions, rules.marker(START), several=several)

    def mixed(self, rules: Rules, functions: Sequence[Function], *, several: bool) -> str:
        """As `ToolFormat.mixed`: calls end the text."""
        calls = self._calls(rules, functions, rules.until(START), several=several)
        return any_of(rules.terminal(ANY_TEXT), rules.rule(calls))

    def _calls(
        self, rules: Rules, functions: Sequence[Function], start: str, *, several: bool
    ) -> str:
        if self._named:
            call = rules.rule(any_of(*(_named(rules, function) for function in functions)))
            return f"{start} {call} " + (f"({rules.marker(START)} {call})*" if several else "")
        call = rules.rule(any_of(*(json_call(function, "arguments") for function in functions)))
        more = f'(", " {call})*' if several else ""
        return f'{start} "[" {call} {more} "]"'


def _named(rules: Rules, function: Function) -> str:
    return f"{literal(function.name)} {rules.marker(ARGUMENTS)} {json_rule(function.schema)}"


def is_named(template: str) -> bool:
    """Whether a chat template writes the name before the arguments."""
    return ARGUMENTS in template


def short_id(call_id: str) -> str:
    """An id as the family's templates want it: nine letters and digits, kept if it is one."""
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]
