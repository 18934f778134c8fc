"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from lockstep.server import logprobs, replies
from lockstep.server.answers import (
    CallArguments,
    CallStarted,
    Content,
    Decided,
    Finished,
    Piece,
    PieceStream,
    Reasoning,
    Tokens,
)
from lockstep.server.conversation import submit_turn
from lockstep.server.generation import Envelope, Service, respond, service_of
from lockstep.server.json_route import JSONRoute
from lockstep.server.openapi import returns
from lockstep.server.protocol import ChatBody
from lockstep.server.protocol.gate import gate_words
from lockstep.text import Tokenizer

router = APIRouter(route_class=JSONRoute)


@router.post(
    "/v1/chat/completions",
    responses=returns(replies.ChatCompletion, event=replies.ChatChunk),
)
async def create_chat_completion(body: ChatBody, request: HTTPRequest) -> Response:
    """The assistant's next message in a conversation."""
    submit = ChatCall.submit(service_of(request), body)
    return await respond(request, submit, stream=bool(body.stream))


class ChatCall:
    """One reply under construction: whole or streamed, its choices come from `_chunks`."""

    def __init__(
        self, body: ChatBody, envelope: Envelope, pieces: PieceStream, tokenizer: Tokenizer
    ) -> None:
        self._body = body
        self._envelope = envelope
        self._pieces = pieces
        self._tokenizer = tokenizer
        self._answer = pieces.streams[0].answer
        self._request = self._answer.request
        self._decision: replies.GateDecision | UnsetType = UNSET

    @classmethod
    async def submit(cls, service: Service, body: ChatBody) -> ChatCall:
        """Check the body, render the conversation and queue the request."""
        service.check_model(body.model)
        params = body.sampling()
        envelope = Envelope.new(service, "chatcmpl")
        gate = None if body.gate is None else body.gate.spec()
        with gate_words():
            pieces = await submit_turn(
                service, envelope, body.turn(), params, priority=body.priority, gate=gate
            )
        return cls(body, envelope, pieces, service.llm.tokenizer)

    def cancel(self) -> None:
        """As `Call.cancel`."""
        self._pieces.cancel()

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
            for index in range(self._pieces.n)
        ]
        async with aclosing(self._chunks()) as chunks:
            async for chunk in chunks:
                _join(choices[chunk.index], chunk)
        for choice in choices:
            if choice.message.tool_calls is not UNSET:
                choice.message.content = choice.message.content or None
        return replies.ChatCompletion(
            id=self._envelope.id,
            created=self._envelope.created,
            model=self._envelope.model,
            choices=choices,
            usage=self._pieces.usage(),
            system_fingerprint=self._envelope.fingerprint,
            decision=self._decision,
            prompt_logprobs=self._prompt_logprobs(),
            prompt_token_ids=self._prompt_token_ids(),
        )

    async def stream(self) -> AsyncGenerator[replies.Reply, None]:
        """The role of each choice, chunks, then usage if asked for. Behind a gate a choice's
        role comes with the decision."""
        if self._body.gate is None:
            for index in range(self._pieces.n):
                yield self._begun(_role(index))
        told = False
        async with aclosing(self._chunks()) as chunks:
            async for chunk in chunks:
                if chunk.delta.role is not UNSET:
                    yield self._begun(chunk)
                    continue
                reply = self._reply([chunk])
                if not told:
                    reply.prompt_logprobs = self._prompt_logprobs()
                    told = True
                yield reply
        if self._body.include_usage:
            yield self._reply([])

    async def _chunks(self) -> AsyncGenerator[replies.ChatChunkChoice, None]:
        async with aclosing(self._pieces.steps()) as steps:
            async for pieces in steps:
                for chunk in self._split(pieces):
                    yield chunk

    def _split(self, pieces: Sequence[Piece]) -> list[replies.ChatChunkChoice]:
        """A step's chunks: what it adds to its choice, and apart from it the choice's end."""
        chunk = replies.ChatChunkChoice(index=pieces[0].choice, delta=replies.ChatDelta())
        begun: list[replies.ChatChunkChoice] = []
        chunks: list[replies.ChatChunkChoice] = []
        seen = False
        for piece in pieces:
            match piece:
                case Decided(decision=decision):
                    self._decision = replies.GateDecision.of(decision)
                    begun.append(_role(piece.choice))
                case Tokens(delta=delta):
                    if self._body.logprobs:
                        seen |= logprobs.shown_tokens(delta, self._request) > 0
                        chunk.logprobs = logprobs.chat_logprobs(
                            self._tokenizer, self._request, delta
                        )
                    if self._body.return_token_ids:
                        chunk.token_ids = list(delta.token_ids)
                        seen = True
                case Finished():
                    end = replies.ChatChunkChoice(
                        index=piece.choice,
                        delta=replies.ChatDelta(),
                        finish_reason=piece.reason,
                        stop_reason=piece.stop_reason,
                    )
                    chunks.append(end)
                case _:
                    _add(chunk.delta, piece)
                    seen = True
        if seen:
            if chunk.delta.tool_calls is UNSET and chunk.delta.reasoning_content is UNSET:
                chunk.delta.content = chunk.delta.content or ""
            chunks.insert(0, chunk)
        return begun + chunks

    def _begun(self, role: replies.ChatChunkChoice) -> replies.ChatChunk:
        """The first chunk of a choice."""
        reply = self._reply([role])
        reply.decision = self._decision
        reply.prompt_token_ids = self._prompt_token_ids() if role.index == 0 else UNSET
        return reply

    def _prompt_logprobs(self) -> replies.PromptLogprobs | UnsetType:
        entries = self._answer.prompt_logprobs
        if self._body.prompt_logprobs is None or entries is None:
            return UNSET
        return logprobs.prompt_logprobs(self._tokenizer, self._request, entries)

    def _prompt_token_ids(self) -> list[int] | UnsetType:
        return list(self._answer.prompt_ids) if self._body.return_token_ids else UNSET

    def _usage(self, *, last: bool) -> replies.Usage | UnsetType | None:
        """What stands under `usage` in a chunk."""
        if not self._body.include_usage:
            return UNSET
        return self._pieces.usage() if last or self._body.continuous_usage else None

    def _reply(self, choices: list[replies.ChatChunkChoice]) -> replies.ChatChunk:
        return replies.ChatChunk(
            id=self._envelope.id,
            created=self._envelope.created,
            model=self._envelope.model,
            choices=choices,
            system_fingerprint=self._envelope.fingerprint,
            usage=self._usage(last=not choices),
        )


def _role(index: int) -> replies.ChatChunkChoice:
    delta = replies.ChatDelta(role="assistant", content="")
    return replies.ChatChunkChoice(index=index, delta=delta)


def _add(delta: replies.ChatDelta, piece: Piece) -> None:
    """Put a piece of text or of a call into the delta of its step."""
    match piece:
        case Content(text=text):
            delta.content = (delta.content or "") + text
        case Reasoning(text=text):
            delta.reasoning_content = (delta.reasoning_content or "") + text
        case CallStarted():
            started = replies.ToolCallDelta(
                index=piece.call,
                id=piece.id,
                type="function",
                function=replies.FunctionDelta(name=piece.name),
            )
            delta.tool_calls = [*(delta.tool_calls or []), started]
        case CallArguments(call=call, text=text):
            calls = delta.tool_calls or []
            if not calls or calls[-1].index != call:
                calls.append(replies.ToolCallDelta(index=call, function=replies.FunctionDelta()))
                delta.tool_calls = calls
            calls[-1].function.arguments += text


def _join(choice: replies.ChatChoice, chunk: replies.ChatChunkChoice) -> None:
    """Append a chunk to the choice that it belongs to."""
    message, delta = choice.message, chunk.delta
    message.content = (message.content or "") + (delta.content or "")
    if delta.reasoning_content is not UNSET:
        message.reasoning_content = (message.reasoning_content or "") + delta.reasoning_content
    if delta.tool_calls is not UNSET:
        message.tool_calls = message.tool_calls or []
        for call in delta.tool_calls:
            _join_call(message.tool_calls, call)
    if chunk.logprobs is not None and choice.logprobs is not None:
        choice.logprobs.content.extend(chunk.logprobs.content)
    if chunk.token_ids is not UNSET and choice.token_ids is not UNSET:
        choice.token_ids.extend(chunk.token_ids)
    if chunk.finish_reason is not None:
        choice.finish_reason = chunk.finish_reason
        choice.stop_reason = None if chunk.stop_reason is UNSET else chunk.stop_reason


def _join_call(calls: list[replies.ToolCall], delta: replies.ToolCallDelta) -> None:
    function = delta.function
    if delta.id is not UNSET and function.name is not UNSET:
        called = replies.CalledFunction(name=function.name, arguments=function.arguments)
        calls.append(replies.ToolCall(id=delta.id, function=called))
    else:
        calls[delta.index].function.arguments += function.arguments
