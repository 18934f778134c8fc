"""Qwen3-Coder: `<function=name><parameter=key>value</parameter></function>` in `<tool_call>`.

A value is text: the declared type of its parameter says how it reads. Values of strings
stand as they are, without the line breaks around them; others are JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.text.events import CallOpened, CallText
from lockstep.text.grammar import json_rule, literal
from lockstep.text.tools.base import CallReader, Function
from lockstep.text.tools.marked import END, START, MarkedFormat
from lockstep.text.tools.rules import ANY_TEXT, Rules, any_of
from lockstep.types import lone_surrogate

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_LONGEST_NAME = 256


class _CoderReader(CallReader):
    """`_outside` -> `_before` -> `_name` -> (`_between` -> `_key` -> `_text`)* -> `_after`."""

    def __init__(self, functions: Sequence[Function], *, eager: bool) -> None:
        super().__init__(functions, eager=eager)
        self._state = self._outside
        self._searched = 0  # characters of the buffer known to hold no end of a value
        self._parameter = ""
        self._keys: set[str] = set()
        self._types: Mapping[str, Any] = {}

    def _outside(self) -> bool:
        match self._find(START, FUNCTION):
            case None:
                return False
            case marker:
                self._state = self._before if marker == START else self._function
                return True

    def _before(self) -> bool:
        """Behind the first marker: the second."""
        if self._buffer[0].isspace():
            self._raw.append(self._take_buffer(1))
            return True
        if self._buffer.startswith(FUNCTION):
            self._raw.append(self._take_buffer(len(FUNCTION)))
            self._state = self._function
        elif FUNCTION.startswith(self._buffer):
            return False
        else:
            self._give_up()
        return True

    def _function(self) -> bool:
        name = self._bracketed()
        if name is None:
            return False
        if name not in self._functions:
            self._give_up()
            return True
        self._raw.append(self._take_buffer(len(name) + 1))
        self._keys.clear()
        self._types = self._functions[name].properties()
        self._call(CallOpened(name))
        self._state = self._between
        return True

    def _between(self) -> bool:
        if self._buffer[0].isspace():
            self._raw.append(self._take_buffer(1))
        elif self._buffer.startswith(FUNCTION_END):
            self._raw.append(self._take_buffer(len(FUNCTION_END)))
            self._call(CallText("}" if self._keys else "{}"))
            self._close()
            self._state = self._after
        elif self._buffer.startswith(PARAMETER):
            self._raw.append(self._take_buffer(len(PARAMETER)))
            self._state = self._key
        elif FUNCTION_END.startswith(self._buffer) or PARAMETER.startswith(self._buffer):
            return False
        else:
            self._give_up()
        return True

    def _key(self) -> bool:
        key = self._bracketed()
        if key is None:
            return False
        if not key or key in self._keys:
            self._give_up()
            return True
        self._raw.append(self._take_buffer(len(key) + 1))
        self._parameter, self._searched = key, 0
        self._state = self._text
        return True

    def _text(self) -> bool:
        found = self._buffer.find(PARAMETER_END, self._searched)
        if found < 0:
            self._searched = max(0, len(self._buffer) - len(PARAMETER_END) + 1)
            return False
        text = self._buffer[:found]
        self._raw.append(self._take_buffer(found + len(PARAMETER_END)))
        value = _value(text, self._types.get(self._parameter))
        comma = ", " if self._keys else "{"
        self._call(CallText(f"{comma}{json.dumps(self._parameter, ensure_ascii=False)}: {value}"))
        self._keys.add(self._parameter)
        self._state = self._between
        return True

    def _after(self) -> bool:
        """Behind a call: the closing marker, if there is one."""
        if self._buffer[0].isspace():
            self._take_buffer(1)
        elif self._buffer.startswith(END):
            self._take_buffer(len(END))
            self._state = self._outside
        elif END.startswith(self._buffer):
            return False
        else:
            self._state = self._outside
        return True

    def _bracketed(self) -> str | None:
        """The name up to ">", or None while it may still end; "" when it is none."""
        name, end, _ = self._buffer.partition(">")
        if end:
            return name if len(name) <= _LONGEST_NAME else ""
        return None if len(name) <= _LONGEST_NAME else ""

    def _give_up(self) -> None:
        self._break()
        self._state = self._outside

    def _end(self) -> None:
        if self._state == self._after:
            self._take_buffer()


def _types(schema: Any) -> set[str]:
    """The types that a parameter may have; empty when its schema does not say."""
    if not isinstance(schema, Mapping):
        return set()
    declared = schema.get("type")
    types = {name for name in (declared, *_listed(declared)) if isinstance(name, str)}
    for inner in (*_listed(schema.get("anyOf")), *_listed(schema.get("oneOf"))):
        types |= _types(inner)
    choices = _listed(schema.get("enum"))
    if choices and not types and all(isinstance(choice, str) for choice in choices):
        return {"string"}
    return types


def _listed(value: Any) -> Sequence[Any]:
    """A list of a schema, which nobody has checked where the function is not strict."""
    return value if isinstance(value, list | tuple) else ()


def _value(text: str, schema: Any) -> str:
    """A parameter's text as JSON: by its declared type, or as it reads."""
    text = text.removeprefix("\n").removesuffix("\n")
    types = _types(schema)
    if "string" in types and not (text.strip() == "null" and "null" in types):
        return json.dumps(text, ensure_ascii=False)
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    written = json.dumps(value, ensure_ascii=False)
    # An escape may stand for half of a surrogate pair, which no reply could be encoded with.
    return written if lone_surrogate(written) is None else json.dumps(value)


def _refuse(constant: str) -> None:
    raise ValueError(constant)


class QwenCoderFormat(MarkedFormat):
    """Elements within elements."""

    name = "qwen3_coder"

    def reader(self, functions: Sequence[Function], *, eager: bool) -> CallReader:
        """As `ToolFormat.reader`; arguments come a parameter at a time."""
        return _CoderReader(functions, eager=eager)

    def body(self, rules: Rules, functions: Sequence[Function]) -> str:
        """As `MarkedFormat.body`."""
        calls = []
        for function in functions:
            opening = literal(f"\n{FUNCTION}{function.name}>\n")
            calls.append(f"{opening} {_parameters(rules, function)}")
        return f"{any_of(*calls)} {literal(FUNCTION_END + chr(10))} {rules.marker(END)}"


def _parameters(rules: Rules, function: Function) -> str:
    """The parameters in their declared order, those not required at will."""
    required = function.schema.get("required") or ()
    parts = []
    for name, inner in function.properties().items():
        opening = literal(f"{PARAMETER}{name}>\n")
        closing = f"\n{PARAMETER_END}\n"
        if "string" in _types(inner) and "enum" not in inner:
            value = rules.rule(f"{rules.terminal(ANY_TEXT)} {literal(closing)}", "[lazy]")
        elif "string" in _types(inner):
            texts = [str(v) if v is not None else "null" for v in inner["enum"]]
            value = f"{any_of(*map(literal, texts))} {literal(closing)}"
        else:
            value = f"{json_rule(inner)} {literal(closing)}"
        part = f"{opening} {value}"
        parts.append(part if name in required else f"({part})?")
    return " ".join(parts)
