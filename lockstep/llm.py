"""The blocking door: `LLM`, with the engine in this process.

`AsyncLLM` and what both return are named here too. Importing this module imports
no torch; making an `LLM` does.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack, cast, overload

from lockstep.async_llm import AnswerStream, AsyncLLM
from lockstep.branch import Branch, check_branch_name
from lockstep.decisions import Decision, Gated, GatedCompletion, Question, inquire_prefix
from lockstep.decisions.asking import GateArguments, ask, gated_requests, is_one_question
from lockstep.embeddings import PoolingKind, Vector, embed_requests, embedding
from lockstep.engine.client import EngineUnavailable
from lockstep.outputs import Answer, Delta, GenerationError, Score
from lockstep.progress import deferred_interrupt, progress_bar, wanted
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
    LockstepError,
    Request,
    RequestError,
    SamplingParams,
    SequenceOutput,
)
from lockstep.weights import open_checkpoint

if TYPE_CHECKING:
    from lockstep.engine.loop import Engine
    from lockstep.text import Tokenizer

__all__ = [
    "LLM",
    "AnswerStream",
    "AsyncLLM",
    "Delta",
    "EngineUnavailable",
    "GenerationError",
    "Score",
]


class LLM:
    """A model in this process, for scripts and notebooks.

    Args:
        model: a path, a packaged name ("smollm2", "gemma3-270m") or a hub id.
        progress: show progress bars; None shows them on a terminal.
        settings: see `EngineSettings`.

    Calls from several threads share the engine's steps.

    Raises:
        ModelError: the model cannot be loaded.
        ConfigError: a setting is unknown or out of range.
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        progress: bool | None = None,
        **settings: Unpack[EngineSettings],
    ) -> None:
        config = engine_config(model, **settings)
        from lockstep.engine.loop import Engine

        tokenizer = open_checkpoint(model).tokenizer()
        with progress_bar(wanted(progress), "loading", 1.0) as advance:
            engine = Engine.from_config(config, lambda stage, done: advance(done, stage))
        self._set_up(engine, tokenizer, progress)

    @classmethod
    def from_engine(
        cls, engine: Engine, tokenizer: Tokenizer, *, progress: bool | None = None
    ) -> LLM:
        """A door on an engine that exists already."""
        llm = cls.__new__(cls)
        llm._set_up(engine, tokenizer, progress)
        return llm

    def _set_up(self, engine: Engine, tokenizer: Tokenizer, progress: bool | None) -> None:
        self._engine: Engine | None = engine
        self._builder = RequestBuilder(tokenizer, engine.info)
        self._progress = progress
        self._lock = threading.Lock()
        self._inboxes: dict[str, deque[SequenceOutput]] = {}

    @property
    def tokenizer(self) -> Tokenizer:
        return self._builder.tokenizer

    @property
    def info(self) -> EngineInfo:
        return self._builder.info

    def stats(self) -> EngineStats:
        """The engine's gauges and counters."""
        return self._open_engine().stats()

    def flush_cache(self) -> None:
        """Forget every cached prefix."""
        self._open_engine().flush_cache()

    @property
    def branches(self) -> dict[str, Branch]:
        """The loaded branches, by name."""
        return dict(self._open_engine().branches)

    def load_branch(self, name: str, folder: str | os.PathLike[str]) -> Branch:
        """Load a branch; in place of one of the same name, which ends when nobody uses it.

        Raises:
            BranchError: it was trained on another base, or cannot be used as it is.
        """
        check_branch_name(name)
        with self._lock:
            return self._open_engine().load_branch(name, os.path.abspath(folder))

    def unload_branch(self, name: str) -> None:
        """Forget a branch; requests that use it end first.

        Raises:
            BranchError: there is none of this name.
        """
        with self._lock:
            self._open_engine().unload_branch(name)

    def close(self) -> None:
        """Free the model and its cache; calling again does nothing."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @overload  # a str is one prompt, though it is a sequence of str too
    def generate(  # type: ignore[overload-overlap]
        self, prompts: str | Sequence[int], params: Params = None, *, progress: bool | None = None
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        params: Params = None,
        *,
        progress: bool | None = None,
    ) -> list[Completion]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        progress: bool | None = None,
    ) -> Completion | list[Completion]:
        """Continue each prompt; all run together.

        Args:
            prompts: a text or token ids, or a list of them. One in, one out; a list in,
                a list out, in its order.
            params: for all prompts, or one for each.

        Raises:
            RequestError: a prompt or parameter that cannot be served; nothing has run.
            GenerationError: the engine failed on some of them.
        """
        one = is_one_prompt(prompts)
        batch = cast("Sequence[Prompt]", [prompts] if one else prompts)
        requests = completion_requests(self._builder, batch, params)
        completions = self._run(requests, progress)
        return completions[0] if one else completions

    @overload
    def chat(
        self,
        messages: Conversation,
        params: Params = None,
        *,
        tools: Tools = None,
        progress: bool | None = None,
    ) -> Completion: ...

    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        params: Params = None,
        *,
        tools: Tools = None,
        progress: bool | None = None,
    ) -> list[Completion]: ...

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: Params = None,
        *,
        tools: Tools = None,
        progress: bool | None = None,
    ) -> Completion | list[Completion]:
        """The assistant's next message in each conversation; all run together.

        Args:
            messages: a list of {"role", "content"}, or a list of such lists.
            params: for all conversations, or one for each; by default up to the context's end.
            tools: functions that the model is told of, as in `/v1/chat/completions`; what it
                writes of calls stays text.

        Raises:
            RequestError, GenerationError: as `generate`.
        """
        one = is_one_conversation(messages) or not messages
        batch = cast("Sequence[Conversation]", [messages] if one else messages)
        requests = chat_requests(self._builder, batch, params, tools)
        completions = self._run(requests, progress)
        return completions[0] if one else completions

    def score(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        context: Prompt | Conversation | Sequence[Prompt | Conversation] | None = None,
        alternatives: int = 0,
        progress: bool | None = None,
    ) -> Score | list[Score]:
        """Exact log-likelihood of given texts, each after a context if there is one.

        Args:
            texts: a text or token ids, or a list of them.
            context: what precedes the texts and is not scored: a prompt or a conversation
                for all, or a list with one for each. It is tokenised apart from the text.
            alternatives: how many of the most probable tokens to report at each position.
        """
        one = is_one_prompt(texts)
        batch = cast("Sequence[Prompt]", [texts] if one else texts)
        requests, lengths = score_requests(
            self._builder, batch, spread_context(context, batch), alternatives
        )
        completions = self._run(requests, progress)
        scores = [Score.of(c, length) for c, length in zip(completions, lengths, strict=True)]
        return scores[0] if one else scores

    @overload
    def decide(
        self,
        given: str | Conversation,
        questions: Question | None = None,
        *,
        branch: str = "",
        tools: Tools = None,
        progress: bool | None = None,
    ) -> Decision: ...

    @overload
    def decide(
        self,
        given: str | Conversation,
        questions: Sequence[Question],
        *,
        branch: str = "",
        tools: Tools = None,
        progress: bool | None = None,
    ) -> list[Decision]: ...

    def decide(
        self,
        given: str | Conversation,
        questions: Question | Sequence[Question] | None = None,
        *,
        branch: str = "",
        tools: Tools = None,
        progress: bool | None = None,
    ) -> Decision | list[Decision]:
        """Answer typed questions about an input with a probability for every option.

        The input is read once. No question's answer depends on the others.

        Args:
            given: a text, or a conversation.
            questions: `Predicate`, `Choice` or `Score` of `lockstep.decisions`. One in, one
                out; a list in, a list out, in its order. None is a branch's own question.
            branch: name of the branch that decides; "" is the trunk itself.
            tools: functions that the conversation's model knows, as `chat`: the same
                conversation is then read as a chat reads it.

        Raises:
            RequestError, GenerationError: as `generate`.
        """
        inquiry = ask(self._builder, self._branches(branch), given, questions, branch, tools)
        decisions = inquiry.decisions(self._run(list(inquiry.requests()), progress))
        return decisions[0] if is_one_question(questions) else decisions

    def decide_prefix(
        self,
        given: str | Conversation,
        prefix: str,
        options: Sequence[str],
        *,
        tools: Tools = None,
        progress: bool | None = None,
    ) -> Decision:
        """How the answer to a prompt or a conversation goes on after `prefix`: with which option.

        Args:
            prefix: the beginning of the reply, e.g. `{"decision": "`.
            options: what may stand next. Where their first tokens differ, these are compared;
                else the whole options are.
        """
        inquiry = inquire_prefix(self._builder, given, prefix, options, tools=tools)
        return inquiry.decisions(self._run(list(inquiry.requests()), progress))[0]

    @overload  # a str is one prompt, though it is a sequence of str too
    def decide_then_write(  # type: ignore[overload-overlap]
        self,
        given: str | Conversation,
        params: Params = None,
        *,
        tools: Tools = None,
        progress: bool | None = None,
        **gate: Unpack[GateArguments],
    ) -> GatedCompletion: ...

    @overload
    def decide_then_write(
        self,
        given: Sequence[str] | Sequence[Conversation],
        params: Params = None,
        *,
        tools: Tools = None,
        progress: bool | None = None,
        **gate: Unpack[GateArguments],
    ) -> list[GatedCompletion]: ...

    def decide_then_write(
        self,
        given: str | Conversation | Sequence[str] | Sequence[Conversation],
        params: Params = None,
        *,
        tools: Tools = None,
        progress: bool | None = None,
        **gate: Unpack[GateArguments],
    ) -> GatedCompletion | list[GatedCompletion]:
        """Decide about each prompt; write only where the decision is in `continue_if`.

        Each prompt is computed once for both. What is written is what `generate` or `chat`
        would have written.

        Args:
            given: a prompt (a text) or a conversation, or a list of either.
            params: as `generate`, of conversations as `chat`. tools: as `chat`.
            gate: see `GateArguments`: a `question`, a `branch`, or a `prefix` with `options`.

        Raises:
            RequestError, GenerationError: as `generate`.
        """
        branches = self._branches(gate.get("branch", ""))
        one, gated, requests = gated_requests(self._builder, branches, given, params, gate, tools)
        completions = self._run(requests, progress, gated)
        found = [GatedCompletion.of(g, c) for g, c in zip(gated, completions, strict=True)]
        return found[0] if one else found

    @overload  # a str is one prompt, though it is a sequence of str too
    def embed(  # type: ignore[overload-overlap]
        self,
        texts: str | Sequence[int],
        *,
        pooling: PoolingKind = "last",
        dimensions: int | None = None,
        progress: bool | None = None,
    ) -> Vector: ...

    @overload
    def embed(
        self,
        texts: Sequence[str] | Sequence[Sequence[int]],
        *,
        pooling: PoolingKind = "last",
        dimensions: int | None = None,
        progress: bool | None = None,
    ) -> list[Vector]: ...

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        pooling: PoolingKind = "last",
        dimensions: int | None = None,
        progress: bool | None = None,
    ) -> Vector | list[Vector]:
        """A vector of length 1 for each text: float32 [dimensions].

        Args:
            pooling: "last" takes the last token's hidden state, "mean" the mean over all tokens.
            dimensions: keep only the first of them; by default all.
        """
        one = is_one_prompt(texts)
        batch = cast("Sequence[Prompt]", [texts] if one else texts)
        requests = embed_requests(self._builder, batch, pooling, dimensions)
        completions = self._run(requests, progress)
        vectors = [embedding(completion, pooling, dimensions) for completion in completions]
        return vectors[0] if one else vectors

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Generator[Delta, None, None]:
        """Deltas of one completion as they are computed; closing the iterator cancels it."""
        ids = self._builder.encode(prompt)
        return self._stream(self._builder.build(ids, one_params(params, COMPLETION_DEFAULTS)))

    def stream_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Tools = None,
    ) -> Generator[Delta, None, None]:
        """As `stream`, for the assistant's next message in a conversation."""
        ids = self._builder.encode_chat(messages, tools)
        return self._stream(
            self._builder.build(ids, one_params(params, CHAT_DEFAULTS), field="messages")
        )

    def _branches(self, wanted: str) -> dict[str, Branch]:
        """Those that there are, if one is wanted."""
        return self.branches if wanted else {}

    def _open_engine(self) -> Engine:
        if self._engine is None:
            raise LockstepError("this LLM was closed")
        return self._engine

    def _stream(self, request: Request) -> Generator[Delta, None, None]:
        answer = Answer(self.tokenizer, request)
        call = _Call(self, [request])
        with call:
            call.submit()
            while not answer.done:
                for output in call.next_outputs():
                    delta = call.push(answer, output)
                    if delta is not None:
                        yield delta
        if answer.failure:
            raise GenerationError(answer.failure, [answer.completion()])

    def _run(
        self,
        requests: Sequence[Request],
        progress: bool | None,
        gated: Sequence[Gated] = (),
    ) -> list[Completion]:
        begins = [own.begins for own in gated] or [()] * len(requests)
        answers = {
            request.id: Answer(self.tokenizer, request, begins=own)
            for request, own in zip(requests, begins, strict=True)
        }
        shown = wanted(self._progress if progress is None else progress)
        finished = tokens = 0
        with (
            _Call(self, requests) as call,
            progress_bar(shown, "generating", len(requests)) as advance,
            deferred_interrupt() as check_interrupt,
        ):
            while finished < len(requests):
                check_interrupt()
                call.submit()
                for output in call.next_outputs():
                    answer = answers[output.request]
                    delta = call.push(answer, output)
                    if delta is not None:
                        tokens += len(delta.token_ids)
                        finished += answer.done
                advance(finished, f"generating, {tokens} tokens")
        completions = [answer.completion() for answer in answers.values()]
        failures = [answer.failure for answer in answers.values() if answer.failure]
        if failures:
            raise GenerationError(
                f"{len(failures)} of {len(requests)} answers failed: {failures[0]}", completions
            )
        return completions


class _Call:
    """The requests of one call among those of others, which may be open at the same time.

    Whoever needs outputs runs the next step and hands the others theirs. Leaving the
    context cancels what still runs.
    """

    def __init__(self, llm: LLM, requests: Sequence[Request]) -> None:
        self._llm = llm
        self._requests = requests
        self._submitted = 0
        self._inbox: deque[SequenceOutput] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._llm._engine is not None:
            for request in self._requests[: self._submitted]:
                self.cancel(request.id)

    def submit(self) -> None:
        """Hand over as many requests as the engine's queue takes."""
        with self._llm._lock:
            engine = self._llm._open_engine()
            for request in self._requests[self._submitted :]:
                try:
                    engine.submit(request)
                except RequestError as error:
                    if error.code == "queue_full" and engine.has_work():
                        return
                    raise
                self._submitted += 1
                self._llm._inboxes[request.id] = self._inbox

    def cancel(self, request_id: str) -> None:
        """End a request in the engine; does nothing when it has ended."""
        with self._llm._lock:
            if self._llm._inboxes.pop(request_id, None) is not None:
                self._llm._open_engine().cancel(request_id)

    def push(self, answer: Answer, output: SequenceOutput) -> Delta | None:
        """`Answer.push`, then end in the engine what a stop string has ended here."""
        delta = answer.push(output)
        if delta is not None and delta.finish_reason is not None and output.finish is None:
            with self._llm._lock:
                self._llm._open_engine().cancel(output.request, output.choice)
        return delta

    def next_outputs(self) -> list[SequenceOutput]:
        """Outputs of this call's requests; runs a step when none is waiting."""
        with self._llm._lock:
            if not self._inbox:
                for output in self._llm._open_engine().step():
                    inbox = self._llm._inboxes.get(output.request)
                    if inbox is not None:
                        inbox.append(output)
            outputs = list(self._inbox)
            self._inbox.clear()
            return outputs
