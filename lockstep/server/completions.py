"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from lockstep.decisions import Gated, gate_prompt
from lockstep.outputs import Delta
from lockstep.server import logprobs, replies
from lockstep.server.answers import Content, Decided, Finished, Piece, PieceStream, Tokens
from lockstep.server.generation import (
    Envelope,
    Service,
    build_requests,
    off_loop,
    respond,
    service_of,
)
from lockstep.server.json_route import JSONRoute
from lockstep.server.openapi import returns
from lockstep.server.protocol import CompletionBody
from lockstep.server.protocol.gate import gate_words
from lockstep.text import Tokenizer
from lockstep.types import SamplingParams

router = APIRouter(route_class=JSONRoute)


@router.post("/v1/completions", responses=returns(replies.Completion, event=replies.Completion))
async def create_completion(body: CompletionBody, request: HTTPRequest) -> Response:
    """Continue each prompt."""
    submit = CompletionCall.submit(service_of(request), body)
    return await respond(request, submit, stream=bool(body.stream))


class CompletionCall:
    """One reply under construction: whole or streamed, its choices come from `_choices`."""

    def __init__(
        self,
        body: CompletionBody,
        envelope: Envelope,
        prompts: Sequence[str | list[int]],
        pieces: PieceStream,
        tokenizer: Tokenizer,
    ) -> None:
        self._body = body
        self._envelope = envelope
        self._pieces = pieces
        self._tokenizer = tokenizer
        self._echoed = ["" for _ in prompts]
        if body.echo:
            self._echoed = [
                prompt
                if isinstance(prompt, str)
                else tokenizer.decode(prompt, skip_special_tokens=False)
                for prompt in prompts
            ]
        self._begun: set[int] = set()
        self._decision: replies.GateDecision | UnsetType = UNSET

    @classmethod
    async def submit(cls, service: Service, body: CompletionBody) -> CompletionCall:
        """Check the body and queue its requests."""
        service.check_model(body.model)
        params = body.sampling()
        prompts = body.prompts()
        envelope = Envelope.new(service, "cmpl")
        builder = service.builder
        ids = await off_loop(
            lambda: [builder.encode(prompt) for prompt in prompts], sum(map(len, prompts))
        )
        gates = [] if body.gate is None else await _gates(service, body, params, ids)
        requests = build_requests(
            service, envelope, ids, params, priority=body.priority, field="prompt", gates=gates
        )
        with gate_words():
            streams = await service.llm.submit(requests, begins=[own.begins for own in gates])
        pieces = PieceStream(streams, gates=gates, decided=service.decided.count_gate)
        return cls(body, envelope, prompts, pieces, service.llm.tokenizer)

    def cancel(self) -> None:
        """As `Call.cancel`."""
        self._pieces.cancel()

    async def whole(self) -> replies.Completion:
        """The reply in one piece: the chunks' choices, joined."""
        choices: dict[int, replies.CompletionChoice] = {}
        async with aclosing(self._choices()) as parts:
            async for part in parts:
                if part.index in choices:
                    _join(choices[part.index], part)
                else:
                    choices[part.index] = part
        return self._reply(
            [choices[index] for index in sorted(choices)], usage=self._pieces.usage()
        )

    async def stream(self) -> AsyncGenerator[replies.Reply, None]:
        """Chunks, then usage if asked for."""
        usage = None if self._body.include_usage else UNSET
        async with aclosing(self._choices()) as parts:
            async for part in parts:
                so_far = self._pieces.usage() if self._body.continuous_usage else usage
                yield self._reply([part], usage=so_far)
        if self._body.include_usage:
            yield self._reply([], usage=self._pieces.usage())

    async def _choices(self) -> AsyncGenerator[replies.CompletionChoice, None]:
        async with aclosing(self._pieces.steps()) as steps:
            async for pieces in steps:
                first, rest = pieces[:1], pieces[1:]
                if isinstance(first[0], Decided) and rest:  # what follows has a chunk of its own
                    split = [first, rest]
                else:
                    split = [pieces]
                for own in split:
                    part = self._part(own)
                    if part is not None:
                        yield part

    def _part(self, pieces: Sequence[Piece]) -> replies.CompletionChoice | None:
        """What a step adds to its choice; None when it adds nothing that the client sees."""
        part = replies.CompletionChoice(index=pieces[0].choice, text="")
        first = part.index not in self._begun
        self._begun.add(part.index)
        seen = first
        for piece in pieces:
            match piece:
                case Decided(decision=decision):
                    part.decision = replies.GateDecision.of(decision)
                    if len(self._pieces.streams) == 1:
                        self._decision = part.decision
                case Tokens():
                    seen |= self._add_tokens(part, piece)
                case Content(text=text):
                    part.text += text
                    seen = True
                case Finished():
                    part.finish_reason = piece.reason
                    part.stop_reason = piece.stop_reason
                    seen = True
        if first:
            self._begin(part)
        return part if seen else None

    def _add_tokens(self, part: replies.CompletionChoice, tokens: Tokens) -> bool:
        """Put the step's tokens into its part; returns whether the client sees any of it."""
        index = part.index // self._pieces.n
        request = self._pieces.streams[index].answer.request
        if request.sampling.logprobs is not None:
            part.logprobs = logprobs.completion_logprobs(
                self._tokenizer, request, tokens.delta, len(self._echoed[index])
            )
        if self._body.return_token_ids:
            part.token_ids = list(tokens.delta.token_ids)
        wanted = self._body.return_token_ids or request.sampling.logprobs is not None
        return wanted and bool(tokens.delta.token_ids)

    def _begin(self, part: replies.CompletionChoice) -> None:
        """Put what comes with a choice's first step into its part: all about the prompt."""
        index = part.index // self._pieces.n
        answer = self._pieces.streams[index].answer
        request = answer.request
        part.text = self._echoed[index] + part.text
        if self._body.return_token_ids:
            part.prompt_token_ids = list(answer.prompt_ids)
            part.token_ids = part.token_ids or []
        if self._body.prompt_logprobs is not None:
            part.prompt_logprobs = logprobs.prompt_logprobs(
                self._tokenizer, request, answer.prompt_logprobs or ()
            )
        if request.sampling.logprobs is None:
            return
        if part.logprobs is None:
            part.logprobs = logprobs.completion_logprobs(
                self._tokenizer, request, Delta(part.index), 0
            )
        if self._body.echo and answer.prompt_logprobs is not None:
            echoed = logprobs.echo_logprobs(self._tokenizer, request, answer.prompt_logprobs)
            logprobs.append(echoed, part.logprobs)
            part.logprobs = echoed

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
            decision=self._told(choices),
            usage=usage,
        )

    def _told(self, choices: list[replies.CompletionChoice]) -> replies.GateDecision | UnsetType:
        """The decision of the only prompt, where one of its choices tells of it."""
        told = any(choice.decision is not UNSET for choice in choices)
        return self._decision if told else UNSET


async def _gates(
    service: Service, body: CompletionBody, params: SamplingParams, prompts: list[list[int]]
) -> list[Gated]:
    """The body's gate on each prompt.

    Raises:
        RequestError: naming the gate's field.
    """
    assert body.gate is not None
    spec = body.gate.spec()
    spec.check_writer(params)
    builder, branches = service.builder, service.branches
    with gate_words():
        return await off_loop(
            lambda: [gate_prompt(builder, spec, branches, ids) for ids in prompts],
            len(prompts) * spec.length(),
        )


def _join(choice: replies.CompletionChoice, part: replies.CompletionChoice) -> None:
    """Append a later part to its choice."""
    choice.text += part.text
    choice.finish_reason = part.finish_reason
    choice.stop_reason = part.stop_reason
    if choice.logprobs is not None and part.logprobs is not None:
        logprobs.append(choice.logprobs, part.logprobs)
    if choice.token_ids is not UNSET and part.token_ids is not UNSET:
        choice.token_ids.extend(part.token_ids)
