"""What counts as a difference between two answers to one request."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from lockstep.verify.probe import Reading


class Silent(ValueError):
    """An answer that does not say what this kind of difference is about: says what is missing."""


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="token"):
    """Any token, the way of ending, or any call."""


class Decision(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="decision"
):
    """A flip of what the answer decides; its other words may vary.

    Attributes:
        options: the decision is the one that stands first in the answer, as whole words
            and whatever the case; or
        pattern: what this regular expression's first group finds. Exactly one of the two.
    """

    options: tuple[str, ...] = ()
    pattern: str = ""

    def __post_init__(self) -> None:
        if bool(self.options) == bool(self.pattern):
            raise ValueError("give options or a pattern, exactly one of them")
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(f"pattern is no regular expression: {error}") from None
        if self.pattern and groups < 1:
            raise ValueError("pattern needs a group around the decision")

    def of(self, text: str) -> str:
        """The decision, in lower case; "" when the answer makes none."""
        if self.pattern:
            found = re.search(self.pattern, text)
            return (found.group(1) or "").strip().casefold() if found else ""
        places = {
            option.casefold(): match.start()
            for option in self.options
            if (match := re.search(rf"(?<!\w){re.escape(option)}(?!\w)", text, re.IGNORECASE))
        }
        return min(places, key=lambda option: places[option], default="")


class Probability(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="probability"
):
    """A reported token's probability that moved by more than `above` after the same text.

    Compared are the tokens that both answers report, up to and with the first position
    where the answers part; behind it the two have read different texts.
    """

    above: Annotated[float, Meta(ge=0, lt=1)]


class Score(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="score"):
    """An answer that is no longer as the request's `expect` says; gains count against drops."""


DifferenceKind = Token | Decision | Probability | Score


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two answers part.

    Attributes:
        position: the first differing token's index from 0; of a character where an answer
            has no tokens.
        unit: "token" or "character", or "end" where only the way of ending or a call differs.
        one, other: what stands there; "" behind an end.
    """

    position: int
    unit: str
    one: str
    other: str


def parting(one: Reading, other: Reading) -> Parting | None:
    """The first place where two answers differ; None when they are the same.

    Tokens decide where both answers have them. A list that goes on while texts and ends
    agree is no difference: servers disagree on whether to list the token that ended it.
    """
    if one.tokens and other.tokens:
        at = common(one.tokens, other.tokens)
        both = min(len(one.tokens), len(other.tokens))
        if at < both or one.text != other.text:
            return Parting(at, "token", *(_at(each.tokens, at) for each in (one, other)))
    elif one.text != other.text:
        at = common(one.text, other.text)
        return Parting(at, "character", *(each.text[at : at + 20] for each in (one, other)))
    if one.finish != other.finish:
        return Parting(len(one.tokens), "end", one.finish, other.finish)
    if one.tool_calls != other.tool_calls:
        calls = [", ".join(f"{c.name}({c.arguments})" for c in r.tool_calls) for r in (one, other)]
        return Parting(len(one.tokens), "end", *calls)
    return None


def common(one: Sequence[object], other: Sequence[object]) -> int:
    """Length of the common beginning."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _at(tokens: Sequence[str], index: int) -> str:
    return tokens[index] if index < len(tokens) else ""


@dataclass(frozen=True, slots=True)
class Gaps:
    """Largest differences over what both answers report after the same text; 0 when equal.

    Attributes:
        probability: of a token's probability.
        logprob: of its logarithm, nats.
        positions: how many positions were compared.
    """

    probability: float
    logprob: float
    positions: int


def gaps(one: Reading, other: Reading) -> Gaps | None:
    """None when one of the answers reports no logprobs."""
    if not one.logprobs or not other.logprobs:
        return None
    shared = common(one.tokens, other.tokens)
    last = min(shared + 1, len(one.logprobs), len(other.logprobs))
    probability = logprob = 0.0
    for position in range(last):
        first, second = _reported(one, position), _reported(other, position)
        for token in first.keys() & second.keys():
            a, b = first[token], second[token]
            if a != b:  # infinities may be equal, and their difference is no number
                probability = max(probability, abs(math.exp(a) - math.exp(b)))
                logprob = max(logprob, abs(a - b))
    return Gaps(probability, logprob, last)


def _reported(reading: Reading, position: int) -> dict[str, float]:
    """Every token with a logprob there; different tokens of one text keep the likelier one."""
    found: dict[str, float] = {}
    own = (reading.tokens[position], reading.logprobs[position])
    for token, value in (own, *_alternatives(reading, position)):
        found[token] = max(value, found.get(token, -math.inf))
    return found


def _alternatives(reading: Reading, position: int) -> Sequence[tuple[str, float]]:
    return reading.top[position] if position < len(reading.top) else ()


def differs(kind: DifferenceKind, one: Reading, other: Reading) -> bool:
    """Whether two readable answers to one request differ, by any kind but `Score`.

    Raises:
        Silent: an answer does not report what the kind compares.
    """
    match kind:
        case Token():
            return parting(one, other) is not None
        case Decision():
            return kind.of(one.text) != kind.of(other.text)
        case Probability():
            found = gaps(one, other)
            if found is None:
                raise Silent("the answer reports no logprobs")
            return found.probability > kind.above
        case Score():
            raise TypeError("a score belongs to one answer")
