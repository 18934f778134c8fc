"""What a text turns out to hold as it is read: content, thoughts, function calls.

A reader takes an answer's text in pieces and gives events. Which events come, and their
joined texts, depend on the text only, never on how it was cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """Characters of the answer's content."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Characters of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallOpened:
    """A call of a declared function begins. The events until `CallClosed` belong to it."""

    name: str


@dataclass(frozen=True, slots=True)
class CallText:
    """Characters of the call's arguments; joined they are one JSON object."""

    text: str


@dataclass(frozen=True, slots=True)
class CallClosed:
    """The call is complete: its arguments parse."""


Event = Text | Thought | CallOpened | CallText | CallClosed


class Reader(Protocol):
    """Reads one answer. Mutable; owned by one choice."""

    def push(self, text: str) -> list[Event]:
        """The events that these characters complete."""
        ...

    def finish(self) -> list[Event]:
        """What was held back; nothing may be pushed afterwards."""
        ...


def cut_at(text: str, marker: str) -> tuple[int, bool]:
    """Where `marker` starts in `text`, or where a beginning of it stands at the end.

    Returns:
        The position, and whether the marker is complete. Without any sign of it the
        position is the text's length.
    """
    found = text.find(marker)
    if found >= 0:
        return found, True
    start = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while start >= 0 and not marker.startswith(text[start:]):
        start = text.find(marker[0], start + 1)
    return (start if start >= 0 else len(text)), False


class Passthrough:
    """A reader for which everything is content."""

    def push(self, text: str) -> list[Event]:
        """One event for any characters."""
        return [Text(text)] if text else []

    def finish(self) -> list[Event]:
        """Nothing is ever held."""
        return []
