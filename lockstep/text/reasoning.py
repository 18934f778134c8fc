"""Reasoning: what a model writes between think markers before its answer."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.text.events import Event, Reader, Thought, cut_at


@dataclass(frozen=True, slots=True)
class ThinkMarkers:
    """The texts around a model's reasoning."""

    start: str
    end: str


# By the name that `reasoning_parser` takes.
THINK_MARKERS = {
    "think": ThinkMarkers("<think>", "</think>"),  # DeepSeek R1, Qwen3, QwQ, GLM, SmolLM3
    "mistral": ThinkMarkers("[THINK]", "[/THINK]"),  # Magistral
}


def find_markers(template: str) -> ThinkMarkers | None:
    """The markers that a chat template speaks of."""
    for markers in THINK_MARKERS.values():
        if markers.end in template:
            return markers
    return None


class ReasoningReader:
    """Divides an answer into its reasoning and the rest, which another reader takes.

    Reasoning stands at the answer's start only: markers further on are ordinary text.
    White space around the reasoning belongs to neither side. Reasoning that never ends is
    reasoning to the end.

    Args:
        markers: of the model.
        opened: the prompt has opened the reasoning already.
        rest: reads what follows.
    """

    def __init__(self, markers: ThinkMarkers, opened: bool, rest: Reader) -> None:
        self._markers = markers
        self._rest = rest
        self._held = ""
        self._thinking = opened
        self._started = False  # whether a character of the reasoning went out
        self._passing = False
        self._skip_space = False
        self._taken = 0  # characters read before the held ones
        self.end: int | None = None
        """How many characters of the answer the reasoning took, markers included, once known."""

    def push(self, text: str) -> list[Event]:
        """The events that these characters complete."""
        if self._passing:
            return self._pass(text)
        self._held += text
        if not self._thinking and not self._open():
            return self._pass(self._take_held()) if self._passing else []
        return self._think()

    def finish(self) -> list[Event]:
        """The held rest of the reasoning, or of the text."""
        if self._passing:
            return self._rest.finish()
        held = self._take_held()
        if self._thinking:
            self.end = self._taken
            text = held.rstrip() if self._started else held.strip()
            return [Thought(text)] if text else []
        self.end = 0
        self._passing = True
        return [*self._rest.push(held), *self._rest.finish()]

    def _open(self) -> bool:
        """Whether the held text opens the reasoning; decides to pass when it cannot."""
        text = self._held.lstrip()
        start = self._markers.start
        if text.startswith(start):
            space = len(self._held) - len(text)
            self._taken += space + len(start)
            self._held = text[len(start) :]
            self._thinking = True
        elif not start.startswith(text):
            self._passing = True
            self.end = 0
        return self._thinking

    def _think(self) -> list[Event]:
        if not self._started:
            text = self._held.lstrip()
            self._taken += len(self._held) - len(text)
            self._held = text
        where, complete = cut_at(self._held, self._markers.end)
        ready = self._held[:where].rstrip()
        if complete:
            rest = self._held[where + len(self._markers.end) :]
            self.end = self._taken + where + len(self._markers.end)
            self._held = ""
            self._thinking, self._passing, self._skip_space = False, True, True
            thought: list[Event] = [Thought(ready)] if ready else []
            return thought + self._pass(rest)
        if not ready:
            return []
        self._held = self._held[len(ready) :]
        self._taken += len(ready)
        self._started = True
        return [Thought(ready)]

    def _pass(self, text: str) -> list[Event]:
        if self._skip_space:
            text = text.lstrip()
            if not text:
                return []
            self._skip_space = False
        return self._rest.push(text)

    def _take_held(self) -> str:
        held, self._held = self._held, ""
        self._taken += len(held)
        return held
