"""`POST /v1/score`: exact log-likelihoods of given texts.

Two bodies. Pairs, in vLLM's shape: `text_1` and `text_2`, one or a list each. One context and
its options: `context` (a text, token ids or messages) and `options`. A score is the sum of the
natural-log probabilities of the second text's tokens behind the first; the two are tokenised
apart. vLLM's scores come from cross-encoders or cosines: the reply here has its shape and
another quantity.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from msgspec import UNSET, UnsetType
from pydantic import Field
from starlette.responses import Response

from lockstep.options import normalise
from lockstep.outputs import Score
from lockstep.requests import RequestBuilder
from lockstep.server.embeddings import EmbeddingUsage, usage_of
from lockstep.server.generation import Envelope, Service, off_loop, service_of
from lockstep.server.openapi import returns
from lockstep.server.paths import PathRoute
from lockstep.server.protocol import MAX_MESSAGES, MAX_PROMPTS, Body
from lockstep.server.protocol.chat import ChatMessageBody
from lockstep.server.replies import Reply, encode
from lockstep.server.running import complete
from lockstep.server.sse import until_disconnect
from lockstep.types import Completion, Request, RequestError, SamplingParams

router = APIRouter(route_class=PathRoute)

Text = str | list[int]
Texts = str | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
Messages = Annotated[list[ChatMessageBody], Field(min_length=1, max_length=MAX_MESSAGES)]


class ScoreBody(Body):
    """Body of `POST /v1/score`.

    Attributes:
        text_1, text_2: pairs; one `text_1` serves all of `text_2`.
        context, options: in their place: what is read, and texts or token ids that may follow.
        return_logprobs: every token's id and logprob beside the sums.
    """

    model: str
    text_1: Texts | None = None
    text_2: Texts | None = None
    context: Text | Messages | None = None
    options: Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)] | None = None
    return_logprobs: bool = False
    priority: int = 0
    user: str | None = None

    def check(self) -> None:
        """Refuse a body with parts of both kinds, or without one that it needs."""
        pairs = (self.text_1, self.text_2) != (None, None)
        if pairs == ((self.context, self.options) != (None, None)):
            raise RequestError("give text_1 and text_2, or context and options", field="text_1")
        for name in ("text_1", "text_2") if pairs else ("context", "options"):
            if getattr(self, name) is None:
                raise RequestError(
                    f"missing parameter: {name}", field=name, code="missing_parameter"
                )

    def contexts(self) -> list[tuple[str, Text | list[dict[str, Any]]]]:
        """What is read before the texts, one for all or one for each, and its place."""
        if isinstance(self.text_1, str):
            return [("text_1", self.text_1)]
        if self.text_1 is not None:
            return [(f"text_1[{index}]", text) for index, text in enumerate(self.text_1)]
        given = self.context
        if given is None or isinstance(given, str):
            return [("context", given or "")]
        messages = [
            message.rendered(index)
            for index, message in enumerate(given)
            if isinstance(message, ChatMessageBody)
        ]
        if messages:
            return [("context", messages)]
        return [("context", [token for token in given if isinstance(token, int)])]

    def texts(self) -> list[tuple[str, Text]]:
        """What is scored, and its place."""
        if isinstance(self.text_2, str):
            return [("text_2", self.text_2)]
        name, texts = ("text_2", self.text_2) if self.text_2 else ("options", self.options)
        return [(f"{name}[{index}]", text) for index, text in enumerate(texts or ())]


class ScoreData(Reply):
    """One text's log-likelihood.

    `tokens`: how many it has; `probability`: among the options of one context.
    """

    index: int
    score: float
    tokens: int
    object: str = "score"
    probability: float | UnsetType = UNSET
    logprobs: list[float] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ScoreReply(Reply):
    """Reply of `POST /v1/score`, in the order of the texts."""

    id: str
    created: int
    model: str
    data: list[ScoreData]
    usage: EmbeddingUsage
    system_fingerprint: str
    object: str = "list"


@router.post("/v1/score", responses=returns(ScoreReply))
async def create_score(body: ScoreBody, request: HTTPRequest) -> Response:
    """Log-likelihood of each text behind its context."""
    service = service_of(request)
    service.check_model(body.model)
    body.check()
    reply = await until_disconnect(request, _score(service, body))
    return Response(encode(reply), media_type="application/json")


async def _score(service: Service, body: ScoreBody) -> ScoreReply:
    envelope, builder = Envelope.new(service, "score"), service.builder
    contexts, texts = body.contexts(), body.texts()
    characters = sum(len(str(given)) for _, given in (*contexts, *texts))
    prompts = await off_loop(lambda: _prompts(builder, contexts, texts, body.priority), characters)
    requests = [request for request, _ in prompts]
    completions = await complete(service.llm, requests)
    data = [
        _data(index, completion, before, detailed=body.return_logprobs)
        for index, (completion, (_, before)) in enumerate(zip(completions, prompts, strict=True))
    ]
    if body.options is not None:
        for entry, value in zip(data, normalise([entry.score for entry in data]), strict=True):
            entry.probability = value
    return ScoreReply(
        id=envelope.id,
        created=envelope.created,
        model=envelope.model,
        data=data,
        usage=usage_of(completions),
        system_fingerprint=envelope.fingerprint,
    )


def _prompts(
    builder: RequestBuilder,
    contexts: Sequence[tuple[str, Text | list[dict[str, Any]]]],
    texts: Sequence[tuple[str, Text]],
    priority: int,
) -> list[tuple[Request, int]]:
    """One request a text, and how many of its tokens are context."""
    if len(contexts) not in (1, len(texts)):
        raise RequestError(
            f"text_1 has {len(contexts)} entries for {len(texts)} of text_2: give one, or as many",
            field="text_1",
        )
    read = [_context_ids(builder, field, given) for field, given in contexts]
    params = SamplingParams(temperature=0.0, max_tokens=0, seed=0, prompt_logprobs=0)
    found = []
    for before, (field, text) in zip(
        repeat(read[0], len(texts)) if len(read) == 1 else read, texts, strict=True
    ):
        ids = builder.encode(text, add_special_tokens=False, field=field)
        request = builder.build(
            [*before, *ids], params, priority=priority, field=field, score_from=len(before)
        )
        found.append((request, len(before)))
    return found


def _context_ids(
    builder: RequestBuilder, field: str, given: Text | list[dict[str, Any]]
) -> list[int]:
    if isinstance(given, list) and given and isinstance(given[0], dict):
        messages = [message for message in given if isinstance(message, dict)]
        try:
            return builder.encode_chat(messages)
        except RequestError as error:
            raise RequestError(str(error), field=field, code=error.code) from None
    text = given if isinstance(given, str) else [t for t in given if isinstance(t, int)]
    return builder.encode(text, field=field)


def _data(index: int, completion: Completion, before: int, *, detailed: bool) -> ScoreData:
    score = Score.of(completion, before)
    logprobs = [value for value in score.logprobs if value is not None]
    return ScoreData(
        index=index,
        score=score.total,
        tokens=len(score.token_ids),
        logprobs=logprobs if detailed else UNSET,
        token_ids=list(score.token_ids) if detailed else UNSET,
    )
