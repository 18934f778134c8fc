"""JSON a character at a time (RFC 8259): values, and calls that are written as objects.

A line break or another control character inside a string, which models write and the
standard forbids, is escaped in what comes out, and so is half of a surrogate pair, which no
reply could be encoded with; anything else that is not JSON is refused.
"""

from __future__ import annotations

import json
from collections.abc import Container
from enum import Enum, auto
from typing import Protocol

from lockstep.text.events import CallOpened, CallText, Event

MAX_DEPTH = 128
_SPACE = " \t\n\r"
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
_ESCAPES = '"\\/bfnrt'
_DIGITS = "0123456789"
_HEX = "0123456789abcdefABCDEF"
_ARGUMENTS = ("arguments", "parameters")


class State(Enum):
    """What may come next."""

    VALUE = auto()
    FIRST_VALUE = auto()  # of a list, or its end
    KEY = auto()
    FIRST_KEY = auto()  # of an object, or its end
    COLON = auto()
    NEXT = auto()  # a comma, or the end of the list or object
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    NUMBER = auto()
    LITERAL = auto()
    DONE = auto()


# After what was read of a number: the characters that may follow, and what is read then.
_NUMBER: dict[str, tuple[tuple[str, str], ...]] = {
    "-": (("0", "0"), ("123456789", "int")),
    "0": ((".", "."), ("eE", "e")),
    "int": ((_DIGITS, "int"), (".", "."), ("eE", "e")),
    ".": ((_DIGITS, "fraction"),),
    "fraction": ((_DIGITS, "fraction"), ("eE", "e")),
    "e": (("+-", "sign"), (_DIGITS, "exponent")),
    "sign": ((_DIGITS, "exponent"),),
    "exponent": ((_DIGITS, "exponent"),),
}
_NUMBER_ENDS = ("0", "int", "fraction", "exponent")


class JsonValue:
    """Reads one JSON value.

    Attributes:
        state: what may come next.
        depth: how many lists and objects are open.
    """

    def __init__(self) -> None:
        self.state = State.VALUE
        self._open: list[str] = []
        self._is_key = False
        self._rest = ""  # of a literal
        self._hex = 0  # digits of an escape still to come
        self._number = ""

    @property
    def depth(self) -> int:
        return len(self._open)

    @property
    def done(self) -> bool:
        return self.state is State.DONE

    def feed(self, character: str) -> str | None:
        """The character as it stands in JSON, or None when it cannot stand here.

        A number that stands alone ends before the character that shows its end: this
        gives "" and the character is still to be read.
        """
        match self.state:
            case State.STRING:
                return self._string(character)
            case State.ESCAPE:
                if character == "u":
                    self.state, self._hex = State.HEX, 4
                elif character in _ESCAPES:
                    self.state = State.STRING
                else:
                    return None
            case State.HEX:
                if character not in _HEX:
                    return None
                self._hex -= 1
                if not self._hex:
                    self.state = State.STRING
            case State.NUMBER:
                return self._digit(character)
            case State.LITERAL:
                if not self._rest.startswith(character):
                    return None
                self._rest = self._rest[1:]
                if not self._rest:
                    self._value_ends()
            case State.DONE:
                return None
            case _:
                if character not in _SPACE and not self._structure(character):
                    return None
        return character

    def _structure(self, character: str) -> bool:
        state = self.state
        if state is State.COLON:
            self.state = State.VALUE
            return character == ":"
        if state is State.NEXT and character == ",":
            self.state = State.KEY if self._open[-1] == "{" else State.VALUE
            return True
        if character in "]}" and state in (State.NEXT, State.FIRST_KEY, State.FIRST_VALUE):
            if self._open.pop() != ("[" if character == "]" else "{"):
                return False
            self._value_ends()
            return True
        if state in (State.KEY, State.FIRST_KEY):
            self.state, self._is_key = State.STRING, True
            return character == '"'
        return state is not State.NEXT and self._value(character)

    def _value(self, character: str) -> bool:
        if character in "{[":
            self._open.append(character)
            self.state = State.FIRST_KEY if character == "{" else State.FIRST_VALUE
            return len(self._open) <= MAX_DEPTH
        if character == '"':
            self.state, self._is_key = State.STRING, False
            return True
        if character in _LITERALS:
            self.state, self._rest = State.LITERAL, _LITERALS[character]
            return True
        if character == "-" or character in _DIGITS:
            self.state = State.NUMBER
            self._number = character if character in "-0" else "int"
            return True
        return False

    def _string(self, character: str) -> str:
        if character == '"':
            if self._is_key:
                self.state = State.COLON
            else:
                self._value_ends()
        elif character == "\\":
            self.state = State.ESCAPE
        elif character < " " or "\ud800" <= character <= "\udfff":
            return json.dumps(character)[1:-1]
        return character

    def _digit(self, character: str) -> str | None:
        for characters, state in _NUMBER[self._number]:
            if character in characters:
                self._number = state
                return character
        if self._number not in _NUMBER_ENDS:
            return None
        self._value_ends()
        return "" if self.done else self.feed(character)

    def _value_ends(self) -> None:
        self.state = State.NEXT if self._open else State.DONE


class CallScanner(Protocol):
    """Reads one call a character at a time."""

    done: bool

    def feed(self, character: str) -> list[Event] | None:
        """Events of the call that the character completes; None when it is no call."""
        ...


class JsonArguments:
    """The arguments of a call whose name is known: a JSON object."""

    def __init__(self, name: str) -> None:
        self.done = False
        self._opening: list[Event] = [CallOpened(name)]
        self._value = JsonValue()

    def feed(self, character: str) -> list[Event] | None:
        """As `CallScanner.feed`."""
        if self._value.depth == 0 and character != "{":
            return [] if character in _SPACE else None
        text = self._value.feed(character)
        if text is None:
            return None
        self.done = self._value.done
        events, self._opening = self._opening, []
        return [*events, CallText(text)]


class _Phase(Enum):
    """Where a `JsonCall` is within its object."""

    OPEN = auto()
    FIRST_KEY = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    NEXT = auto()


class JsonCall:
    """A call that is one object: `{"name": ..., "arguments": {...}}`.

    The arguments may also be called "parameters", be null or left out (then they are
    `{}`), or stand in a string as JSON; the order of the keys is free, further keys are
    passed over. Keys that count may stand once only.

    Args:
        names: of the declared functions; a call of any other is none.
    """

    def __init__(self, names: Container[str]) -> None:
        self.done = False
        self._names = names
        self._phase = _Phase.OPEN
        self._key = ""
        self._value = JsonValue()  # a key, or the value of one
        self._written: list[str] = []  # what was read of it
        self._name: str | None = None
        self._seen = False  # whether there were arguments
        self._held = ""  # arguments that wait for the name

    def feed(self, character: str) -> list[Event] | None:
        """As `CallScanner.feed`."""
        if self._phase is _Phase.IN_VALUE:
            return self._in_value(character)
        if self._phase is _Phase.IN_KEY:
            return self._in_key(character)
        if character in _SPACE:
            return []
        match self._phase, character:
            case _Phase.OPEN, "{":
                self._phase = _Phase.FIRST_KEY
            case ((_Phase.FIRST_KEY | _Phase.KEY), '"'):
                self._phase = _Phase.IN_KEY
                self._value, self._written = JsonValue(), []
                return self._in_key(character)
            case _Phase.COLON, ":":
                self._phase = _Phase.VALUE
            case _Phase.VALUE, _:
                self._phase = _Phase.IN_VALUE
                self._value, self._written = JsonValue(), []
                return self._in_value(character)
            case _Phase.NEXT, ",":
                self._phase = _Phase.KEY
            case ((_Phase.NEXT | _Phase.FIRST_KEY), "}"):
                return self._finish()
            case _:
                return None
        return []

    def _in_key(self, character: str) -> list[Event] | None:
        text = self._value.feed(character)
        if text is None:
            return None
        self._written.append(text)
        if self._value.done:
            self._key = json.loads("".join(self._written))
            self._phase = _Phase.COLON
            if self._key in _ARGUMENTS:
                if self._seen:
                    return None
                self._seen = True
        return []

    def _in_value(self, character: str) -> list[Event] | None:
        first = not self._written
        text = self._value.feed(character)
        if text is None:
            return None
        self._written.append(text)
        events: list[Event] | None = []
        if self._key in _ARGUMENTS:
            events = self._arguments(text, first=first)
        elif self._key == "name" and self._value.done:
            events = self._named()
        if self._value.done:
            self._phase = _Phase.NEXT
            if not text and events is not None:  # a number ended before this character
                further = self.feed(character)
                return None if further is None else events + further
        return events

    def _arguments(self, text: str, *, first: bool) -> list[Event] | None:
        if first and text not in '{"n':
            return None
        if self._written[0] == "{":
            return self._give(text)
        if not self._value.done:
            return []
        value = json.loads("".join(self._written))
        if value is None:
            return self._give("{}")
        text = value.strip() or "{}"
        inner = JsonValue()
        pieces = [inner.feed(character) for character in text]
        if text[0] != "{" or not inner.done or None in pieces:
            return None
        return self._give("".join(piece or "" for piece in pieces))

    def _give(self, text: str) -> list[Event]:
        if self._name is None:
            self._held += text
            return []
        return [CallText(text)]

    def _named(self) -> list[Event] | None:
        name = json.loads("".join(self._written))
        if self._name is not None or not isinstance(name, str) or name not in self._names:
            return None
        self._name = name
        held, self._held = self._held, ""
        return [CallOpened(name), *([CallText(held)] if held else [])]

    def _finish(self) -> list[Event] | None:
        if self._name is None:
            return None
        self.done = True
        return [] if self._seen else [CallText("{}")]
