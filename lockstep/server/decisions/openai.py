"""`POST /v1/decisions`: OpenAI's shape.

Extensions: `priority`; `refuse_below`, a mass under which an answer is a refusal; a choice's
`threshold`; `tools` and `chat_template_kwargs`, as in the chat that the input is of; and in
every answer its `mass`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from pydantic import Field
from starlette.responses import Response

from lockstep.decisions import Decision, Question, inquire
from lockstep.decisions.questions import MAX_QUESTIONS
from lockstep.decisions.sources import Source
from lockstep.server.decisions.account import Account, answer
from lockstep.server.generation import Service, service_of
from lockstep.server.openapi import returns
from lockstep.server.paths import PathRoute
from lockstep.server.protocol import Body
from lockstep.server.protocol.inputs import Input, conversation
from lockstep.server.protocol.questions import QuestionBody, question_of
from lockstep.server.protocol.tools import MAX_TOOLS, ToolBody, functions_of
from lockstep.server.replies import Reply, encode
from lockstep.server.sse import until_disconnect
from lockstep.text.turn import Turn

router = APIRouter(route_class=PathRoute)


class CacheOptions(Body):
    """Accepted and not used: every prefix is kept while there is room."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: str | None = None


class DecisionsBody(Body):
    """Body of `POST /v1/decisions`."""

    model: str
    input: Input
    questions: Annotated[list[QuestionBody], Field(min_length=1, max_length=MAX_QUESTIONS)]
    priority: int = 0
    refuse_below: Annotated[float, Field(ge=0, le=1)] = 0.0
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: CacheOptions | None = None

    def typed(self) -> list[Question]:
        """The questions.

        Raises:
            RequestError: naming the place, e.g. `questions[3].choices[0].value`.
        """
        return [question_of(body, f"questions[{i}]") for i, body in enumerate(self.questions)]

    def turn(self) -> Turn:
        """The input, a text as a message of the user.

        Raises:
            RequestError: an input or tools that are none.
        """
        given = conversation(self.input)
        if isinstance(given, str):
            given = [{"role": "user", "content": given}]
        functions = functions_of(self.tools)
        return Turn(given, functions, template_arguments=self.chat_template_kwargs)


class PredicateAnswer(Reply, tag_field="type", tag="predicate"):
    """How probable the statement is."""

    name: str | None
    probability: float
    mass: float


class ChoiceProbability(Reply):
    """One choice; its value has the type that the question gave it."""

    value: str | bool
    probability: float


class ChoiceAnswer(Reply, tag_field="type", tag="choice"):
    """The winner and everybody's probability."""

    name: str | None
    choice: str | bool
    confidence: float
    probabilities: list[ChoiceProbability]
    mass: float


class LevelProbability(Reply):
    """One level; `value` is its index."""

    value: int
    label: str
    probability: float


class ScoreAnswer(Reply, tag_field="type", tag="score"):
    """The expected level, and every level's probability."""

    name: str | None
    score: float
    confidence: float
    probabilities: list[LevelProbability]
    mass: float


class Refusal(Reply, tag_field="type", tag="refusal"):
    """The model wanted to say something else."""

    name: str | None
    mass: float


class InputDetails(Reply):
    """Where input tokens came from; written: computed now, and kept for the next call."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Reply):
    """What output tokens were for."""

    reasoning_tokens: int = 0


class DecisionUsage(Reply):
    """See `Account`."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class DecisionsReply(Reply):
    """Reply of `POST /v1/decisions`, its answers in the order of the questions."""

    model: str
    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer | Refusal]
    usage: DecisionUsage


@router.post("/v1/decisions", responses=returns(DecisionsReply))
async def create_decision(body: DecisionsBody, request: HTTPRequest) -> Response:
    """Answer typed questions about an input, with a probability for every option."""
    service = service_of(request)
    source = service.decider(body.model)
    with service.deciding(body.model):
        reply = await until_disconnect(request, _decide(service, body, source))
    return Response(encode(reply), media_type="application/json")


async def _decide(service: Service, body: DecisionsBody, source: Source) -> DecisionsReply:
    questions, turn = body.typed(), body.turn()
    builder = service.builder
    decisions, account = await answer(
        service,
        lambda: inquire(builder, turn, questions, source=source, priority=body.priority),
        turn.length() + sum(len(option.text) for q in questions for option in q.options),
    )
    return DecisionsReply(
        model=body.model,
        answers=[
            answer_of(decision, own.name, body.refuse_below)
            for decision, own in zip(decisions, body.questions, strict=True)
        ],
        usage=_usage(account, keeps=service.llm.client.config.cache.prefix_caching),
    )


def answer_of(
    decision: Decision, name: str | None, refuse_below: float
) -> PredicateAnswer | ChoiceAnswer | ScoreAnswer | Refusal:
    """A decision in OpenAI's shape; a refusal when its mass is 0, or less than `refuse_below`."""
    mass, options = decision.mass, decision.question.options
    if mass == 0.0 or mass < refuse_below:
        return Refusal(name=name, mass=mass)
    pairs = list(zip(options, decision.probabilities, strict=True))
    if decision.question.kind == "predicate":
        return PredicateAnswer(name=name, probability=decision.probabilities[0], mass=mass)
    if decision.question.kind == "choice":
        return ChoiceAnswer(
            name=name,
            choice=decision.value,
            confidence=decision.confidence,
            probabilities=[ChoiceProbability(value=o.value, probability=p) for o, p in pairs],
            mass=mass,
        )
    return ScoreAnswer(
        name=name,
        score=decision.expected,
        confidence=decision.confidence,
        probabilities=[
            LevelProbability(value=index, label=option.text, probability=probability)
            for index, (option, probability) in enumerate(pairs)
        ],
        mass=mass,
    )


def _usage(account: Account, *, keeps: bool) -> DecisionUsage:
    return DecisionUsage(
        input_tokens=account.input_tokens,
        input_tokens_details=InputDetails(
            cached_tokens=account.cached_tokens,
            cache_write_tokens=account.read_tokens if keeps else 0,
        ),
        output_tokens=account.output_tokens,
        output_tokens_details=OutputDetails(),
        total_tokens=account.input_tokens + account.output_tokens,
    )
