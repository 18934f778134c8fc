"""Typed questions, checked when they are made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from lockstep.requests import check_text
from lockstep.types import RequestError

MAX_QUESTIONS = 400
MAX_OPTIONS = 255
MIN_CHOICES = 2
MAX_TEXT = 100_000  # characters of one instruction, value or description

Kind = Literal["predicate", "choice", "score"]
Value = str | bool


@dataclass(frozen=True, slots=True)
class Option:
    """One of the answers that a question allows.

    Attributes:
        value: what the option is called; the text "true" and the boolean true are two values.
        description: when it applies, in words; "" leaves that to its name.
        threshold: a probability at which this option wins over later and over more probable
            ones; None: it wins only as the most probable.
    """

    value: Value
    description: str = ""
    threshold: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.value, bool):
            _text("value", self.value)
        _text("description", self.description, empty=True)
        if self.threshold is not None and (
            isinstance(self.threshold, bool)
            or not isinstance(self.threshold, int | float)
            or not 0.0 <= self.threshold <= 1.0
        ):
            raise RequestError(
                f"threshold must be in [0, 1], got {self.threshold!r}", field="threshold"
            )

    @property
    def text(self) -> str:
        """The value as a reader sees it."""
        return str(self.value).lower() if isinstance(self.value, bool) else self.value


@dataclass(frozen=True, slots=True)
class Predicate:
    """Is this true of the input? Its options are true and false, in this order.

    Attributes:
        instructions: a statement, or a question to be answered with yes or no.
        true, false: what counts as either, in words.
        name: for the asker alone; the model does not see it.
    """

    instructions: str
    true: str = ""
    false: str = ""
    name: str = ""

    kind: ClassVar[Kind] = "predicate"

    def __post_init__(self) -> None:
        _text("instructions", self.instructions)
        for part in ("true", "false"):
            _text(part, getattr(self, part), empty=True)

    @property
    def options(self) -> tuple[Option, ...]:
        """True and false."""
        return Option(True, self.true), Option(False, self.false)


@dataclass(frozen=True, slots=True)
class Choice:
    """Which of these fits the input?

    Attributes:
        instructions: what to choose by; "" leaves it to the options.
        choices: 2 to 255 different values, or `Option`s, or a map from value to description.
        options: the same as `Option`s.
    """

    instructions: str
    choices: Iterable[Option | Value] | Mapping[str, str]
    name: str = ""
    options: tuple[Option, ...] = field(init=False)

    kind: ClassVar[Kind] = "choice"

    def __post_init__(self) -> None:
        _text("instructions", self.instructions, empty=True)
        options = _options("choices", self.choices, MIN_CHOICES)
        seen: set[tuple[type, Value]] = set()
        for index, option in enumerate(options):
            key = (type(option.value), option.value)
            if key in seen:
                raise RequestError(
                    f"choices[{index}].value is {option.value!r}, as another choice's is",
                    field=f"choices[{index}].value",
                )
            seen.add(key)
        object.__setattr__(self, "options", options)


@dataclass(frozen=True, slots=True)
class Score:
    """Where does the input stand on this scale?

    Attributes:
        instructions: what to rate; "" leaves it to the levels.
        levels: 1 to 255 of them, the lowest first; level i counts i.
        options: the same as `Option`s.
    """

    instructions: str
    levels: Iterable[Option | str]
    name: str = ""
    options: tuple[Option, ...] = field(init=False)

    kind: ClassVar[Kind] = "score"

    def __post_init__(self) -> None:
        _text("instructions", self.instructions, empty=True)
        object.__setattr__(self, "options", _options("levels", self.levels, 1))


Question = Predicate | Choice | Score


def _options(
    name: str, given: Iterable[Option | Value] | Mapping[str, str], fewest: int
) -> tuple[Option, ...]:
    if isinstance(given, Mapping):
        items: list[Option | Value] = [Option(value, text) for value, text in given.items()]
    elif isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise RequestError(f"{name} must be a list, got {given!r}", field=name)
    else:
        items = list(given)
    if not fewest <= len(items) <= MAX_OPTIONS:
        raise RequestError(
            f"{name} must have {fewest} to {MAX_OPTIONS} entries, got {len(items)}", field=name
        )
    options = []
    for index, item in enumerate(items):
        try:
            options.append(item if isinstance(item, Option) else Option(item))
        except RequestError as error:
            path = f"{name}[{index}].{error.field}"
            raise RequestError(f"{name}[{index}].{error}", field=path) from None
    return tuple(options)


def _text(name: str, value: object, *, empty: bool = False) -> None:
    if not isinstance(value, str):
        raise RequestError(f"{name} must be a string, got {value!r}", field=name)
    if not value.strip() and not empty:
        raise RequestError(f"{name} must not be empty", field=name)
    if len(value) > MAX_TEXT:
        raise RequestError(
            f"{name} has {len(value)} characters, at most {MAX_TEXT} are allowed", field=name
        )
    check_text(name, value)
