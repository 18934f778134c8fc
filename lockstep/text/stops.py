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


class _Stop:
    """One stop string and how much of it the text's end matches (Knuth, Morris, Pratt 1977).

    `matched` is the length of the longest proper beginning of the stop string with which
    the text so far ends.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        # After a mismatch behind i matched characters, borders[i] may still be matched.
        self._borders = [0] * (len(text) + 1)
        length = 0
        for index in range(1, len(text)):
            length = self._longer(length, text[index])
            self._borders[index + 1] = length

    def _longer(self, length: int, character: str) -> int:
        while length and self.text[length] != character:
            length = self._borders[length]
        return length + 1 if self.text[length] == character else 0

    def push(self, character: str) -> bool:
        """Takes the next character; returns whether the stop string ends in it."""
        self.matched = self._longer(self.matched, character)
        if self.matched < len(self.text):
            return False
        self.matched = self._borders[self.matched]
        return True


class StopMatcher:
    """Looks for stop strings in a text that arrives in pieces.

    Mutable; owned by one stream. The work per character is constant for each stop string,
    on average over the text, whatever its length.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        # Of stop strings that end together the longest is to be found first.
        self._stops = [_Stop(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._length = 0

    def push(self, piece: str) -> StopMatch | None:
        """Takes the next characters; returns the first stop string that ends in them."""
        start = self._length
        self._length += len(piece)
        if not self._stops:
            return None
        found: StopMatch | None = None
        for end, character in enumerate(piece, start + 1):
            for stop in self._stops:
                if stop.push(character) and found is None:
                    found = StopMatch(stop.text, end - len(stop.text), end)
        return found

    def held(self) -> int:
        """How many of the last characters may still become a stop string."""
        return max(stop.matched for stop in self._stops) if self._stops else 0
