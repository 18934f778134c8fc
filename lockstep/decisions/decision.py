"""From the log-probabilities of a question's options to a decision."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lockstep.branch import TRUNK_SOURCES
from lockstep.decisions.questions import Option, Question
from lockstep.options import choose, normalise, total_mass


@dataclass(frozen=True, slots=True)
class OptionScores:
    """What a source says about the options of one question, in their order.

    Attributes:
        logprobs: natural-log probability of each among everything that the model might have
            said; of a trained head, among the options alone.
        temperature: they are divided by it before they are normalised; 0 leaves the most
            probable one alone.
        source: where they come from: "labels", "prefix", or a branch's name.
        thresholds: of the options, in place of the question's own.
        order: indices of the options in the order in which thresholds are tried; () is that
            of the question.
        mass: of a trained head, which knows nothing else, 1; None: the sum of `logprobs`.
        number: what a value head said; the only option is its name.
    """

    logprobs: tuple[float, ...]
    source: str
    temperature: float = 1.0
    thresholds: tuple[float | None, ...] | None = None
    order: tuple[int, ...] = ()
    mass: float | None = None
    number: float | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer to one question.

    Attributes:
        question: what was asked.
        chosen: index of the option that won.
        probabilities: of the options, in their order; they add up to 1.
        mass: the options' total probability among everything that the model might have said.
            Little mass: the model wanted to say something else.
        source, number: see `OptionScores`.
    """

    question: Question
    chosen: int
    probabilities: tuple[float, ...]
    mass: float
    source: str
    number: float | None = None

    @property
    def by_trunk(self) -> bool:
        """Whether the trunk's own head decided, and not a branch."""
        return self.source in TRUNK_SOURCES

    @property
    def option(self) -> Option:
        """The option that won."""
        return self.question.options[self.chosen]

    @property
    def value(self) -> str | bool:
        """Its value."""
        return self.option.value

    @property
    def confidence(self) -> float:
        """The chosen option's probability times the mass."""
        return self.probabilities[self.chosen] * self.mass

    @property
    def expected(self) -> float:
        """The mean of the options' indices: a score's value. A predicate's is 1 - P(true).
        Of a value head its number."""
        if self.number is not None:
            return self.number
        return math.fsum(index * p for index, p in enumerate(self.probabilities))


def decide(question: Question, scores: OptionScores) -> Decision:
    """Normalise over the options and choose, see `options.choose`."""
    probabilities = normalise(scores.logprobs, scores.temperature)
    thresholds = scores.thresholds or [option.threshold for option in question.options]
    order = scores.order or range(len(probabilities))
    first = choose([probabilities[i] for i in order], [thresholds[i] for i in order])
    mass = total_mass(scores.logprobs) if scores.mass is None else scores.mass
    return Decision(
        question, order[first], probabilities, mass, scores.source, number=scores.number
    )
