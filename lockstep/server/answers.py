"""The one builder of answers: what running requests say, as typed pieces.

Chat completions, completions and responses, streamed and whole, are made from these
pieces and from nothing else; a whole answer is the join of its pieces. Which pieces come
is settled by the tokens alone; only how texts are cut depends on how the tokens arrived.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from lockstep.async_llm import AnswerStream
from lockstep.decisions import Decision, Gated
from lockstep.outputs import Delta
from lockstep.server.replies import CompletionTokensDetails, PromptTokensDetails, Usage
from lockstep.server.sse import merge
from lockstep.text.answer import PLAIN, AnswerFormat, AnswerReader
from lockstep.text.events import CallClosed, CallOpened, CallText, Event, Text, Thought
from lockstep.types import FinishReason

TOOL_CALLS = "tool_calls"
CallCount = Callable[[str, str], None]
"""Told the function's name and the result of every call: "ok", "malformed" or "aborted"."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text between the model's think markers."""

    choice: int
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer itself."""

    choice: int
    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A function call begins; `call` counts the calls of the choice from 0."""

    choice: int
    call: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Characters of a call's arguments. Joined they are one JSON object, unless the choice
    ends for want of room ("length") in the middle of them."""

    choice: int
    call: int
    text: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """What came from the engine in this step: token ids, logprobs; before its texts."""

    choice: int
    delta: Delta


@dataclass(frozen=True, slots=True)
class Decided:
    """What the request's gate decided: the first piece of every choice."""

    choice: int
    decision: Decision


@dataclass(frozen=True, slots=True)
class Finished:
    """The choice has ended.

    Attributes:
        reason: "stop", "length", "cancelled", "gate", or "tool_calls" when it stopped by itself
            and holds at least one call.
        stop_reason: the stop string or client's stop token id that ended it, if one did.
    """

    choice: int
    reason: str
    stop_reason: str | int | None


Piece = Reasoning | Content | CallStarted | CallArguments | Tokens | Decided | Finished


def new_call_id(form: AnswerFormat) -> str:
    """An id for a call, as the model's templates want it."""
    if form.tools is not None and form.tools.short_ids:
        return uuid.uuid4().hex[:9]
    return f"call_{uuid.uuid4().hex[:24]}"


class PieceBuilder:
    """Makes the pieces of one choice from its deltas. Mutable; owned by one answer.

    Args:
        choice: the index that the pieces carry.
        count: told of every call that the model began, once. A call that is "malformed" went
            wrong by itself, one that is "aborted" was not finished because the answer was cut.
        gated: the gate of its request.

    Attributes:
        tokens: generated so far.
        reasoning_tokens: of these, in the reasoning.
    """

    def __init__(
        self,
        choice: int,
        form: AnswerFormat = PLAIN,
        count: CallCount | None = None,
        gated: Gated | None = None,
    ) -> None:
        self.tokens = 0
        self._choice = choice
        self._gated = gated
        self._form = form
        self._reader = None if form.plain else AnswerReader(form)
        self._thinking_offsets: list[int] = []  # of tokens that may belong to the reasoning
        self._reasoning_tokens: int | None = None if form.thinking else 0
        self._opened = 0  # calls
        self._closed = 0
        self._count = count
        self._counted = 0
        self._ended = False

    @property
    def reasoning_tokens(self) -> int:
        if self._reasoning_tokens is None:
            return len(self._thinking_offsets)
        return self._reasoning_tokens

    def push(self, delta: Delta) -> list[Piece]:
        """The pieces that a delta makes: its tokens, its texts, the end of the choice."""
        pieces: list[Piece] = []
        if delta.gate is not None and self._gated is not None:
            pieces.append(Decided(self._choice, self._gated.decision(delta.gate)))
        if delta.token_ids or delta.prompt_logprobs is not None:
            pieces.append(Tokens(self._choice, delta))
        self.tokens += len(delta.token_ids)
        if self._reader is None:
            if delta.text:
                pieces.append(Content(self._choice, delta.text))
        else:
            pieces.extend(self._piece(event) for event in self._read(delta, self._reader))
            self._count_calls(delta, self._reader)
        if delta.finish_reason is not None:
            reason: str = delta.finish_reason.value
            if delta.finish_reason is FinishReason.STOP and self._closed:
                reason = TOOL_CALLS
            pieces.append(Finished(self._choice, reason, delta.stop_reason))
        return pieces

    def abandon(self) -> None:
        """Nothing more will be pushed."""
        if self._ended or self._reader is None:
            return
        self._ended = True
        name = self._reader.call_under_way
        if name is not None and self._count is not None:
            self._count(name, "aborted")

    def _count_calls(self, delta: Delta, reader: AnswerReader) -> None:
        self._ended = delta.finish_reason is not None
        if self._count is None:
            return
        by_itself = delta.finish_reason is FinishReason.STOP and delta.stop_reason is None
        for end in reader.ends[self._counted :]:
            result: str = end.result
            if result == "unfinished":
                result = "malformed" if by_itself else "aborted"
            self._count(end.name, result)
        self._counted = len(reader.ends)

    def _read(self, delta: Delta, reader: AnswerReader) -> list[Event]:
        events = reader.push(delta.text)
        if delta.finish_reason is not None:
            events += reader.finish()
        if self._reasoning_tokens is None:
            self._thinking_offsets.extend(delta.token_offsets)
            end = reader.reasoning_end
            if end is not None:
                self._reasoning_tokens = sum(start < end for start in self._thinking_offsets)
                self._thinking_offsets.clear()
        closed = [event for event in events if isinstance(event, CallClosed)]
        self._closed += len(closed)
        return [event for event in events if not isinstance(event, CallClosed)]

    def _piece(self, event: Event) -> Piece:
        match event:
            case Thought(text):
                return Reasoning(self._choice, text)
            case Text(text):
                return Content(self._choice, text)
            case CallOpened(name):
                self._opened += 1
                return CallStarted(self._choice, self._opened - 1, new_call_id(self._form), name)
            case CallText(text):
                return CallArguments(self._choice, self._opened - 1, text)
            case CallClosed():
                raise AssertionError("taken out before")


class PieceStream:
    """The pieces of running requests as they come; each choice's end in `Finished`.

    Choices are counted over all requests: choice c of request r, each with n choices, is
    r * n + c. Leaving the iteration early, or `cancel`, ends the requests in the engine.

    Args:
        streams: running requests, all with the same n.
        form: how their answers are written.
        count: as `PieceBuilder`.
        gates: of gated requests, one for each stream.
        decided: told of each request's decision and whether its gate opened.
    """

    def __init__(
        self,
        streams: Sequence[AnswerStream],
        form: AnswerFormat = PLAIN,
        count: CallCount | None = None,
        gates: Sequence[Gated] = (),
        decided: Callable[[Decision, bool], None] | None = None,
    ) -> None:
        self.streams = streams
        self._decided = decided
        self.n = streams[0].answer.request.sampling.n
        self._builders = [
            PieceBuilder(index, form, count, gates[index // self.n] if gates else None)
            for index in range(self.n * len(streams))
        ]

    async def steps(self) -> AsyncGenerator[list[Piece], None]:
        """The pieces of one delta at a time, all of one choice; never an empty list.

        Raises:
            LockstepError: the first failure of any request.
        """
        async with aclosing(merge(self.streams)) as deltas:
            async for index, delta in deltas:
                pieces = self._builders[index * self.n + delta.choice].push(delta)
                if pieces and isinstance(pieces[0], Decided) and not delta.choice and self._decided:
                    self._decided(pieces[0].decision, delta.finish_reason is not FinishReason.GATE)
                if pieces:
                    yield pieces

    async def __aiter__(self) -> AsyncIterator[Piece]:
        async with aclosing(self.steps()) as steps:
            async for pieces in steps:
                for piece in pieces:
                    yield piece

    def cancel(self) -> None:
        """End in the engine what still runs; does nothing after whole answers."""
        for builder in self._builders:
            builder.abandon()
        for stream in self.streams:
            stream.cancel()

    def usage(self) -> Usage:
        """Totals so far; a prompt counts once however many choices share it."""
        prompt = sum(stream.answer.prompt_tokens for stream in self.streams)
        generated = sum(builder.tokens for builder in self._builders)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=generated,
            total_tokens=prompt + generated,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=sum(stream.answer.cached_tokens for stream in self.streams)
            ),
            completion_tokens_details=CompletionTokensDetails(
                reasoning_tokens=sum(builder.reasoning_tokens for builder in self._builders)
            ),
        )
