"""`POST /v1/systemone`: TypeSafe's shape.

Extensions: `priority`; `temperature`, which pydantic-ai sends where its user sets one; in every
answer its `mass`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from pydantic import Field
from starlette.responses import Response

from lockstep.decisions import Choice, Decision, Option, Predicate, Question, Score, inquire
from lockstep.decisions.questions import MAX_OPTIONS, MAX_QUESTIONS
from lockstep.decisions.sources import Source
from lockstep.requests import check_text
from lockstep.server.decisions.account import answer
from lockstep.server.generation import Service, service_of
from lockstep.server.openapi import returns
from lockstep.server.paths import PathRoute
from lockstep.server.protocol import Body
from lockstep.server.protocol.parts import content_text
from lockstep.server.replies import Reply, encode
from lockstep.server.sse import until_disconnect
from lockstep.types import RequestError

router = APIRouter(route_class=PathRoute)

CLIENTS_DEFAULT = "jev-latest"
"""What TypeSafe's client sends when its user names no model: the model that is served here."""

Content = str | dict[str, Any] | list[Any]


class NoulCriteria(Body):
    """What counts as either."""

    true: Content | None = None
    false: Content | None = None


class NoulBody(Body):
    """Is it so?"""

    type: Literal["noul"]
    instructions: Content | None = None
    criteria: NoulCriteria | None = None

    def typed(self, name: str, where: str) -> Question:
        """Without instructions the criterion of true is the statement, or else the name is."""
        criteria = self.criteria or NoulCriteria()
        true = content_text(criteria.true, f"{where}.criteria.true")
        text = content_text(self.instructions, f"{where}.instructions")
        return Predicate(
            text or true or name, true, content_text(criteria.false, f"{where}.criteria.false")
        )


class ChoiceBody(Body):
    """Which of them?"""

    type: Literal["choice"]
    instructions: Content | None = None
    criteria: Annotated[dict[str, Content | None], Field(min_length=2, max_length=MAX_OPTIONS)]

    def typed(self, name: str, where: str) -> Question:
        """The options in the order of the object."""
        return Choice(
            content_text(self.instructions, f"{where}.instructions"),
            {
                option: content_text(text, f"{where}.criteria.{option}")
                for option, text in self.criteria.items()
            },
        )


class ScoreBody(Body):
    """How much?"""

    type: Literal["score"]
    instructions: Content | None = None
    criteria: Annotated[list[Content], Field(min_length=1, max_length=MAX_OPTIONS)]

    def typed(self, name: str, where: str) -> Question:
        """The levels, from 0."""
        return Score(
            content_text(self.instructions, f"{where}.instructions"),
            [
                Option(content_text(level, f"{where}.criteria[{index}]"))
                for index, level in enumerate(self.criteria)
            ],
        )


class SystemOneBody(Body):
    """Body of `POST /v1/systemone`."""

    state: Content
    questions: Annotated[
        dict[str, Annotated[NoulBody | ChoiceBody | ScoreBody, Field(discriminator="type")]],
        Field(min_length=1, max_length=MAX_QUESTIONS),
    ]
    model: str | None = None
    priority: int = 0
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None

    def typed(self) -> list[Question]:
        """The questions in the order of the object.

        Raises:
            RequestError: naming the place, e.g. `questions.tone.criteria`.
        """
        found = []
        for name, body in self.questions.items():
            where = f"questions.{name}"
            check_text("questions", name)
            try:
                found.append(body.typed(name, where))
            except RequestError as error:
                field = error.field
                if not field.startswith(where):
                    field = f"{where}.{'instructions' if body.type == 'noul' else 'criteria'}"
                raise RequestError(f"{field}: {error}", field=field, code=error.code) from None
        return found


class NoulAnswer(Reply, tag_field="type", tag="noul"):
    """The probability of yes."""

    noul: float
    mass: float


class ChoiceAnswer(Reply, tag_field="type", tag="choice"):
    """The winner, and everybody's probability by name."""

    choice: str
    confidence: float
    probabilities: dict[str, float]
    mass: float


class ScoreAnswer(Reply, tag_field="type", tag="score"):
    """The expected level, and every level's probability by its index."""

    score: float
    confidence: float
    legend: dict[str, Any]
    probabilities: dict[str, float]
    mass: float


class SystemOneUsage(Reply):
    """See `Account`."""

    input_tokens: int
    output_tokens: int


class SystemOneReply(Reply):
    """Reply of `POST /v1/systemone`, its answers by the questions' names."""

    model: str
    answers: dict[str, NoulAnswer | ChoiceAnswer | ScoreAnswer]
    usage: SystemOneUsage


@router.post("/v1/systemone", responses=returns(SystemOneReply))
async def create_systemone(body: SystemOneBody, request: HTTPRequest) -> Response:
    """Answer named questions about a state."""
    service = service_of(request)
    name = service.model_name if body.model in (None, CLIENTS_DEFAULT) else body.model
    source = service.decider(name or "")
    with service.deciding(name or ""):
        reply = await until_disconnect(request, _decide(service, body, source, name or ""))
    return Response(encode(reply), media_type="application/json")


async def _decide(
    service: Service, body: SystemOneBody, source: Source, name: str
) -> SystemOneReply:
    questions, state = body.typed(), content_text(body.state, "state")
    builder = service.builder
    decisions, account = await answer(
        service,
        lambda: inquire(
            builder, state, questions, source=source, priority=body.priority, field="state"
        ),
        len(state) + sum(len(option.text) for q in questions for option in q.options),
        body.temperature,
    )
    return SystemOneReply(
        model=name,
        answers={
            asked: answer_of(decision, own)
            for decision, (asked, own) in zip(decisions, body.questions.items(), strict=True)
        },
        usage=SystemOneUsage(
            input_tokens=account.input_tokens, output_tokens=account.output_tokens
        ),
    )


def answer_of(
    decision: Decision, asked: NoulBody | ChoiceBody | ScoreBody
) -> NoulAnswer | ChoiceAnswer | ScoreAnswer:
    """A decision in TypeSafe's shape."""
    probabilities = decision.probabilities
    match asked:
        case NoulBody():
            return NoulAnswer(noul=probabilities[0], mass=decision.mass)
        case ChoiceBody():
            return ChoiceAnswer(
                choice=decision.option.text,
                confidence=decision.confidence,
                probabilities=dict(zip(asked.criteria, probabilities, strict=True)),
                mass=decision.mass,
            )
        case ScoreBody():
            levels: list[Any] = list(asked.criteria)
            if decision.number is not None:  # a value head has a scale of its own
                levels = [option.text for option in decision.question.options]
            return ScoreAnswer(
                score=decision.expected,
                confidence=decision.confidence,
                legend={str(index): level for index, level in enumerate(levels)},
                probabilities={str(index): p for index, p in enumerate(probabilities)},
                mass=decision.mass,
            )
