"""A reader of calls that are JSON objects, alone or in lists, with markers around them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from lockstep.text.grammar import json_rule, literal
from lockstep.text.tools.base import CallReader, Function
from lockstep.text.tools.scan import CallScanner, JsonCall


class JsonCallReader(CallReader):
    """Reads `start` call `end`, where the call may also be a list of calls.

    Args:
        start: the marker before calls.
        end: the marker after them, or "": it may be missing, also at the end of the text.
        bare: an object may stand without the marker at the beginning of the text.
        separators: what may stand between calls besides white space.
    """

    def __init__(
        self,
        functions: Sequence[Function],
        *,
        eager: bool,
        start: str,
        end: str = "",
        bare: bool = False,
        separators: str = "",
    ) -> None:
        super().__init__(functions, eager=eager)
        self._start = start
        self._closing = end
        self._separators = separators
        self._in_list = False
        self._scanner: CallScanner
        self._state = self._at_start if bare else self._outside

    def _at_start(self) -> bool:
        """The text's beginning, where a call may stand without a marker."""
        stripped = self._buffer.lstrip()
        if not stripped:
            return False
        if stripped[0] == "{":
            self._raw.append(self._take_buffer(len(self._buffer) - len(stripped)))
            self._state = self._before
        else:
            self._state = self._outside
        return True

    def _outside(self) -> bool:
        if self._find(self._start) is not None:
            self._in_list = False
            self._state = self._before
            return True
        return False

    def _before(self) -> bool:
        """Where a call has to start."""
        character = self._buffer[0]
        if character == "{":
            self._scanner = JsonCall(self._functions)
            self._state = self._inside
        elif character.isspace():
            self._raw.append(self._take_buffer(1))
        elif character == "[" and not self._in_list:
            self._raw.append(self._take_buffer(1))
            self._in_list = True
        else:
            self._give_up()
        return True

    def _inside(self) -> bool:
        """Within a call, which `_scanner` reads."""
        for count, character in enumerate(self._buffer):
            events = self._scanner.feed(character)
            if events is None:
                self._take_buffer(count)
                self._give_up()
                return True
            self._raw.append(character)
            self._call(*events)
            if self._scanner.done:
                self._take_buffer(count + 1)
                self._close()
                self._state = self._after
                return True
        self._take_buffer()
        return False

    def _give_up(self) -> None:
        """What was read is no call; the character that shows it is still to be read."""
        self._break()
        self._state = self._outside

    def _after(self) -> bool:
        """Behind a call: what may follow it before content does."""
        text = self._buffer
        if text[0].isspace() or (text[0] in self._separators):
            self._take_buffer(1)
        elif self._in_list and text[0] in ",]":
            self._in_list = self._take_buffer(1) == ","
            if self._in_list:
                self._state = self._before
        elif self._closing and text.startswith(self._closing):
            self._take_buffer(len(self._closing))
            self._state = self._outside
        elif self._closing and self._closing.startswith(text):
            return False
        elif text[0] == "{" and self._separators:
            self._in_list = False
            self._state = self._before
        else:
            self._state = self._outside
        return True

    def _end(self) -> None:
        if self._state == self._after:
            self._take_buffer()  # a beginning of the closing marker


def json_call(function: Function, key: str) -> str:
    """A Lark expression of a call as one object, its arguments under `key`."""
    opening = f'{{"name": {json.dumps(function.name)}, "{key}": '
    return f'{literal(opening)} {json_rule(function.schema)} "}}"'
