"""What the generating routes share: from a body to running streams, and the counting of tokens."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fastapi import Request as HTTPRequest

from lockstep.async_llm import AnswerStream, AsyncLLM
from lockstep.config import ServerConfig
from lockstep.outputs import Delta
from lockstep.server.errors import UnknownModel
from lockstep.server.replies import CompletionTokensDetails, PromptTokensDetails, Usage
from lockstep.types import Request, SamplingParams

T = TypeVar("T")
LONG_TEXT = 50_000  # characters; about ten milliseconds of tokenising


@dataclass(frozen=True, slots=True)
class Service:
    """What every route needs; stands at `app.state.service`."""

    llm: AsyncLLM
    config: ServerConfig
    started: int

    @property
    def model_name(self) -> str:
        """The one name that clients use."""
        return self.config.served_name or self.llm.client.config.model.name

    def check_model(self, name: str) -> None:
        """Refuse any other name.

        Raises:
            UnknownModel: a 404 that lists what there is.
        """
        if name != self.model_name:
            raise UnknownModel(
                f"the model {name!r} is not served here; there is {self.model_name!r}",
                field="model",
                code="model_not_found",
            )


def service_of(request: HTTPRequest) -> Service:
    """The service behind a request."""
    service: Service = request.app.state.service
    return service


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all chunks of one reply have in common."""

    id: str
    created: int
    model: str
    fingerprint: str

    @classmethod
    def new(cls, service: Service, prefix: str) -> Envelope:
        """A fresh id and the time."""
        return cls(
            id=f"{prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=service.model_name,
            fingerprint=service.llm.info.fingerprint,
        )


async def off_loop(work: Callable[[], T], characters: int) -> T:
    """Run text work; in a thread when the text is long, so that other clients do not wait."""
    return await asyncio.to_thread(work) if characters > LONG_TEXT else work()


def build_requests(
    service: Service,
    envelope: Envelope,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    priority: int,
    field: str,
) -> list[Request]:
    """One engine request for each prompt.

    Raises:
        RequestError: as `RequestBuilder.build`.
    """
    builder = service.llm.builder
    return [
        builder.build(
            ids, params, request_id=f"{envelope.id}-{index}", priority=priority, field=field
        )
        for index, ids in enumerate(prompts)
    ]


class Counter:
    """Adds up a reply's tokens from its deltas."""

    def __init__(self, streams: Sequence[AnswerStream]) -> None:
        self._streams = streams
        self._generated = 0

    def add(self, delta: Delta) -> None:
        """Count a delta's tokens."""
        self._generated += len(delta.token_ids)

    def usage(self) -> Usage:
        """Totals so far; a prompt counts once however many choices share it."""
        prompt = sum(len(stream.answer.request.prompt) for stream in self._streams)
        cached = sum(stream.answer.cached_tokens for stream in self._streams)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=self._generated,
            total_tokens=prompt + self._generated,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=0),
        )
