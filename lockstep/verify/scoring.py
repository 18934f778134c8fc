"""Whether an answer is what was expected: one place for comparisons and quality gates."""

from __future__ import annotations

import json
import re

import msgspec

from lockstep.verify.probe import Reading

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class Expectation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What makes an answer right: all that is given must hold, and something must be given.

    Attributes:
        equals: the answer without surrounding blanks is this text.
        contains: this text stands in it, whatever the case.
        matches: this regular expression is found in it.
        number: the last number in it is this one.
        json_object: the whole answer is a JSON object.
        calls: the answer's first function call has this name, and its arguments parse.
    """

    equals: str | None = None
    contains: str | None = None
    matches: str | None = None
    number: float | None = None
    json_object: bool = False
    calls: str | None = None

    def __post_init__(self) -> None:
        if not self.json_object and all(
            value is None
            for value in (self.equals, self.contains, self.matches, self.number, self.calls)
        ):
            raise ValueError("an expectation must say what is expected")
        if self.matches is not None:
            try:
                re.compile(self.matches)
            except re.error as error:
                raise ValueError(f"matches is no regular expression: {error}") from None

    def met_by(self, reading: Reading) -> bool:
        """Whether an answer that could be read is right."""
        text = reading.text
        calls = reading.tool_calls
        return (
            (self.equals is None or text.strip() == self.equals)
            and (self.contains is None or self.contains.casefold() in text.casefold())
            and (self.matches is None or re.search(self.matches, text) is not None)
            and (self.number is None or last_number(text) == self.number)
            and (not self.json_object or is_json_object(text))
            and (
                self.calls is None
                or bool(calls and calls[0].name == self.calls and calls[0].parses)
            )
        )


def last_number(text: str) -> float | None:
    """The last number of a text, thousands separated by commas or not; None without one."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def is_json_object(text: str) -> bool:
    """Whether the whole text is one JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
