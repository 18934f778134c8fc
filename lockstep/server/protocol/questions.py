"""Typed questions, in OpenAI's shape."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lockstep.decisions import Choice, Option, Predicate, Question, Score
from lockstep.decisions.questions import MAX_OPTIONS
from lockstep.requests import check_text
from lockstep.server.protocol.body import Body
from lockstep.server.protocol.inputs import InputPart, parts_text
from lockstep.types import RequestError

MAX_LEVELS = 10


class PredicateBody(Body):
    """Is a statement true of the input?"""

    type: Literal["predicate"]
    instructions: str | list[InputPart]
    name: str | None = None


class ChoiceOption(Body):
    """One of the choices."""

    value: str | bool
    description: str | None = None
    threshold: Annotated[float, Field(ge=0, le=1)] | None = None


class ChoiceBody(Body):
    """Which of the choices fits?"""

    type: Literal["choice"]
    instructions: str | list[InputPart]
    choices: Annotated[list[ChoiceOption], Field(min_length=2, max_length=MAX_OPTIONS)]
    name: str | None = None


class Level(Body):
    """One of the levels."""

    label: str
    description: str | None = None


class ScoreBody(Body):
    """Which of the levels?"""

    type: Literal["score"]
    instructions: str | list[InputPart]
    levels: Annotated[list[Level], Field(min_length=2, max_length=MAX_LEVELS)]
    name: str | None = None


QuestionBody = Annotated[PredicateBody | ChoiceBody | ScoreBody, Field(discriminator="type")]


def question_of(body: PredicateBody | ChoiceBody | ScoreBody, where: str) -> Question:
    """The question that a body asks.

    Args:
        where: its place in the request's body, for errors.

    Raises:
        RequestError: naming the place, e.g. `questions[3].choices[0].value`.
    """
    check_text(f"{where}.name", body.name or "")
    text = parts_text(body.instructions, f"{where}.instructions")
    try:
        if not text.strip():
            raise RequestError("instructions must not be empty", field="instructions")
        match body:
            case PredicateBody():
                return Predicate(text)
            case ChoiceBody():
                return Choice(text, [_choice(own, i) for i, own in enumerate(body.choices)])
            case ScoreBody():
                return Score(text, [_level(own, i) for i, own in enumerate(body.levels)])
    except RequestError as error:
        field = f"{where}.{error.field}"
        raise RequestError(f"{field}: {error}", field=field, code=error.code) from None


def _choice(body: ChoiceOption, index: int) -> Option:
    try:
        return Option(body.value, body.description or "", body.threshold)
    except RequestError as error:
        raise RequestError(str(error), field=f"choices[{index}].{error.field}") from None


def _level(body: Level, index: int) -> Option:
    try:
        return Option(body.label, body.description or "")
    except RequestError as error:
        name = "label" if error.field == "value" else error.field
        text = str(error).replace(error.field, name, 1)
        raise RequestError(text, field=f"levels[{index}].{name}") from None
