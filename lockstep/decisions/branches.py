"""Questions that a branch's head answers.

A head over named options knows one question, which it was trained on: a `Choice` between these
options, a `Score` whose levels they are, or a `Predicate` where they are true and false (or yes
and no), in any order. A head over answer codes reads any question, rendered with codes as its
labels. A value head answers a `Score` with its number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lockstep.branch import Branch
from lockstep.decisions.decision import OptionScores
from lockstep.decisions.questions import Choice, Option, Predicate, Question, Score
from lockstep.decisions.render import (
    Context,
    Given,
    branch_suffix_ids,
    context_ids,
    question_text,
)
from lockstep.decisions.sources import labels_of
from lockstep.options import log_softmax
from lockstep.outputs import GenerationError
from lockstep.requests import RequestBuilder
from lockstep.text import Tokenizer
from lockstep.types import Completion, Request, RequestError, SamplingParams

_TRUTHS = ({"true": True, "false": False}, {"yes": True, "no": False})


def find_branch(branches: Mapping[str, Branch], name: str, *, field: str = "branch") -> Branch:
    """The loaded branch of this name.

    Raises:
        RequestError: there is none; says which there are.
    """
    if not isinstance(name, str) or name not in branches:
        there = ", ".join(map(repr, sorted(branches))) or "none"
        raise RequestError(
            f"{field}: there is no branch {name!r}; loaded: {there}",
            field=field,
            code="branch_not_found",
        )
    return branches[name]


@dataclass(frozen=True, slots=True)
class OwnChoice(Choice):
    """What a branch decides between: as many options as its head has outputs."""

    def __post_init__(self) -> None:
        options = [own for own in self.choices if isinstance(own, Option)]
        object.__setattr__(self, "options", tuple(options))


def own_question(branch: Branch) -> Question:
    """The question that a branch was trained on, with its thresholds.

    Raises:
        RequestError: a head over answer codes has none.
    """
    if branch.head == "codes":
        raise RequestError(
            "this branch answers any question and has none of its own: ask one", field="questions"
        )
    if branch.head == "value":
        return Score(branch.instructions, list(branch.options))
    options = [Option(name, "", branch.threshold_of(name)) for name in branch.options]
    return OwnChoice(branch.instructions, options)


@dataclass(frozen=True, slots=True)
class Reading:
    """How a branch answers one question.

    Attributes:
        question: what its scores are of.
        suffix: ids behind the context; the head reads the last row.
        outputs: for each option the index of its output; () for a value head.
        thresholds, order: as `OptionScores`.
    """

    question: Question
    suffix: tuple[int, ...]
    outputs: tuple[int, ...]
    thresholds: tuple[float | None, ...] | None = None
    order: tuple[int, ...] = ()


def reading(tokenizer: Tokenizer, branch: Branch, question: Question) -> Reading:
    """How `branch` answers `question`.

    Raises:
        RequestError: it cannot.
    """
    if branch.head == "codes":
        labels = labels_of(question)
        unknown = next((label for label in labels if label not in branch.options), None)
        if unknown is not None:
            raise RequestError(
                f"this branch knows the answers {_listed(branch.options)}, and the question's "
                f"{len(labels)} options need {unknown!r}",
                code="unsupported_question",
            )
        text = question_text(question, labels)
        outputs = tuple(branch.options.index(label) for label in labels)
        return Reading(question, tuple(branch_suffix_ids(tokenizer, branch, text)), outputs)
    suffix = tuple(branch_suffix_ids(tokenizer, branch))
    if branch.head == "value":
        if question.kind != "score":
            raise RequestError(
                f"this branch answers with a number, so ask it a score, not a {question.kind}",
                code="unsupported_question",
            )
        return Reading(own_question(branch), suffix, ())
    outputs = _outputs(branch, question)
    if any(option.threshold is not None for option in question.options):
        return Reading(question, suffix, outputs)
    order = tuple(sorted(range(len(outputs)), key=outputs.__getitem__))
    thresholds = tuple(branch.threshold_of(branch.options[output]) for output in outputs)
    return Reading(question, suffix, outputs, thresholds, order)


def _outputs(branch: Branch, question: Question) -> tuple[int, ...]:
    """Index of each option of the question among those of the branch, which must be the same."""
    names: Sequence[str | None] = [option.text for option in question.options]
    if isinstance(question, Predicate):
        for truths in _TRUTHS:
            found = {truths.get(name.lower()): name for name in branch.options}
            if set(found) == {True, False} and len(branch.options) == 2:
                names = [found[True], found[False]]
    if len(names) != len(branch.options) or set(names) != set(branch.options):
        what = "a predicate" if isinstance(question, Predicate) else f"a {question.kind} between"
        raise RequestError(
            f"this branch decides between {_listed(branch.options)}: it cannot answer {what} "
            f"{_listed([option.text for option in question.options])}",
            code="unsupported_question",
        )
    return tuple(branch.options.index(name) for name in names if name is not None)


def _listed(names: Sequence[str], most: int = 12) -> str:
    shown = ", ".join(map(repr, names[:most]))
    return shown if len(names) <= most else f"{shown}, ... ({len(names)})"


@dataclass(frozen=True, slots=True)
class AskedBranch:
    """A question on its way to a branch. See `Asked`."""

    builder: RequestBuilder
    name: str
    branch: Branch
    reading: Reading
    context: tuple[int, ...]
    priority: int = 0

    @property
    def question(self) -> Question:
        return self.reading.question

    @property
    def prompt(self) -> tuple[int, ...]:
        return (*self.context, *self.reading.suffix)

    @property
    def context_tokens(self) -> int:
        return len(self.context)

    @property
    def count(self) -> int:
        """One."""
        return 1

    def requests(self) -> Iterator[Request]:
        """The one request."""
        yield self.builder.build(
            self.prompt,
            SamplingParams(temperature=0.0, max_tokens=0, seed=0),
            priority=self.priority,
            branch=self.name,
            branch_key=self.branch.key,
            branch_from=len(self.context),
        )

    def outputs(self, completion: Completion) -> tuple[float, ...]:
        """Every output of the head.

        Raises:
            GenerationError: the request was cancelled.
        """
        if not completion.scores:
            raise GenerationError("a question was cancelled", [completion])
        return completion.scores

    def scores(self, completions: Sequence[Completion]) -> OptionScores:
        """See `Asked`."""
        (completion,) = completions
        outputs, how = self.outputs(completion), self.reading
        if self.branch.head == "value":
            return OptionScores((0.0,), self.name, mass=1.0, number=outputs[0])
        return OptionScores(
            log_softmax([outputs[index] for index in how.outputs]),
            self.name,
            self.branch.temperature,
            how.thresholds,
            how.order,
            mass=1.0,
        )


class BranchSource:
    """A loaded branch. See `Source`.

    Args:
        name: that it was loaded by.
    """

    def __init__(self, name: str, branch: Branch) -> None:
        self.name = name
        self.branch = branch

    def context(self, builder: RequestBuilder, given: Given, *, field: str) -> Context:
        """See `Source`."""
        return Context(tuple(context_ids(builder, given, field=field)), before="", after="")

    def ask(
        self, builder: RequestBuilder, context: Context, question: Question, *, priority: int = 0
    ) -> AskedBranch:
        """See `Source`."""
        how = reading(builder.tokenizer, self.branch, question)
        asked = AskedBranch(builder, self.name, self.branch, how, context.ids, priority)
        next(asked.requests())  # what is wrong with it shows now
        return asked
