"""Pythonic calls: an answer that is `[weather(city="Paris", days=3), time()]`.

Written by Llama 3.2 and 4, ToolACE and others, bare or between `<|python_start|>` and
`<|python_end|>`. Arguments are keywords with literals; JSON's true, false and null count.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.text.events import CallOpened, CallText
from lockstep.text.grammar import json_rule, literal
from lockstep.text.tools.base import CallReader, Function, ToolFormat
from lockstep.text.tools.rules import Rules, any_of
from lockstep.text.tools.scan import MAX_DEPTH

START, END = "<|python_start|>", "<|python_end|>"
_HEAD = re.compile(r"\s*([\w.-]{1,64})\s*\(")
_BEGINS_HEAD = re.compile(r"\s*(?:[\w.-]{1,64}\s*)?")
_NAMES = {"true": True, "false": False, "null": None}
_CLOSES = {"(": ")", "[": "]", "{": "}"}


class _Brackets:
    """Finds the end of a call: the bracket that closes its first one."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._quote = ""
        self._escaped = False

    def feed(self, character: str) -> bool | None:
        """Whether the call ends here; None when brackets do not match."""
        if self._quote:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == self._quote:
                self._quote = ""
        elif character in "\"'":
            self._quote = character
        elif character in _CLOSES:
            self._open.append(_CLOSES[character])
            if len(self._open) > MAX_DEPTH:
                return None
        elif character in ")]}":
            if self._open.pop() != character:
                return None
            return not self._open
        return False


class _PythonicReader(CallReader):
    """`_at_start` ([ or the marker) -> `_head` (a name) -> `_inside` -> `_after` -> `_outside`."""

    def __init__(self, functions: Sequence[Function], *, eager: bool) -> None:
        super().__init__(functions, eager=eager)
        self._state = self._at_start
        self._name = ""
        self._written: list[str] = []  # the call from its bracket on

    def _at_start(self) -> bool:
        text = self._buffer.lstrip()
        space = len(self._buffer) - len(text)
        if text.startswith(START):
            self._raw.append(self._take_buffer(space + len(START)))
            self._marked = True
            self._state = self._bracket
        elif text.startswith("["):
            self._raw.append(self._take_buffer(space))
            self._state = self._bracket
        elif START.startswith(text):
            return False
        else:
            self._state = self._outside
        return True

    def _bracket(self) -> bool:
        if self._buffer[0].isspace() or self._buffer[0] == "[":
            if self._buffer[0] == "[":
                self._state = self._head
            self._raw.append(self._take_buffer(1))
        else:
            self._give_up()
        return True

    def _head(self) -> bool:
        head = _HEAD.match(self._buffer)
        if head is not None and head[1] in self._functions:
            self._name = self._called = head[1]
            self._raw.append(self._take_buffer(head.end() - 1))
            self._brackets, self._written = _Brackets(), []
            self._state = self._inside
            return True
        if head is None and _BEGINS_HEAD.fullmatch(self._buffer):
            return False
        self._give_up()
        return True

    def _inside(self) -> bool:
        for count, character in enumerate(self._buffer, 1):
            self._raw.append(character)
            self._written.append(character)
            ends = self._brackets.feed(character)
            if ends is False:
                continue
            self._take_buffer(count)
            arguments = _arguments("".join(self._written)) if ends else None
            if arguments is None:
                self._give_up()
            else:
                self._call(CallOpened(self._name), CallText(arguments))
                self._close()
                self._state = self._after
            return True
        self._take_buffer()
        return False

    def _after(self) -> bool:
        if self._buffer[0] in ",]":
            self._state = self._head if self._buffer[0] == "," else self._behind
        elif not self._buffer[0].isspace():
            self._state = self._outside
            return True
        self._take_buffer(1)
        return True

    def _behind(self) -> bool:
        """Behind the list: the closing marker, if there is one."""
        text = self._buffer.lstrip()
        if text.startswith(END):
            self._take_buffer(len(self._buffer) - len(text) + len(END))
        elif END.startswith(text):
            return False
        self._state = self._outside
        return True

    def _outside(self) -> bool:
        self._content(self._take_buffer())
        return False

    def _give_up(self) -> None:
        self._break()
        self._state = self._outside

    def _end(self) -> None:
        if self._state == self._behind:
            self._take_buffer()


def _arguments(call: str) -> str | None:
    """The keywords of `(a=1, b="x")` as JSON; None for anything else."""
    try:
        tree = ast.parse(f"f{call}", mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args:
            return None
        values: dict[str, Any] = {}
        for keyword in tree.keywords:
            if keyword.arg is None or keyword.arg in values:
                return None
            values[keyword.arg] = _value(keyword.value)
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
        # Two escapes of one character beyond U+FFFF, as JSON has them, are that character.
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(str() | int() | float() | None as value):
            return value
        case ast.Name(name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)):
            return -value
        case ast.List(entries) | ast.Tuple(entries):
            return [_value(entry) for entry in entries]
        case ast.Dict(keys, entries):
            return {_key(key): _value(entry) for key, entry in zip(keys, entries, strict=True)}
    raise ValueError("no literal")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("no text")


class PythonicFormat(ToolFormat):
    """A list of calls as Python writes them."""

    name = "pythonic"
    special = (START, END)

    def reader(self, functions: Sequence[Function], *, eager: bool) -> CallReader:
        """As `ToolFormat.reader`; a call is told of once it is complete in any case."""
        return _PythonicReader(functions, eager=eager)

    def calls(self, rules: Rules, functions: Sequence[Function], *, several: bool) -> str:
        """As `ToolFormat.calls`."""
        call = rules.rule(any_of(*(_call(rules, function) for function in functions)))
        more = f'(", " {call})*' if several else ""
        return f'"[" {call} {more} "]"'

    def mixed(self, rules: Rules, functions: Sequence[Function], *, several: bool) -> str:
        """As `ToolFormat.mixed`: what begins with a bracket is calls."""
        text = rules.terminal(r"/([^\[\s](.|\n)*)?/")
        return any_of(text, rules.rule(self.calls(rules, functions, several=several)))


def _call(rules: Rules, function: Function) -> str:
    """A call with its keywords in their declared order, those not required at will."""
    schema = function.schema
    required = schema.get("required") or ()
    keywords = {
        name: f"{literal(name + '=')} {json_rule(inner)}"
        for name, inner in function.properties().items()
        if name.isidentifier()
    }
    return f'{literal(function.name + "(")} {_sequence(rules, keywords, required)} ")"'


def _sequence(rules: Rules, keywords: Mapping[str, str], required: Sequence[str]) -> str:
    """Keywords in order, ", " between those that are there."""
    rest = '""'  # what may follow when something stands before it
    first = '""'  # what may follow when nothing does
    for name, keyword in reversed(list(keywords.items())):
        here, follow = rules.rule(f"{keyword} {rest}"), rest
        if name in required:
            first, rest = here, rules.rule(f'", " {here}')
        else:
            first, rest = any_of(here, first), rules.rule(any_of(f'", " {here}', follow))
    return first
