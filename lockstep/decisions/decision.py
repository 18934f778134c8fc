"""From the log-probabilities of a question's options to a decision."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
    """Normalise over the options and choose, see `options.choose`."""
    probabilities = normalise(scores.logprobs, scores.temperature)
    chosen = choose(probabilities, [option.threshold for option in question.options])
    mass = total_mass(scores.logprobs)
    return Decision(question, chosen, probabilities, mass, scores.source)
