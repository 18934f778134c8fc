"""Stop strings: found over token borders, held back while they may still match.

Which match counts does not depend on how the text was cut into tokens: the stop string
that is complete first wins, and of those that end together the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string found: it covers characters [start, end) of the whole text."""

    stop: str
    start: int
    end: int


class StopMatcher:
    """Looks for stop strings in a text that arrives in pieces.

    Mutable; owned by one stream. Keeps only as many characters as the longest stop string
    has, less one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._keep = max((len(stop) for stop in self._stops), default=1) - 1
        self._tail = ""
        self._length = 0

    def push(self, piece: str) -> StopMatch | None:
        """Takes the next characters; returns the first stop string that ends in them."""
        window = self._tail + piece
        seen = len(self._tail)
        base = self._length - seen
        found: StopMatch | None = None
        for stop in self._stops:
            at = window.find(stop, max(0, seen - len(stop) + 1))
            if at < 0:
                continue
            match = StopMatch(stop, base + at, base + at + len(stop))
            if found is None or (match.end, match.start) < (found.end, found.start):
                found = match
        self._length += len(piece)
        self._tail = window[-self._keep :] if self._keep else ""
        return found

    def held(self) -> int:
        """How many of the last characters may still become a stop string."""
        for length in range(len(self._tail), 0, -1):
            suffix = self._tail[-length:]
            if any(len(stop) > length and stop.startswith(suffix) for stop in self._stops):
                return length
        return 0
