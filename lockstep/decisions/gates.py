"""Gates: decide about a prompt, and write only if the decision is one of those named.

The prompt is computed once; the question's suffix and the header with which writing begins are
ids behind it. Three sources: a typed question, answered by the trunk's own head or by a branch
over answer codes; a branch with a question of its own; a beginning of the reply and what may
follow it, which is then part of the reply.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.branch import Branch
from lockstep.decisions.branches import find_branch, own_question, reading
from lockstep.decisions.decision import Decision
from lockstep.decisions.questions import Choice, Predicate, Question, Score, Value
from lockstep.decisions.render import Context, context_ids, question_text, render_input, suffix_ids
from lockstep.decisions.sources import label_paths, labels_of, option_paths, prefix_question
from lockstep.options import Path, probes, shortest
from lockstep.outputs import GenerationError
from lockstep.prefixes import common_prefix
from lockstep.requests import RequestBuilder
from lockstep.text.prompt import ChatPrompt
from lockstep.types import (
    Completion,
    Gate,
    GateOutcome,
    GateProbe,
    RequestError,
    SamplingParams,
)

MAX_REREAD = 64
"""Tokens at a conversation's end that may stand otherwise when a question follows: white space
that a template trims, the end of the last message."""


@dataclass(frozen=True, slots=True)
class GateSpec:
    """What a gate asks, and when it opens.

    Attributes:
        continue_if: values of the options on which writing goes on.
        question: asked of the trunk's own head, or of a `branch` with answer codes.
        branch: name of a loaded branch; without a question it is asked its own.
        prefix, options: the beginning of the reply, and the texts that may follow it.
        threshold: option -> a probability at which it wins, in place of its own; see
            `options.choose`.
        values: `continue_if` as a tuple.

    Raises:
        RequestError: not exactly one source, or something else than it should be.
    """

    continue_if: Iterable[Value] | Value
    question: Question | None = None
    branch: str = ""
    prefix: str | None = None
    options: Sequence[str] = ()
    threshold: Mapping[Any, float] = field(default_factory=dict)
    values: tuple[Value, ...] = field(init=False)

    def __post_init__(self) -> None:
        given = self.continue_if
        values = [given] if isinstance(given, str | bool) else given
        if not isinstance(values, Iterable) or isinstance(values, Mapping | bytes):
            raise RequestError(
                f"continue_if must be a list of options, got {given!r}", field="continue_if"
            )
        object.__setattr__(self, "values", tuple(values))
        if not self.values:
            raise RequestError(
                "continue_if must name at least one option: without, nothing is ever written",
                field="continue_if",
            )
        if self.prefix is not None and (self.question is not None or self.branch):
            raise RequestError("give prefix and options, or a question or branch", field="prefix")
        if self.prefix is None and self.options:
            raise RequestError(
                "options need a prefix, the beginning of the reply that they continue; or ask a "
                "question",
                field="options",
            )
        if self.prefix is None and self.question is None and not self.branch:
            raise RequestError("a gate needs a question, a branch or a prefix", field="question")
        if self.question is not None and not isinstance(self.question, Predicate | Choice | Score):
            raise RequestError(
                f"question must be a Predicate, Choice or Score, got {self.question!r}",
                field="question",
            )
        if not isinstance(self.threshold, Mapping):
            raise RequestError(
                f"threshold must map options to probabilities, got {self.threshold!r}",
                field="threshold",
            )

    def length(self) -> int:
        """Characters of text, about."""
        texts = [self.prefix or "", *self.options]
        if self.question is not None:
            texts += [self.question.instructions]
            texts += [f"{own.text}{own.description}" for own in self.question.options]
        return sum(map(len, texts))

    def check_writer(self, params: SamplingParams) -> None:
        """Refuse a grammar where the reply has begun before it.

        Raises:
            RequestError: naming what asked for the grammar.
        """
        if self.prefix is not None and params.grammar is not None:
            name = params.grammar.name
            raise RequestError(
                f"{name} holds from the first token that is written, and a gate's prefix is "
                "part of the reply before it: ask a question or a branch instead",
                field=name,
            )


@dataclass(frozen=True, slots=True)
class Gated:
    """A gate made ready for one prompt.

    Attributes:
        prompt: ids that the question and the answer have in common.
        gate: what the engine is told.
        question: whose options `gate` is about. source: as `OptionScores`.
        begins: for each option the text with which the reply begins, "" for none.
    """

    prompt: tuple[int, ...]
    gate: Gate
    question: Question
    source: str
    begins: tuple[str, ...]

    def decision(self, outcome: GateOutcome) -> Decision:
        """What the engine decided, typed."""
        return Decision(
            self.question, outcome.chosen, outcome.probabilities, outcome.mass, self.source
        )


@dataclass(frozen=True, slots=True)
class GatedCompletion:
    """A decision, and what was written if the gate opened.

    Attributes:
        completion: with a closed gate its choices are empty and finished by "gate".
    """

    decision: Decision
    completion: Completion

    @classmethod
    def of(cls, gated: Gated, completion: Completion) -> GatedCompletion:
        """From what the engine said.

        Raises:
            GenerationError: the request was cancelled before its decision.
        """
        if completion.gate is None:
            raise GenerationError("a gated request was cancelled", [completion])
        return cls(gated.decision(completion.gate), completion)

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.completion.text


def gate_prompt(
    builder: RequestBuilder, spec: GateSpec, branches: Mapping[str, Branch], ids: Sequence[int]
) -> Gated:
    """A gate on a plain prompt.

    Args:
        branches: those that are loaded, by name.

    Raises:
        RequestError: naming the gate's field.
    """
    if spec.prefix is not None:
        return _by_prefix(builder, spec, ids)
    if spec.branch:
        return _by_branch(builder, spec, branches, ids, ())
    context = Context(tuple(ids), before="\n\n", after="\nAnswer:", lead=" ")
    return _by_labels(builder, spec, context, ids)


def gate_chat(
    builder: RequestBuilder, spec: GateSpec, branches: Mapping[str, Branch], chat: ChatPrompt
) -> Gated:
    """A gate on the assistant's next message.

    Args:
        chat: what is read without a gate.

    Raises:
        RequestError: naming the gate's field, or `messages` where the model's template does not
            show a conversation alike with a question and with an answer behind it.
    """
    ids = chat.ids
    if spec.prefix is not None:
        return _by_prefix(builder, spec, ids)
    if spec.branch:
        context = tuple(context_ids(builder, chat, field="messages"))
        if ids[: len(context)] != context:
            raise _not_alike()
        return _by_branch(builder, spec, branches, context, ids[len(context) :])
    return _by_labels(builder, spec, render_input(builder, chat, field="messages"), ids)


def _not_alike() -> RequestError:
    return RequestError(
        "the model's chat template does not show this conversation alike with a gate's question "
        "and with an answer behind it",
        field="messages",
        code="chat_template_error",
    )


def _by_prefix(builder: RequestBuilder, spec: GateSpec, ids: Sequence[int]) -> Gated:
    prefix = spec.prefix or ""
    question = prefix_question(prefix, spec.options)
    paths = option_paths(builder.tokenizer, spec.options)
    ahead = tuple(builder.tokenizer.encode_inside(prefix)) if prefix else ()
    opens = _opens(spec, question)
    gate = Gate(
        branch="",
        probes=_probes(ahead, shortest(paths)),
        headers=tuple(
            (*ahead, *path) if is_open else None for path, is_open in zip(paths, opens, strict=True)
        ),
        thresholds=_thresholds(spec, question, [None] * len(paths)),
        sequences=tuple(shortest(paths)),
    )
    begins = tuple(prefix + option for option in spec.options)
    return Gated(tuple(ids), gate, question, "prefix", begins)


def _by_branch(
    builder: RequestBuilder,
    spec: GateSpec,
    branches: Mapping[str, Branch],
    context: Sequence[int],
    header: Path,
) -> Gated:
    branch = find_branch(branches, spec.branch)
    if branch.head == "value":
        raise RequestError(
            f"branch {spec.branch!r} answers with a number: a gate needs options", field="branch"
        )
    if spec.question is not None and branch.head != "codes":
        raise RequestError(
            f"branch {spec.branch!r} has a question of its own: give none", field="question"
        )
    try:
        question = spec.question or own_question(branch)
        how = reading(builder.tokenizer, branch, question)
    except RequestError as error:
        raise RequestError(f"question: {error}", field="question", code=error.code) from None
    own = how.thresholds or [option.threshold for option in question.options]
    gate = Gate(
        branch=spec.branch,
        probes=(GateProbe(how.suffix),),
        headers=tuple(header if is_open else None for is_open in _opens(spec, question)),
        thresholds=_thresholds(spec, question, own),
        outputs=how.outputs,
        temperature=branch.temperature,
        branch_key=branch.key,
    )
    return Gated(tuple(context), gate, question, spec.branch, ("",) * len(how.outputs))


def _by_labels(
    builder: RequestBuilder, spec: GateSpec, context: Context, ids: Sequence[int]
) -> Gated:
    question = spec.question
    assert question is not None
    shared = common_prefix(context.ids, ids)
    if not shared or len(context.ids) - shared > MAX_REREAD or len(ids) - shared > MAX_REREAD:
        raise _not_alike()
    labels = labels_of(question)
    try:
        sequences = label_paths(builder.tokenizer, labels, context.lead)
    except RequestError as error:
        raise RequestError(str(error), field="question", code=error.code) from None
    suffix = (
        *context.ids[shared:],
        *suffix_ids(builder, context, question_text(question, labels)),
    )
    header = tuple(ids[shared:])
    gate = Gate(
        branch="",
        probes=_probes(suffix, sequences),
        headers=tuple(header if is_open else None for is_open in _opens(spec, question)),
        thresholds=_thresholds(spec, question, [option.threshold for option in question.options]),
        sequences=sequences,
    )
    return Gated(tuple(ids[:shared]), gate, question, "labels", ("",) * len(labels))


def _probes(suffix: Path, sequences: Sequence[Path]) -> tuple[GateProbe, ...]:
    return tuple(GateProbe(suffix, probe.path, probe.wanted) for probe in probes(sequences))


def _opens(spec: GateSpec, question: Question) -> list[bool]:
    """For each option whether it opens the gate."""
    chosen = {
        _index(question, value, f"continue_if[{place}]") for place, value in enumerate(spec.values)
    }
    return [index in chosen for index in range(len(question.options))]


def _thresholds(
    spec: GateSpec, question: Question, own: Sequence[float | None]
) -> tuple[float | None, ...]:
    """Those of the gate, or else the options' own: all of one kind, since their order counts."""
    if not spec.threshold:
        return tuple(own)
    found: list[float | None] = [None] * len(question.options)
    for value, threshold in spec.threshold.items():
        index = _index(question, value, "threshold")
        if (
            isinstance(threshold, bool)
            or not isinstance(threshold, int | float)
            or not 0.0 <= threshold <= 1.0
        ):
            raise RequestError(
                f"threshold of {value!r} must be in [0, 1], got {threshold!r}", field="threshold"
            )
        found[index] = float(threshold)
    return tuple(found)


def _index(question: Question, value: object, where: str) -> int:
    """The option of this value, of the very type, or else the one that reads like it."""
    for index, option in enumerate(question.options):
        if type(option.value) is type(value) and option.value == value:
            return index
    for index, option in enumerate(question.options):
        if option.text == value:
            return index
    known = ", ".join(repr(option.value) for option in question.options[:12])
    raise RequestError(f"{where}: {value!r} is none of the options ({known})", field=where)
