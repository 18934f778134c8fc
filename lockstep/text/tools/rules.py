"""Lark rules, collected while a grammar is written; see `lockstep.text.grammar`."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.text.grammar import literal

ANY_TEXT = r"/(.|\n)*/"


def any_of(*choices: str) -> str:
    """A Lark expression of one of several."""
    return choices[0] if len(choices) == 1 else f"({' | '.join(choices)})"


class Rules:
    """The rules of one grammar. Mutable; names are given out once.

    Args:
        control_id: the id of a control token by its name, None for other texts. Control
            tokens never match text, so a grammar names them by id.
    """

    def __init__(self, control_id: Callable[[str], int | None]) -> None:
        self._control_id = control_id
        self._lines: list[str] = []
        self._terminals: dict[str, str] = {}

    def rule(self, body: str, attributes: str = "") -> str:
        """A rule's name."""
        name = f"r{len(self._lines)}"
        self._lines.append(f"{name}{attributes}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """A terminal's name; the same for the same body."""
        if body not in self._terminals:
            self._terminals[body] = f"T{len(self._terminals)}"
        return self._terminals[body]

    def marker(self, text: str) -> str:
        """A marker: a control token where it is one, else its text."""
        token = self._control_id(text)
        return literal(text) if token is None else f"<[{token}]>"

    def until(self, marker: str) -> str:
        """Free text up to and with the first `marker`."""
        text = self.terminal(ANY_TEXT)
        if self._control_id(marker) is not None:
            return self.rule(f"{text} {self.marker(marker)}")
        return self.rule(f"{text} {literal(marker)}", "[lazy]")

    def source(self, start: str) -> str:
        """The whole grammar of the expression `start`."""
        terminals = (f"{name}: {body}" for body, name in self._terminals.items())
        return "\n".join([f"start: {start}", *self._lines, *terminals, ""])
