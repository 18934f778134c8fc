"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from lockstep.async_llm import AnswerStream
from lockstep.outputs import Delta
from lockstep.server import logprobs, replies
from lockstep.server.generation import (
    Counter,
    Envelope,
    Service,
    build_requests,
    off_loop,
    service_of,
)
from lockstep.server.protocol import CompletionBody
from lockstep.server.sse import EventStream, merge, until_disconnect

router = APIRouter()


@router.post("/v1/completions")
async def create_completion(body: CompletionBody, request: HTTPRequest) -> Response:
    """Continue each prompt."""
    service = service_of(request)
    call = await until_disconnect(request, _Call.submit(service, body))
    if body.stream:
        return EventStream(call.stream(), call.cancel)
    try:
        reply = await until_disconnect(request, call.whole())
    finally:
        call.cancel()
    return Response(replies.encode(reply), media_type="application/json")


class _Call:
    """One reply under construction: whole or streamed, its choices come from `_choice`."""

    def __init__(
        self,
        service: Service,
        body: CompletionBody,
        envelope: Envelope,
        prompts: Sequence[str | list[int]],
        streams: Sequence[AnswerStream],
    ) -> None:
        self._body = body
        self._envelope = envelope
        self._tokenizer = service.llm.tokenizer
        self._streams = streams
        self._counter = Counter(streams)
        self._echoed = ["" for _ in prompts]
        if body.echo:
            self._echoed = [
                prompt
                if isinstance(prompt, str)
                else self._tokenizer.decode(prompt, skip_special_tokens=False)
                for prompt in prompts
            ]
        self._begun: set[tuple[int, int]] = set()

    @classmethod
    async def submit(cls, service: Service, body: CompletionBody) -> _Call:
        """Check the body and queue its requests."""
        service.check_model(body.model)
        params = body.sampling()
        prompts = body.prompts()
        envelope = Envelope.new(service, "cmpl")
        builder = service.llm.builder
        ids = await off_loop(
            lambda: [builder.encode(prompt) for prompt in prompts], sum(map(len, prompts))
        )
        requests = build_requests(
            service, envelope, ids, params, priority=body.priority, field="prompt"
        )
        return cls(service, body, envelope, prompts, await service.llm.submit(requests))

    def cancel(self) -> None:
        """End in the engine what still runs; does nothing after a whole answer."""
        for stream in self._streams:
            stream.cancel()

    async def whole(self) -> replies.Completion:
        """The reply in one piece: the chunks' choices, joined."""
        choices: dict[int, replies.CompletionChoice] = {}
        async with aclosing(self._choices()) as parts:
            async for part in parts:
                before = choices.get(part.index)
                choices[part.index] = part if before is None else _joined(before, part)
        return self._reply(
            [choices[index] for index in sorted(choices)], usage=self._counter.usage()
        )

    async def stream(self) -> AsyncGenerator[replies.Reply, None]:
        """Chunks, then usage if asked for."""
        usage = None if self._body.include_usage else UNSET
        async with aclosing(self._choices()) as parts:
            async for part in parts:
                yield self._reply([part], usage=usage)
        if self._body.include_usage:
            yield self._reply([], usage=self._counter.usage())

    async def _choices(self) -> AsyncGenerator[replies.CompletionChoice, None]:
        async with aclosing(merge(self._streams)) as deltas:
            async for index, delta in deltas:
                self._counter.add(delta)
                part = self._choice(index, delta)
                if part is not None:
                    yield part

    def _choice(self, index: int, delta: Delta) -> replies.CompletionChoice | None:
        """What a delta adds to its choice; None when it adds nothing that the client sees."""
        request = self._streams[index].answer.request
        first = (index, delta.choice) not in self._begun
        self._begun.add((index, delta.choice))
        part = replies.CompletionChoice(
            index=index * request.sampling.n + delta.choice,
            text=(self._echoed[index] if first else "") + delta.text,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        if request.sampling.logprobs is not None:
            part.logprobs = logprobs.completion_logprobs(
                self._tokenizer, request, delta, len(self._echoed[index])
            )
            prompt_entries = self._streams[index].answer.prompt_logprobs
            if first and self._body.echo and prompt_entries is not None:
                part.logprobs = logprobs.join(
                    logprobs.echo_logprobs(self._tokenizer, request, prompt_entries), part.logprobs
                )
        if first and self._body.prompt_logprobs is not None:
            entries = self._streams[index].answer.prompt_logprobs or ()
            part.prompt_logprobs = logprobs.prompt_logprobs(self._tokenizer, request, entries)
        if self._body.return_token_ids:
            part.token_ids = list(delta.token_ids)
            if first:
                part.prompt_token_ids = list(request.prompt)
        seen = part.text or part.finish_reason or first
        has_tokens = bool(delta.token_ids) and (
            self._body.return_token_ids or request.sampling.logprobs is not None
        )
        return part if seen or has_tokens else None

    def _reply(
        self,
        choices: list[replies.CompletionChoice],
        *,
        usage: replies.Usage | UnsetType | None,
    ) -> replies.Completion:
        return replies.Completion(
            id=self._envelope.id,
            created=self._envelope.created,
            model=self._envelope.model,
            system_fingerprint=self._envelope.fingerprint,
            choices=choices,
            usage=usage,
        )


def _joined(
    first: replies.CompletionChoice, second: replies.CompletionChoice
) -> replies.CompletionChoice:
    joined = replies.CompletionChoice(
        index=first.index,
        text=first.text + second.text,
        finish_reason=second.finish_reason,
        stop_reason=second.stop_reason,
        prompt_logprobs=first.prompt_logprobs,
        prompt_token_ids=first.prompt_token_ids,
    )
    if first.logprobs is not None and second.logprobs is not None:
        joined.logprobs = logprobs.join(first.logprobs, second.logprobs)
    if first.token_ids is not UNSET and second.token_ids is not UNSET:
        joined.token_ids = first.token_ids + second.token_ids
    return joined
