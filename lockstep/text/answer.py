"""How a model's answer is written, and the reader of it: reasoning, content, calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.text.events import Event, Passthrough, Reader
from lockstep.text.reasoning import ReasoningReader, ThinkMarkers
from lockstep.text.tools import Function, ToolFormat
from lockstep.text.tools.base import CallEnd, CallReader


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What an answer may hold besides content.

    Attributes:
        thinking: the markers around reasoning; None when none is looked for.
        thinking_opened: the prompt has opened the reasoning already.
        tools: how calls are written; None when none are looked for.
        functions: those that may be called.
        eager: calls are told of while they are written, see `ToolFormat.reader`.
    """

    thinking: ThinkMarkers | None = None
    thinking_opened: bool = False
    tools: ToolFormat | None = None
    functions: Sequence[Function] = ()
    eager: bool = False

    @property
    def plain(self) -> bool:
        """Whether everything is content."""
        return self.thinking is None and self.tools is None


PLAIN = AnswerFormat()


class AnswerReader:
    """Reads one choice's text. Mutable; owned by that choice."""

    def __init__(self, form: AnswerFormat) -> None:
        reader: Reader = Passthrough()
        self._calls: CallReader | None = None
        if form.tools is not None:
            reader = self._calls = form.tools.reader(form.functions, eager=form.eager)
        self._thinking: ReasoningReader | None = None
        if form.thinking is not None:
            reader = self._thinking = ReasoningReader(form.thinking, form.thinking_opened, reader)
        self._reader = reader

    @property
    def reasoning_end(self) -> int | None:
        """Characters that the reasoning took of the text; None while that is open."""
        return 0 if self._thinking is None else self._thinking.end

    @property
    def ends(self) -> Sequence[CallEnd]:
        """What became of the calls so far."""
        return () if self._calls is None else self._calls.ends

    @property
    def call_under_way(self) -> str | None:
        """As `CallReader.under_way`."""
        return None if self._calls is None else self._calls.under_way

    def push(self, text: str) -> list[Event]:
        """The events that these characters complete."""
        return self._reader.push(text)

    def finish(self) -> list[Event]:
        """What was held back."""
        return self._reader.finish()
