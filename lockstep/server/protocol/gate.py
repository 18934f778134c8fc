"""`gate` of chat completions and completions: decide first, write only if."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from pydantic import Field

from lockstep.decisions import GateSpec, Question
from lockstep.decisions.questions import MAX_OPTIONS
from lockstep.server.protocol.body import Body
from lockstep.server.protocol.questions import QuestionBody, question_of
from lockstep.types import RequestError

Value = str | bool


class GateBody(Body):
    """What decides, and when writing goes on.

    Attributes:
        question: asked of the model itself, or of a `branch` with answer codes.
        branch: a loaded branch; it has a question of its own, unless it has answer codes.
        prefix, options: a beginning of the reply, and the texts that may follow it.
        continue_if: the options on which writing goes on.
        threshold: option -> probability from which it wins.
    """

    continue_if: Annotated[list[Value], Field(max_length=MAX_OPTIONS)]
    question: QuestionBody | None = None
    branch: str | None = None
    prefix: str | None = None
    options: Annotated[list[str], Field(max_length=MAX_OPTIONS)] | None = None
    threshold: Annotated[dict[str, float], Field(max_length=MAX_OPTIONS)] | None = None

    def spec(self) -> GateSpec:
        """What the gate asks.

        Raises:
            RequestError: naming the place, e.g. `gate.question.choices[0].value`.
        """
        question = None
        if self.question is not None:
            question = question_of(self.question, "gate.question")
            _check_texts(question)
        with gate_words():
            return GateSpec(
                self.continue_if,
                question=question,
                branch=self.branch or "",
                prefix=self.prefix,
                options=self.options or (),
                threshold=self.threshold or {},
            )


def _check_texts(question: Question) -> None:
    """Refuse options that read alike: replies and thresholds name them by their text."""
    seen: set[str] = set()
    for option in question.options:
        if option.text in seen:
            field = f"gate.question.{'choices' if question.kind == 'choice' else 'levels'}"
            raise RequestError(f"{field}: two of them read {option.text!r}", field=field)
        seen.add(option.text)


@contextmanager
def gate_words() -> Iterator[None]:
    """Errors about a gate's fields name them as they stand in a body."""
    try:
        yield
    except RequestError as error:
        if error.field == "gate" and error.code in ("branch_not_found", "branch_replaced"):
            field = "gate.branch"  # gone, or another one, since the body was read
            raise RequestError(f"{field}: {error}", field=field, code=error.code) from None
        if error.field.partition("[")[0] not in GateBody.model_fields:
            raise
        field = f"gate.{error.field}"
        text = str(error)
        text = f"gate.{text}" if text.startswith(error.field) else f"{field}: {text}"
        raise RequestError(text, field=field, code=error.code) from None
