"""From the log-probabilities of a question's options to a decision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.decisions.questions import Option, Question


@dataclass(frozen=True, slots=True)
class OptionScores:
    """What a source says about the options of one question, in their order.

    Attributes:
        logprobs: natural-log probability of each among everything that the model might have
            said; of a trained head, among the options alone.
        temperature: they are divided by it before they are normalised; 0 leaves the most
            probable one alone.
        source: where they come from: "labels", "prefix", or a branch's name.
    """

    logprobs: tuple[float, ...]
    source: str
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer to one question.

    Attributes:
        question: what was asked.
        chosen: index of the option that won.
        probabilities: of the options, in their order; they add up to 1.
        mass: the options' total probability among everything that the model might have said.
            Little mass: the model wanted to say something else.
        source: see `OptionScores`.
    """

    question: Question
    chosen: int
    probabilities: tuple[float, ...]
    mass: float
    source: str

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
        """The mean of the options' indices: a score's value. A predicate's is 1 - P(true)."""
        return math.fsum(index * p for index, p in enumerate(self.probabilities))


def decide(question: Question, scores: OptionScores) -> Decision:
    """Normalise over the options and choose.

    The first option in declared order whose probability reaches its threshold wins, else the
    most probable one; of equal ones the first. Sums are exact, so their order is of no account.
    """
    probabilities = normalise(scores.logprobs, scores.temperature)
    chosen = next(
        (
            index
            for index, option in enumerate(question.options)
            if option.threshold is not None and probabilities[index] >= option.threshold
        ),
        probabilities.index(max(probabilities)),
    )
    mass = min(1.0, math.fsum(map(math.exp, scores.logprobs)))
    return Decision(question, chosen, probabilities, mass, scores.source)


def normalise(logprobs: Sequence[float], temperature: float = 1.0) -> tuple[float, ...]:
    """Probabilities that add up to 1; equal ones where every logprob is -inf.

    At temperature 0 the most probable has all of it, the first among equals.
    """
    most = max(logprobs)
    if most == -math.inf:
        return (1 / len(logprobs),) * len(logprobs)
    if temperature == 0.0:
        best = logprobs.index(most)
        return tuple(float(index == best) for index in range(len(logprobs)))
    weights = [math.exp((value - most) / temperature) for value in logprobs]
    total = math.fsum(weights)
    return tuple(weight / total for weight in weights)
