"""`POST /v1/embeddings`: the trunk's last hidden state, pooled. OpenAI's shape.

Extensions: `pooling` ("last", the default, or "mean"); `priority`.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from pydantic import Field
from starlette.responses import Response

from lockstep.embeddings import Vector, embed_requests, embedding
from lockstep.server.generation import Service, off_loop, service_of
from lockstep.server.openapi import returns
from lockstep.server.paths import PathRoute
from lockstep.server.protocol import MAX_PROMPTS, Body
from lockstep.server.replies import PromptTokensDetails, Reply, encode
from lockstep.server.running import complete
from lockstep.server.sse import until_disconnect
from lockstep.types import Completion, RequestError

router = APIRouter(route_class=PathRoute)


class EmbeddingsBody(Body):
    """Body of `POST /v1/embeddings`."""

    model: str
    input: (
        str
        | Annotated[list[str], Field(max_length=MAX_PROMPTS)]
        | list[int]
        | Annotated[list[list[int]], Field(max_length=MAX_PROMPTS)]
    )
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    pooling: Literal["last", "mean"] = "last"
    priority: int = 0
    user: str | None = None

    def texts(self) -> list[str | list[int]]:
        """Texts or token ids, one a vector."""
        if isinstance(self.input, str):
            return [self.input]
        if not self.input:
            raise RequestError("input must not be empty", field="input", code="empty_prompt")
        if isinstance(self.input[0], int):
            return [[token for token in self.input if isinstance(token, int)]]
        return [text for text in self.input if not isinstance(text, int)]


class Embedding(Reply):
    """One vector: numbers, or base64 of float32 in little-endian order."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingUsage(Reply):
    """Tokens read."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingList(Reply):
    """Reply of `POST /v1/embeddings`, its vectors in the order of the input."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


@router.post("/v1/embeddings", responses=returns(EmbeddingList))
async def create_embedding(body: EmbeddingsBody, request: HTTPRequest) -> Response:
    """A vector of length 1 for each text."""
    service = service_of(request)
    service.check_model(body.model)
    reply = await until_disconnect(request, _embed(service, body))
    return Response(encode(reply), media_type="application/json")


async def _embed(service: Service, body: EmbeddingsBody) -> EmbeddingList:
    texts, builder = body.texts(), service.builder
    requests = await off_loop(
        lambda: embed_requests(
            builder, texts, body.pooling, body.dimensions, priority=body.priority
        ),
        sum(map(len, texts)),
    )
    completions = await complete(service.llm, requests)
    return EmbeddingList(
        data=[
            Embedding(
                index=index,
                embedding=_written(
                    embedding(completion, body.pooling, body.dimensions), body.encoding_format
                ),
            )
            for index, completion in enumerate(completions)
        ],
        model=service.model_name,
        usage=usage_of(completions),
    )


def _written(vector: Vector, form: str) -> list[float] | str:
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    values: list[float] = vector.tolist()
    return values


def usage_of(completions: Sequence[Completion]) -> EmbeddingUsage:
    """Tokens of prompts that were read and not answered."""
    prompt = sum(len(completion.prompt_token_ids) for completion in completions)
    cached = sum(completion.cached_tokens for completion in completions)
    return EmbeddingUsage(
        prompt_tokens=prompt,
        total_tokens=prompt,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )
