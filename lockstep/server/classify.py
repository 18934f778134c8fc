"""`POST /v1/classify` (and `/classify`, where vLLM has it): what a branch's head says of texts.

Only a model with a head can be asked: the one that writes has none, and is refused.
Extensions: `messages` in place of `input`; `scores`, the head's own numbers; `priority`.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from msgspec import UNSET, UnsetType
from pydantic import Field
from starlette.responses import Response

from lockstep.decisions import BranchSource, Inquiry, inquire, own_question
from lockstep.decisions.branches import AskedBranch
from lockstep.decisions.decision import decide
from lockstep.server.embeddings import EmbeddingUsage, usage_of
from lockstep.server.generation import Envelope, Service, off_loop, service_of
from lockstep.server.openapi import returns
from lockstep.server.paths import PathRoute
from lockstep.server.protocol import MAX_MESSAGES, MAX_PROMPTS, Body
from lockstep.server.protocol.chat import ChatMessageBody
from lockstep.server.protocol.tools import MAX_TOOLS, ToolBody, functions_of
from lockstep.server.replies import Reply, encode
from lockstep.server.running import complete
from lockstep.server.sse import until_disconnect
from lockstep.text.turn import Turn
from lockstep.types import RequestError

router = APIRouter(route_class=PathRoute)


class ClassifyBody(Body):
    """Body of `POST /v1/classify`.

    Attributes:
        model: a branch whose head has options, or a value, of its own.
        input: a text, or a list of them; each is a message of the user.
        messages: in its place a conversation. tools, chat_template_kwargs: as in the chat that
            it is of.
    """

    model: str
    input: str | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)] | None = None
    messages: (
        Annotated[list[ChatMessageBody], Field(min_length=1, max_length=MAX_MESSAGES)] | None
    ) = None
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: int = 0
    user: str | None = None

    def inputs(self) -> list[tuple[str, str | Turn]]:
        """What is classified, and its place.

        Raises:
            RequestError: not exactly one of `input` and `messages`.
        """
        if (self.input is None) == (self.messages is None):
            raise RequestError("give input or messages", field="input")
        if self.messages is not None:
            messages = [message.rendered(index) for index, message in enumerate(self.messages)]
            functions, more = functions_of(self.tools), self.chat_template_kwargs
            return [("messages", Turn(messages, functions, template_arguments=more))]
        for name in ("tools", "chat_template_kwargs"):
            if getattr(self, name) is not None:
                raise RequestError(f"{name} needs messages", field=name)
        if isinstance(self.input, str):
            return [("input", self.input)]
        return [(f"input[{index}]", text) for index, text in enumerate(self.input or ())]


class Classification(Reply):
    """One input.

    `scores` are the head's outputs, one a label; `probs` and the winning `label` are left out of
    a head that says one number.
    """

    index: int
    num_classes: int
    scores: list[float]
    label: str | UnsetType = UNSET
    probs: list[float] | UnsetType = UNSET
    labels: list[str] | UnsetType = UNSET


class ClassifyReply(Reply):
    """Reply of `POST /v1/classify`, in the order of the inputs."""

    id: str
    created: int
    model: str
    data: list[Classification]
    usage: EmbeddingUsage
    object: str = "list"


@router.post("/v1/classify", responses=returns(ClassifyReply))
@router.post("/classify", responses=returns(ClassifyReply))
async def create_classification(body: ClassifyBody, request: HTTPRequest) -> Response:
    """What a branch's head says of each input."""
    service = service_of(request)
    source = service.decider(body.model)
    if not isinstance(source, BranchSource):
        there = ", ".join(map(repr, sorted(service.branches))) or "none is loaded"
        raise RequestError(
            f"model: {body.model!r} writes and has no head that classifies; branches have one "
            f"({there}), and /v1/decisions asks {body.model!r} a question",
            field="model",
            code="model_has_no_head",
        )
    if source.branch.head == "codes":
        raise RequestError(
            f"model: {body.model!r} answers questions and has no classes of its own; ask it at "
            "/v1/decisions",
            field="model",
            code="model_has_no_head",
        )
    with service.deciding(body.model):
        reply = await until_disconnect(request, _classify(service, body, source))
    return Response(encode(reply), media_type="application/json")


async def _classify(service: Service, body: ClassifyBody, source: BranchSource) -> ClassifyReply:
    envelope, builder = Envelope.new(service, "classify"), service.builder
    inputs, question = body.inputs(), own_question(source.branch)

    def inquiries() -> list[Inquiry]:
        return [
            inquire(builder, given, [question], source=source, priority=body.priority, field=where)
            for where, given in inputs
        ]

    made = await off_loop(
        inquiries,
        sum(given.length() if isinstance(given, Turn) else len(given) for _, given in inputs),
    )
    asked = [own for inquiry in made for own in inquiry.asked if isinstance(own, AskedBranch)]
    completions = await complete(service.llm, (next(own.requests()) for own in asked))
    data = []
    for index, (own, completion) in enumerate(zip(asked, completions, strict=True)):
        decision = decide(own.question, own.scores([completion]))
        service.decided.count(decision)
        scores = list(own.outputs(completion))
        entry = Classification(index=index, num_classes=len(scores), scores=scores)
        if decision.number is None:
            entry.label = decision.option.text
            entry.labels = list(source.branch.options)
            entry.probs = list(decision.probabilities)
        data.append(entry)
    return ClassifyReply(
        id=envelope.id,
        created=envelope.created,
        model=body.model,
        data=data,
        usage=usage_of(completions),
    )
