"""`POST /v1/chat/completions`."""

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
from lockstep.server.protocol import ChatBody
from lockstep.server.sse import EventStream, merge, until_disconnect

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatBody, request: HTTPRequest) -> Response:
    """The assistant's next message in a conversation."""
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
    """One reply under construction: whole or streamed, its choices come from `_chunk`."""

    def __init__(
        self,
        service: Service,
        body: ChatBody,
        envelope: Envelope,
        streams: Sequence[AnswerStream],
    ) -> None:
        self._body = body
        self._envelope = envelope
        self._tokenizer = service.llm.tokenizer
        self._streams = streams
        self._request = streams[0].answer.request
        self._counter = Counter(streams)

    @classmethod
    async def submit(cls, service: Service, body: ChatBody) -> _Call:
        """Check the body, render the conversation and queue the request."""
        service.check_model(body.model)
        params = body.sampling()
        envelope = Envelope.new(service, "chatcmpl")
        builder, messages = service.llm.builder, body.conversation()
        ids = await off_loop(
            lambda: builder.encode_chat(messages, body.chat_template_kwargs),
            sum(len(message["content"]) for message in messages),
        )
        requests = build_requests(
            service, envelope, [ids], params, priority=body.priority, field="messages"
        )
        return cls(service, body, envelope, await service.llm.submit(requests))

    def cancel(self) -> None:
        """End in the engine what still runs; does nothing after a whole answer."""
        for stream in self._streams:
            stream.cancel()

    async def whole(self) -> replies.ChatCompletion:
        """The reply in one piece: the chunks' choices, joined."""
        choices = [
            replies.ChatChoice(
                index=index,
                message=replies.ChatMessage(content=""),
                finish_reason="",
                logprobs=replies.ChatLogprobs(content=[]) if self._body.logprobs else None,
                token_ids=[] if self._body.return_token_ids else UNSET,
            )
            for index in range(self._request.sampling.n)
        ]
        async with aclosing(self._chunks()) as chunks:
            async for chunk in chunks:
                _join(choices[chunk.index], chunk)
        return replies.ChatCompletion(
            id=self._envelope.id,
            created=self._envelope.created,
            model=self._envelope.model,
            choices=choices,
            usage=self._counter.usage(),
            system_fingerprint=self._envelope.fingerprint,
            prompt_logprobs=self._prompt_logprobs(),
            prompt_token_ids=self._prompt_token_ids(),
        )

    async def stream(self) -> AsyncGenerator[replies.Reply, None]:
        """The role of each choice, chunks, then usage if asked for."""
        for index in range(self._request.sampling.n):
            role = replies.ChatDelta(role="assistant", content="")
            reply = self._reply([replies.ChatChunkChoice(index=index, delta=role)])
            reply.prompt_token_ids = self._prompt_token_ids() if index == 0 else UNSET
            yield reply
        told = False
        async with aclosing(self._chunks()) as chunks:
            async for chunk in chunks:
                reply = self._reply([chunk])
                if not told:
                    reply.prompt_logprobs = self._prompt_logprobs()
                    told = True
                yield reply
        if self._body.include_usage:
            yield self._reply([], usage=self._counter.usage())

    async def _chunks(self) -> AsyncGenerator[replies.ChatChunkChoice, None]:
        async with aclosing(merge(self._streams)) as deltas:
            async for _, delta in deltas:
                self._counter.add(delta)
                for chunk in self._split(delta):
                    yield chunk

    def _split(self, delta: Delta) -> list[replies.ChatChunkChoice]:
        """A delta's chunks: its content, and apart from it the end of its choice."""
        chunks: list[replies.ChatChunkChoice] = []
        shown = logprobs.shown_tokens(delta, self._request) if self._body.logprobs else 0
        raw = len(delta.token_ids) if self._body.return_token_ids else 0
        if delta.text or shown or raw:
            content = replies.ChatChunkChoice(
                index=delta.choice, delta=replies.ChatDelta(content=delta.text)
            )
            if self._body.logprobs:
                content.logprobs = logprobs.chat_logprobs(self._tokenizer, self._request, delta)
            if self._body.return_token_ids:
                content.token_ids = list(delta.token_ids)
            chunks.append(content)
        if delta.finish_reason is not None:
            chunks.append(
                replies.ChatChunkChoice(
                    index=delta.choice,
                    delta=replies.ChatDelta(),
                    finish_reason=delta.finish_reason,
                    stop_reason=delta.stop_reason,
                )
            )
        return chunks

    def _prompt_logprobs(self) -> replies.PromptLogprobs | UnsetType:
        entries = self._streams[0].answer.prompt_logprobs
        if self._body.prompt_logprobs is None or entries is None:
            return UNSET
        return logprobs.prompt_logprobs(self._tokenizer, self._request, entries)

    def _prompt_token_ids(self) -> list[int] | UnsetType:
        return list(self._request.prompt) if self._body.return_token_ids else UNSET

    def _reply(
        self, choices: list[replies.ChatChunkChoice], *, usage: replies.Usage | None = None
    ) -> replies.ChatChunk:
        return replies.ChatChunk(
            id=self._envelope.id,
            created=self._envelope.created,
            model=self._envelope.model,
            choices=choices,
            system_fingerprint=self._envelope.fingerprint,
            usage=usage if self._body.include_usage else UNSET,
        )


def _join(choice: replies.ChatChoice, chunk: replies.ChatChunkChoice) -> None:
    """Append a chunk to the choice that it belongs to."""
    if chunk.delta.content is not UNSET:
        choice.message.content += chunk.delta.content
    if chunk.logprobs is not None and choice.logprobs is not None:
        choice.logprobs.content.extend(chunk.logprobs.content)
    if chunk.token_ids is not UNSET and choice.token_ids is not UNSET:
        choice.token_ids.extend(chunk.token_ids)
    if chunk.finish_reason is not None:
        choice.finish_reason = chunk.finish_reason
        choice.stop_reason = None if chunk.stop_reason is UNSET else chunk.stop_reason
