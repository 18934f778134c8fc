"""What the generating routes share: the service, engine requests, and how to respond."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from fastapi import Request as HTTPRequest
from starlette.responses import Response

from lockstep.async_llm import AsyncLLM
from lockstep.branch import Branch
from lockstep.config import ServerConfig
from lockstep.decisions import BranchSource, Gated
from lockstep.decisions.sources import LabelSource, Source
from lockstep.requests import LONG_TEXT, RequestBuilder
from lockstep.server.errors import UnknownModel
from lockstep.server.metrics import DecisionCounts, ToolCalls
from lockstep.server.replies import Reply, encode
from lockstep.server.sse import EventStream, until_disconnect
from lockstep.text.dialect import dialect_of
from lockstep.types import Request, RequestError, SamplingParams

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Service:
    """What every route needs; stands at `app.state.service`."""

    llm: AsyncLLM
    config: ServerConfig
    started: int
    tool_calls: ToolCalls = field(default_factory=ToolCalls)
    decided: DecisionCounts = field(default_factory=DecisionCounts)

    @property
    def model_name(self) -> str:
        """The one name that clients use."""
        return self.config.served_name or self.llm.client.config.model.name

    @property
    def builder(self) -> RequestBuilder:
        """Makes requests, of conversations as this server is told to read and show them."""
        llm, config = self.llm, self.config
        dialect = dialect_of(llm.tokenizer, config.tool_parser, config.reasoning_parser)
        return RequestBuilder(llm.tokenizer, llm.info, dialect)

    @property
    def branches(self) -> Mapping[str, Branch]:
        """The loaded branches, by name."""
        return self.llm.branches

    def check_model(self, name: str) -> None:
        """Refuse any name but that of the model that writes.

        Raises:
            UnknownModel: a 404 that lists what there is.
            RequestError: a branch, which only decides.
        """
        if name == self.model_name:
            return
        if name in self.branches:
            raise RequestError(
                f"{name!r} is a branch: it decides and cannot do this; ask it at /v1/decisions, "
                f"/v1/systemone or /v1/classify, or use {self.model_name!r} here",
                field="model",
                code="model_is_a_branch",
            )
        raise self._unknown(name)

    def decider(self, name: str) -> Source:
        """Who decides under this name: the model itself, or a branch.

        Raises:
            UnknownModel: a 404 that lists what there is.
        """
        if name == self.model_name:
            return LabelSource()
        if name in self.branches:
            return BranchSource(name, self.branches[name])
        raise self._unknown(name)

    @contextmanager
    def deciding(self, name: str) -> Iterator[None]:
        """A branch that goes, or is replaced, under a request is about the `model` it named.

        Raises:
            UnknownModel: as `decider`.
        """
        try:
            yield
        except RequestError as error:
            if error.field != "branch":
                raise
            if error.code == "branch_not_found":
                raise self._unknown(name) from None
            raise RequestError(f"model: {error}", field="model", code=error.code) from None

    def _unknown(self, name: str) -> UnknownModel:
        _ = self.llm.info  # EngineUnavailable: nobody knows yet which branches there are
        there = ", ".join(map(repr, (self.model_name, *sorted(self.branches))))
        return UnknownModel(
            f"the model {name!r} is not served here; there is {there}",
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
    return await asyncio.to_thread(work) if characters >= LONG_TEXT else work()


def build_requests(
    service: Service,
    envelope: Envelope,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    priority: int,
    field: str,
    gates: Sequence[Gated] = (),
) -> list[Request]:
    """One engine request for each prompt.

    Args:
        gates: one for each prompt, or none at all.

    Raises:
        RequestError: as `RequestBuilder.build`.
    """
    builder = service.builder
    return [
        builder.build(
            ids,
            params,
            request_id=f"{envelope.id}-{index}",
            priority=priority,
            field=field,
            gate=gates[index].gate if gates else None,
        )
        for index, ids in enumerate(prompts)
    ]


class Call(Protocol):
    """A reply under construction: whole or streamed, the same parts."""

    def stream(self) -> AsyncGenerator[Reply, None]:
        """The chunks."""
        ...

    async def whole(self) -> Reply:
        """The chunks, joined."""
        ...

    def cancel(self) -> None:
        """End in the engine what still runs; does nothing after a whole answer."""
        ...


async def respond(
    request: HTTPRequest, submit: Coroutine[Any, Any, Call], *, stream: bool
) -> Response:
    """The response to a generating request; a client that goes away ends it.

    Args:
        submit: queues the request.
    """
    call = await until_disconnect(request, submit)
    if stream:
        return EventStream(call.stream(), call.cancel)
    try:
        reply = await until_disconnect(request, call.whole())
    finally:
        call.cancel()
    return Response(encode(reply), media_type="application/json")
