"""The asyncio door: an engine in a process of its own. Imports no torch."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, Unpack, cast, overload

from lockstep.branch import Branch, check_branch_name
from lockstep.decisions import Decision, GatedCompletion, Question, inquire_prefix
from lockstep.decisions.asking import GateArguments, ask, gated_requests, is_one_question
from lockstep.embeddings import PoolingKind, Vector, embed_requests, embedding
from lockstep.engine.client import (
    HANG_SECONDS,
    EngineClient,
    EngineUnavailable,
    ProgressCallback,
)
from lockstep.engine.mailbox import OutputQueue
from lockstep.outputs import Answer, Delta, GenerationError, Score
from lockstep.requests import (
    CHAT_DEFAULTS,
    COMPLETION_DEFAULTS,
    Conversation,
    Params,
    Prompt,
    RequestBuilder,
    Tools,
    chat_requests,
    completion_requests,
    is_one_conversation,
    is_one_prompt,
    one_params,
    score_requests,
    spread_context,
)
from lockstep.settings import EngineSettings, engine_config
from lockstep.types import (
    Completion,
    EngineInfo,
    EngineStats,
    FinishReason,
    LockstepError,
    Request,
    SamplingParams,
)
from lockstep.weights import open_checkpoint

if TYPE_CHECKING:
    from lockstep.text import Tokenizer


class Outcome(StrEnum):
    """What became of a request that the engine had taken; each has exactly one."""

    COMPLETED = "completed"  # every choice finished, whatever the reason
    CANCELLED = "cancelled"  # nobody wanted the rest
    FAILED = "failed"  # the step that computed it failed
    LOST = "lost"  # the engine process died, or the door ended the request


class RequestWatch(Protocol):
    """Told what becomes of one request; must not raise."""

    def progress(self, delta: Delta, started: float) -> None:
        """A delta is about to be read. `started`: as `SequenceOutput.started`."""

    def ended(self, outcome: Outcome) -> None:
        """Called once, when nothing more will be read."""


class Doorkeeper(Protocol):
    """Looks at every request of an `AsyncLLM` before the engine does."""

    def admit(self, requests: Sequence[Request]) -> Sequence[Request]:
        """What is to be submitted in place of `requests`.

        Raises:
            LockstepError: none of them.
        """

    def watch(self, request: Request, submitted: float) -> RequestWatch:
        """Somebody to tell about a request that the engine has taken; must not raise.
        `submitted`: when it was sent, in seconds of the monotonic clock."""


class AnswerStream:
    """One request in the engine: iterate over its deltas, or await the whole answer."""

    def __init__(
        self,
        client: EngineClient,
        queue: OutputQueue,
        answer: Answer,
        watch: RequestWatch | None = None,
    ) -> None:
        self.answer = answer
        self._client = client
        self._queue = queue
        self._watch = watch

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        """The next delta.

        Raises:
            EngineUnavailable: the engine process died.
            GenerationError: the engine failed on this request.
        """
        while not self.answer.done:
            item = await self._queue.get()
            if isinstance(item, LockstepError):
                self._end(Outcome.LOST)
                raise item
            delta = self.answer.push(item)
            if delta is None:
                continue
            if self._watch is not None:
                self._watch.progress(delta, item.started)
            if delta.finish_reason is FinishReason.ERROR:
                self._end(Outcome.FAILED)
                self.cancel()
                raise GenerationError(self.answer.failure, [self.answer.completion()])
            if delta.finish_reason is not None and item.finish is None:
                self._client.cancel(item.request, item.choice)  # the engine knows no stop strings
            if self.answer.done:
                self._end(Outcome.COMPLETED)
            return delta
        raise StopAsyncIteration

    def cancel(self) -> None:
        """End the request in the engine; does nothing when it has ended."""
        self._client.cancel(self.answer.request.id)
        self._end(Outcome.CANCELLED)

    def _end(self, outcome: Outcome) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.ended(outcome)

    async def completion(self) -> Completion:
        """The whole answer; cancelling the wait cancels the request."""
        try:
            async for _ in self:
                pass
        finally:
            self.cancel()
        return self.answer.completion()


class AsyncLLM:
    """A model in an engine process of its own, for asyncio programs and the server.

    Use as `async with AsyncLLM("smollm2") as llm`, or call `start` and `close`. The
    process is restarted when it dies; requests that were in it raise `EngineUnavailable`.

    Args:
        model, settings: as `LLM`.
        hang_seconds: an engine process that says nothing for so long is killed and started
            again; longer than any step; 0 waits for ever.

    Attributes:
        doorkeeper: asked about every request, if there is one.
    """

    doorkeeper: Doorkeeper | None = None

    def __init__(
        self,
        model: str = "smollm2",
        *,
        hang_seconds: float = HANG_SECONDS,
        **settings: Unpack[EngineSettings],
    ) -> None:
        config = engine_config(model, **settings)
        self._client = EngineClient(config, hang_seconds=hang_seconds)
        self._tokenizer: Tokenizer | None = None

    @classmethod
    def from_client(cls, client: EngineClient, tokenizer: Tokenizer | None = None) -> AsyncLLM:
        """A door on a client that has not started yet; the tokenizer by default is its model's."""
        llm = cls.__new__(cls)
        llm._client = client
        llm._tokenizer = tokenizer
        return llm

    async def start(self, progress: ProgressCallback | None = None) -> EngineInfo:
        """Start the engine process and wait until it is ready.

        Raises:
            ModelError, ConfigError, EngineStartError: what is wrong, in one line.
        """
        if self._tokenizer is None:
            name = self._client.config.model.name
            self._tokenizer = await asyncio.to_thread(lambda: open_checkpoint(name).tokenizer())
        return await self._client.start(progress)

    async def close(self) -> None:
        """Stop the engine process; calling again does nothing."""
        await self._client.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def client(self) -> EngineClient:
        """The engine process as this door sees it."""
        return self._client

    @property
    def info(self) -> EngineInfo:
        return self._client.info

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise EngineUnavailable(
                "the engine is not started yet", retry_after=self._client.retry_after
            )
        return self._tokenizer

    @property
    def builder(self) -> RequestBuilder:
        """Makes requests for `submit`."""
        return RequestBuilder(self.tokenizer, self.info)

    def stats(self) -> EngineStats:
        """The engine's gauges and counters as last reported (at most about a second old)."""
        return self._client.stats

    def flush_cache(self) -> None:
        """Forget every cached prefix, before any request that is submitted later."""
        self._client.flush_cache()

    @property
    def branches(self) -> Mapping[str, Branch]:
        """The loaded branches, by name."""
        return self._client.branches

    async def load_branch(self, name: str, folder: str | os.PathLike[str]) -> Branch:
        """As `LLM.load_branch`. An engine that is started again has it, too."""
        check_branch_name(name)
        return await self._client.load_branch(name, os.path.abspath(folder))

    async def unload_branch(self, name: str) -> None:
        """As `LLM.unload_branch`."""
        await self._client.unload_branch(name)

    async def submit(
        self,
        requests: Sequence[Request],
        *,
        shown: frozenset[int] = frozenset(),
        begins: Sequence[Sequence[str]] = (),
    ) -> list[AnswerStream]:
        """Queue requests; returns when the engine has taken all of them, or none stays.

        Args:
            shown: control tokens that have text in the answers, see `TextStream`.
            begins: of gated requests, for each of them as `Answer`.

        Raises:
            RequestError, EngineUnavailable: as `EngineClient.submit`; what `doorkeeper` raises.
        """
        keeper = self.doorkeeper
        if keeper is not None:
            requests = keeper.admit(requests)
        submitted = time.monotonic()
        tasks = [asyncio.create_task(self._client.submit(request)) for request in requests]
        try:
            queues = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            for request, end in zip(requests, ends, strict=True):
                if not isinstance(end, BaseException):  # a refused id may be another's
                    self._client.cancel(request.id)
            raise
        return [
            AnswerStream(
                self._client,
                queue,
                Answer(self.tokenizer, request, shown, own),
                None if keeper is None else keeper.watch(request, submitted),
            )
            for request, queue, own in zip(
                requests, queues, begins or [()] * len(requests), strict=True
            )
        ]

    @overload  # a str is one prompt, though it is a sequence of str too
    async def generate(  # type: ignore[overload-overlap]
        self, prompts: str | Sequence[int], params: Params = None
    ) -> Completion: ...

    @overload
    async def generate(
        self, prompts: Sequence[str] | Sequence[Sequence[int]], params: Params = None
    ) -> list[Completion]: ...

    async def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params = None
    ) -> Completion | list[Completion]:
        """As `LLM.generate`; cancelling the call cancels the requests."""
        one = is_one_prompt(prompts)
        batch = cast("Sequence[Prompt]", [prompts] if one else prompts)
        requests = completion_requests(self.builder, batch, params)
        completions = await self._run(requests)
        return completions[0] if one else completions

    @overload
    async def chat(
        self, messages: Conversation, params: Params = None, *, tools: Tools = None
    ) -> Completion: ...

    @overload
    async def chat(
        self, messages: Sequence[Conversation], params: Params = None, *, tools: Tools = None
    ) -> list[Completion]: ...

    async def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: Params = None,
        *,
        tools: Tools = None,
    ) -> Completion | list[Completion]:
        """As `LLM.chat`; cancelling the call cancels the requests."""
        one = is_one_conversation(messages) or not messages
        batch = cast("Sequence[Conversation]", [messages] if one else messages)
        requests = chat_requests(self.builder, batch, params, tools)
        completions = await self._run(requests)
        return completions[0] if one else completions

    async def score(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        context: Prompt | Conversation | Sequence[Prompt | Conversation] | None = None,
        alternatives: int = 0,
    ) -> Score | list[Score]:
        """As `LLM.score`."""
        one = is_one_prompt(texts)
        batch = cast("Sequence[Prompt]", [texts] if one else texts)
        requests, lengths = score_requests(
            self.builder, batch, spread_context(context, batch), alternatives
        )
        completions = await self._run(requests)
        scores = [Score.of(c, length) for c, length in zip(completions, lengths, strict=True)]
        return scores[0] if one else scores

    @overload
    async def decide(
        self,
        given: str | Conversation,
        questions: Question | None = None,
        *,
        branch: str = "",
        tools: Tools = None,
    ) -> Decision: ...

    @overload
    async def decide(
        self,
        given: str | Conversation,
        questions: Sequence[Question],
        *,
        branch: str = "",
        tools: Tools = None,
    ) -> list[Decision]: ...

    async def decide(
        self,
        given: str | Conversation,
        questions: Question | Sequence[Question] | None = None,
        *,
        branch: str = "",
        tools: Tools = None,
    ) -> Decision | list[Decision]:
        """As `LLM.decide`."""
        inquiry = ask(self.builder, self._branches(branch), given, questions, branch, tools)
        decisions = inquiry.decisions(await self._run(list(inquiry.requests())))
        return decisions[0] if is_one_question(questions) else decisions

    async def decide_prefix(
        self, given: str | Conversation, prefix: str, options: Sequence[str], *, tools: Tools = None
    ) -> Decision:
        """As `LLM.decide_prefix`."""
        inquiry = inquire_prefix(self.builder, given, prefix, options, tools=tools)
        return inquiry.decisions(await self._run(list(inquiry.requests())))[0]

    @overload  # a str is one prompt, though it is a sequence of str too
    async def decide_then_write(  # type: ignore[overload-overlap]
        self,
        given: str | Conversation,
        params: Params = None,
        *,
        tools: Tools = None,
        **gate: Unpack[GateArguments],
    ) -> GatedCompletion: ...

    @overload
    async def decide_then_write(
        self,
        given: Sequence[str] | Sequence[Conversation],
        params: Params = None,
        *,
        tools: Tools = None,
        **gate: Unpack[GateArguments],
    ) -> list[GatedCompletion]: ...

    async def decide_then_write(
        self,
        given: str | Conversation | Sequence[str] | Sequence[Conversation],
        params: Params = None,
        *,
        tools: Tools = None,
        **gate: Unpack[GateArguments],
    ) -> GatedCompletion | list[GatedCompletion]:
        """As `LLM.decide_then_write`; cancelling the call cancels the requests."""
        branches = self._branches(gate.get("branch", ""))
        one, gated, requests = gated_requests(self.builder, branches, given, params, gate, tools)
        completions = await self._run(requests, [own.begins for own in gated])
        found = [GatedCompletion.of(g, c) for g, c in zip(gated, completions, strict=True)]
        return found[0] if one else found

    @overload  # a str is one prompt, though it is a sequence of str too
    async def embed(  # type: ignore[overload-overlap]
        self,
        texts: str | Sequence[int],
        *,
        pooling: PoolingKind = "last",
        dimensions: int | None = None,
    ) -> Vector: ...

    @overload
    async def embed(
        self,
        texts: Sequence[str] | Sequence[Sequence[int]],
        *,
        pooling: PoolingKind = "last",
        dimensions: int | None = None,
    ) -> list[Vector]: ...

    async def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        pooling: PoolingKind = "last",
        dimensions: int | None = None,
    ) -> Vector | list[Vector]:
        """As `LLM.embed`."""
        one = is_one_prompt(texts)
        batch = cast("Sequence[Prompt]", [texts] if one else texts)
        requests = embed_requests(self.builder, batch, pooling, dimensions)
        completions = await self._run(requests)
        vectors = [embedding(completion, pooling, dimensions) for completion in completions]
        return vectors[0] if one else vectors

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncGenerator[Delta, None]:
        """Deltas of one completion as they are computed; leaving the loop cancels it."""
        ids = self.builder.encode(prompt)
        return self._stream(self.builder.build(ids, one_params(params, COMPLETION_DEFAULTS)))

    def stream_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Tools = None,
    ) -> AsyncGenerator[Delta, None]:
        """As `stream`, for the assistant's next message in a conversation."""
        ids = self.builder.encode_chat(messages, tools)
        return self._stream(
            self.builder.build(ids, one_params(params, CHAT_DEFAULTS), field="messages")
        )

    def _branches(self, wanted: str) -> Mapping[str, Branch]:
        """Those that there are, if one is wanted."""
        return self.branches if wanted else {}

    async def _stream(self, request: Request) -> AsyncGenerator[Delta, None]:
        (stream,) = await self.submit([request])
        try:
            async for delta in stream:
                yield delta
        finally:
            stream.cancel()

    async def _run(
        self, requests: Sequence[Request], begins: Sequence[Sequence[str]] = ()
    ) -> list[Completion]:
        streams = await self.submit(requests, begins=begins)
        try:
            return [await stream.completion() for stream in streams]
        finally:
            for stream in streams:
                stream.cancel()
