"""One call: an input, its questions, the requests that answer them, the decisions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lockstep.decisions.decision import Decision, decide
from lockstep.decisions.questions import MAX_QUESTIONS, Choice, Predicate, Question, Score
from lockstep.decisions.render import Given
from lockstep.decisions.sources import Asked, LabelSource, Source, prefix_options
from lockstep.requests import Conversation, RequestBuilder, Tools
from lockstep.types import Completion, Request, RequestError

MAX_PROBES = 16_384
"""Engine requests of one call. A question needs one, or with more options than letters about
a tenth as many as it has options."""


@dataclass(frozen=True, slots=True)
class Inquiry:
    """Questions about one input on their way.

    Attributes:
        asked: the questions in their order, with their requests.
        context_tokens: of the input, which all requests share.
    """

    asked: tuple[Asked, ...]
    context_tokens: int

    def requests(self) -> Iterator[Request]:
        """All requests, in the order of the questions, made as they are asked for."""
        return (request for asked in self.asked for request in asked.requests())

    @property
    def input_tokens(self) -> int:
        """Tokens of the input, once, and of each question."""
        return self.context_tokens + sum(
            len(asked.prompt) - asked.context_tokens for asked in self.asked
        )

    def decisions(
        self, completions: Sequence[Completion], temperature: float | None = None
    ) -> list[Decision]:
        """One a question.

        Args:
            completions: those of `requests()`, in their order.
            temperature: in place of the source's own.
        """
        found, begin = [], 0
        for asked in self.asked:
            own = completions[begin : begin + asked.count]
            begin += asked.count
            scores = asked.scores(own)
            if temperature is not None:
                scores = replace(scores, temperature=temperature)
            found.append(decide(asked.question, scores))
        return found


def inquire(
    builder: RequestBuilder,
    given: Given,
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
    source = source or LabelSource()
    context = source.context(builder, given, field=field)
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
        probes += asked[-1].count
        if probes > MAX_PROBES:
            raise RequestError(
                f"questions[{index}]: the options of the questions so far need {probes} "
                f"positions of the model, at most {MAX_PROBES} are allowed",
                field=f"questions[{index}]",
            )
    return Inquiry(tuple(asked), len(context.ids))


def inquire_prefix(
    builder: RequestBuilder,
    given: str | Conversation,
    prefix: str,
    options: Sequence[str],
    *,
    tools: Tools = None,
    priority: int = 0,
) -> Inquiry:
    """How the reply to a prompt or a conversation goes on after `prefix`: with which option.

    Raises:
        RequestError: as `sources.prefix_options`.
    """
    ids = builder.encode(given) if isinstance(given, str) else builder.encode_chat(given, tools)
    asked = prefix_options(builder, ids, prefix, options, priority=priority)
    return Inquiry((asked,), len(ids))
