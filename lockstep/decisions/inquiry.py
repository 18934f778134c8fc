"""One call: an input, its questions, the requests that answer them, the decisions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lockstep.decisions.decision import Decision, decide
from lockstep.decisions.questions import MAX_QUESTIONS, Choice, Predicate, Question, Score
from lockstep.decisions.render import render_input
from lockstep.decisions.sources import Asked, LabelSource, Source, prefix_options
from lockstep.requests import Conversation, RequestBuilder
from lockstep.types import Completion, Request, RequestError

MAX_PROBES = 16_384
"""Engine requests of one call. A question needs one, or with more options than letters about
a tenth as many as it has options."""


@dataclass(frozen=True, slots=True)
class Inquiry:
    """Questions about one input on their way.

    Attributes:
        questions: as asked. asked: their requests, parallel to `questions`.
        context_tokens: of the input, which all requests share.
    """

    questions: tuple[Question, ...]
    asked: tuple[Asked, ...]
    context_tokens: int

    def requests(self) -> Iterator[Request]:
        """All requests, in the order of the questions, made as they are asked for."""
        return (request for asked in self.asked for request in asked.requests())

    @property
    def input_tokens(self) -> int:
        """Tokens of the input, once, and of each question."""
        return self.context_tokens + sum(asked.suffix_tokens for asked in self.asked)

    def decisions(
        self, completions: Sequence[Completion], temperature: float | None = None
    ) -> list[Decision]:
        """One a question.

        Args:
            completions: those of `requests()`, in their order.
            temperature: in place of the source's own.
        """
        found, begin = [], 0
        for question, asked in zip(self.questions, self.asked, strict=True):
            own = completions[begin : begin + len(asked.probes)]
            begin += len(asked.probes)
            scores = asked.scores(own)
            if temperature is not None:
                scores = replace(scores, temperature=temperature)
            found.append(decide(question, scores))
        return found


def inquire(
    builder: RequestBuilder,
    given: str | Conversation,
    questions: Sequence[Question],
    *,
    source: Source | None = None,
    priority: int = 0,
    field: str = "input",
) -> Inquiry:
    """The requests that answer the questions about an input.

    Args:
        source: who answers; by default the trunk's own head over labels.
        field: what the client calls the input, for errors.

    Raises:
        RequestError: an input or a question that cannot be served; names it as
            `questions[i]`, counted from 0.
    """
    if isinstance(questions, str | bytes) or not isinstance(questions, Sequence):
        raise RequestError(f"questions must be a list, got {questions!r}", field="questions")
    if not 1 <= len(questions) <= MAX_QUESTIONS:
        raise RequestError(
            f"questions must have 1 to {MAX_QUESTIONS} entries, got {len(questions)}",
            field="questions",
        )
    for index, question in enumerate(questions):
        if not isinstance(question, Predicate | Choice | Score):
            raise RequestError(
                f"questions[{index}] must be a Predicate, Choice or Score, got {question!r}",
                field=f"questions[{index}]",
            )
    context = render_input(builder, given, field=field)
    source = source or LabelSource()
    asked: list[Asked] = []
    probes = 0
    for index, question in enumerate(questions):
        try:
            asked.append(source.ask(builder, context, question, priority=priority))
        except RequestError as error:
            if error.field == "priority":
                raise
            if error.code == "context_length_exceeded":
                message = f"{field} with questions[{index}]: {error}"
                raise RequestError(message, field=field, code=error.code) from None
            where = f"questions[{index}]"
            raise RequestError(f"{where}: {error}", field=where, code=error.code) from None
        probes += len(asked[-1].probes)
        if probes > MAX_PROBES:
            raise RequestError(
                f"questions[{index}]: the options of the questions so far need {probes} "
                f"positions of the model, at most {MAX_PROBES} are allowed",
                field=f"questions[{index}]",
            )
    return Inquiry(tuple(questions), tuple(asked), len(context.ids))


def inquire_prefix(
    builder: RequestBuilder,
    given: str | Conversation,
    prefix: str,
    options: Sequence[str],
    *,
    priority: int = 0,
) -> Inquiry:
    """How the reply to a prompt or a conversation goes on after `prefix`: with which option.

    Raises:
        RequestError: as `sources.prefix_options`.
    """
    for name, value in (("prefix", prefix), *((f"options[{i}]", o) for i, o in enumerate(options))):
        if not isinstance(value, str):
            raise RequestError(f"{name} must be a string, got {value!r}", field=name)
    question = Choice(prefix, list(options))
    ids = builder.encode(given) if isinstance(given, str) else builder.encode_chat(given)
    asked = prefix_options(builder, ids, prefix, options, priority=priority)
    return Inquiry((question,), (asked,), len(ids))
