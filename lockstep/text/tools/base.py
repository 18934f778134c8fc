"""What every format of function calls has in common."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lockstep.text.events import CallClosed, CallOpened, CallText, Event, Text, cut_at
from lockstep.text.tools.rules import Rules
from lockstep.types import RequestError

DEFINITIONS = ("$defs", "definitions")  # keys of a schema whose parts are referred to
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call.

    Attributes:
        name: letters, digits, "_", "-" and ".", at most 64.
        parameters: JSON Schema of the arguments, which are an object.
        strict: calls are held to the schema while they are written.

    Raises:
        RequestError: a name, description or parameters that are none.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise RequestError(
                f"tools: a function's name is 1 to 64 letters, digits, '_', '-' and '.', "
                f"got {self.name!r}",
                field="tools",
            )
        if not isinstance(self.description, str):
            raise RequestError(
                f"tools: the description of {self.name!r} must be a text, "
                f"got {self.description!r:.100}",
                field="tools",
            )
        if not isinstance(self.parameters, Mapping):
            raise self._wrong("", "be a JSON Schema", self.parameters)
        if self.parameters.get("type", "object") != "object":
            raise self._wrong("", "be a schema of type 'object'", self.parameters["type"])
        # What the formats read of a schema, also where no grammar keeps the calls to it.
        if not isinstance(self.parameters.get("properties") or {}, Mapping):
            raise self._wrong(".properties", "be an object", self.parameters["properties"])
        if not isinstance(self.parameters.get("required") or (), list | tuple):
            raise self._wrong(".required", "be a list of names", self.parameters["required"])

    def _wrong(self, where: str, wanted: str, found: object) -> RequestError:
        return RequestError(
            f"tools: the parameters{where} of {self.name!r} must {wanted}, got {found!r:.100}",
            field="tools",
            code="invalid_function_parameters",
        )

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of the arguments; a function without parameters takes none."""
        return dict(self.parameters) or {
            "type": "object",
            "properties": {},
            "additionalProperties": False,
        }

    def properties(self) -> dict[str, dict[str, Any]]:
        """The schema of each argument, with the definitions that it may refer to."""
        schema = self.schema
        shared: dict[str, Any] = {key: schema[key] for key in DEFINITIONS if key in schema}
        return {
            name: {**(inner if isinstance(inner, dict) else {}), **shared}
            for name, inner in (schema.get("properties") or {}).items()
        }

    def declaration(self) -> dict[str, Any]:
        """The function as chat templates read it (OpenAI's shape)."""
        inner: dict[str, Any] = {"name": self.name}
        if self.description:
            inner["description"] = self.description
        inner["parameters"] = dict(self.parameters) or {"type": "object", "properties": {}}
        return {"type": "function", "function": inner}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model calls functions.

    Attributes:
        mode: "none": it is not told of them; "auto": as it likes; "required": it answers
            with calls and nothing else.
        allowed: names of those that it may call; None for all that are declared.
        parallel: whether one answer may hold several calls. None: yes, but for required
            calls of a model that was not taught when to stop calling; see `Dialect.settle`.
    """

    mode: Literal["none", "auto", "required"] = "auto"
    allowed: tuple[str, ...] | None = None
    parallel: bool | None = None


class ToolFormat(ABC):
    """How a family of models writes calls.

    Attributes:
        name: as `tool_parser` takes it.
        special: names of control tokens that the calls are written with. They are kept in
            the text though control tokens are otherwise left out.
        short_ids: the family's templates want call ids of nine letters and digits.
        one_by_one: the family's templates take one call a message.
    """

    name: str
    special: tuple[str, ...] = ()
    short_ids: bool = False
    one_by_one: bool = False

    @abstractmethod
    def reader(self, functions: Sequence[Function], *, eager: bool) -> CallReader:
        """A reader of one answer; its calls are those of `functions` only.

        Args:
            eager: tell of a call while it is written. For texts that a grammar keeps in
                form: otherwise a call is told of once it is complete, and one that breaks
                off or goes wrong is content, with the characters that the model wrote.
        """

    @abstractmethod
    def calls(self, rules: Rules, functions: Sequence[Function], *, several: bool) -> str:
        """A Lark expression of a text that is calls and nothing else.

        Args:
            rules: takes the rules that the expression uses.
            several: more than one call may stand there.
        """

    @abstractmethod
    def mixed(self, rules: Rules, functions: Sequence[Function], *, several: bool) -> str:
        """A Lark expression of free text in which whatever begins like a call is one."""


@dataclass(frozen=True, slots=True)
class CallEnd:
    """What became of a call that the model began.

    Attributes:
        name: of the function; "" where the call went wrong before it was known.
        result: "ok"; "malformed": it went wrong and was content; "unfinished": the answer
            ended in the middle of it.
    """

    name: str
    result: Literal["ok", "malformed", "unfinished"]


class CallReader:
    """Base of the readers: what is content, what belongs to calls, what is held back.

    A subclass is a state machine. Its constructor sets `_state`, which takes something off
    `_buffer` and returns True, or returns False when it needs more text. White space around
    calls is dropped; a line break divides the content on both sides of them.

    Mutable; owned by one choice.

    Attributes:
        ends: of all calls so far. What only might have been one (a bracket at the beginning of
            an answer, say) is none unless a marker or a declared name showed that it was meant.
    """

    def __init__(self, functions: Sequence[Function], *, eager: bool) -> None:
        self.ends: list[CallEnd] = []
        self._functions = {function.name: function for function in functions}
        self._eager = eager
        self._state: Callable[[], bool]
        self._buffer = ""  # read, not yet understood
        self._raw: list[str] = []  # the call under way as the model wrote it
        self._pending: list[Event] = []  # what it will be if it goes well
        self._opened = False  # whether an event of it went out
        self._called = ""  # the name of its function, once known
        self._marked = False  # a marker stood before it
        self._space = ""  # white space that belongs to the content unless a call follows
        self._after_call = False
        self._said = False  # whether there is content already
        self._out: list[Event] = []

    @property
    def under_way(self) -> str | None:
        """The name of a call that has begun and not ended, as in `CallEnd`; None without one."""
        return self._called if self._raw and (self._called or self._marked) else None

    def push(self, text: str) -> list[Event]:
        """The events that these characters complete."""
        self._buffer += text
        while self._buffer and self._state():
            pass
        return self._take()

    def finish(self) -> list[Event]:
        """What was held back; a call still under way is content unless a grammar kept it."""
        self._end()
        name = self.under_way
        if name is not None:
            self.ends.append(CallEnd(name, "unfinished"))
        if self._raw and self._eager:
            self._raw.clear()  # a call that was begun and not finished, for want of room
            self._buffer = ""
        elif self._raw:
            self._drop()
        self._content(self._take_buffer())
        if self._space:
            self._out.append(Text(self._space))
            self._space = ""
        return self._take()

    def _end(self) -> None:
        """The text has ended: a state that needs no more of it may conclude."""
        return

    def _take(self) -> list[Event]:
        events, self._out = self._out, []
        return merged(events) if len(events) > 1 else events

    def _take_buffer(self, count: int | None = None) -> str:
        """The next `count` characters, or all."""
        if count is None:
            count = len(self._buffer)
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        return text

    def _content(self, text: str) -> None:
        """Content; white space at its end waits for what follows."""
        if self._after_call:
            text = text.lstrip()
            if text and self._said:
                text = "\n" + text
        if not text:
            return
        self._after_call = False
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._said = True
            self._out.append(Text(kept))

    def _find(self, *markers: str) -> str | None:
        """Pass content on up to the first of the markers and take that into the call."""
        cuts = [(*cut_at(self._buffer, marker), marker) for marker in markers]
        where, complete, marker = min(cuts, key=lambda cut: cut[0])
        self._content(self._take_buffer(where))
        if not complete:
            return None
        self._raw.append(self._take_buffer(len(marker)))
        self._marked = True
        return marker

    def _call(self, *events: Event) -> None:
        """Events of the call under way."""
        for event in events:
            if isinstance(event, CallOpened):
                self._called = event.name
        if not self._eager:
            self._pending.extend(events)
        elif events:
            self._opened = True
            self._drop_space()
            self._out.extend(events)

    def _close(self) -> None:
        """The call under way is complete."""
        self._drop_space()
        self._out.extend(self._pending)
        self._out.append(CallClosed())
        self.ends.append(CallEnd(self._called, "ok"))
        self._forget()

    def _break(self) -> None:
        """The call under way is none."""
        name = self.under_way
        if name is not None:
            self.ends.append(CallEnd(name, "malformed"))
        self._drop()

    def _drop(self) -> None:
        """Take the call under way back: what was written is content unless it was told of."""
        raw, opened = "".join(self._raw), self._opened
        self._forget()
        self._marked = False
        if not opened:
            self._content(raw)

    def _forget(self) -> None:
        self._raw.clear()
        self._pending.clear()
        self._opened = False
        self._called = ""

    def _drop_space(self) -> None:
        self._space = ""
        self._after_call = True


def merged(events: Sequence[Event]) -> list[Event]:
    """The same events with neighbouring texts of one kind joined."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, Text) and isinstance(last, Text):
            result[-1] = Text(last.text + event.text)
        elif isinstance(event, CallText) and isinstance(last, CallText):
            result[-1] = CallText(last.text + event.text)
        else:
            result.append(event)
    return result
