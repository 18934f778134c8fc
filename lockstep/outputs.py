"""The way out at a door: the engine's outputs to an answer.

One code path for `LLM`, `AsyncLLM` and the HTTP server, and one for streamed and
whole answers. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.text import TextStream, Tokenizer
from lockstep.types import (
    Choice,
    Completion,
    FinishReason,
    GateOutcome,
    LockstepError,
    Request,
    SequenceOutput,
    TokenLogprob,
)


class GenerationError(LockstepError):
    """The engine failed while it computed an answer.

    Attributes:
        completions: what there is, in the order of the prompts; the failed ones have
            finish_reason "error".
    """

    def __init__(self, message: str, completions: Sequence[Completion] = ()) -> None:
        super().__init__(message)
        self.completions = tuple(completions)


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step adds to one choice of an answer.

    Attributes:
        choice: index in [0, n).
        text: characters to append; joined over the deltas they are the choice's text.
        token_ids, logprobs: of the new tokens (`logprobs` empty unless asked for).
        token_offsets: where each new token's text starts in the choice's text.
        finish_reason: set on the last delta of the choice.
        stop_reason: the stop string or client's stop token id that ended it, if one did.
        cached_tokens: prompt tokens that came from the prefix cache.
        prompt_logprobs: on the first delta of the answer, when asked for.
        gate: on the first delta of each choice of a gated request.
    """

    choice: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    token_offsets: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    gate: GateOutcome | None = None


class _ChoiceState:
    """One choice under construction.

    Attributes:
        stream: behind the prompt; of a gated request made anew when the header is known.
    """

    def __init__(self, stream: TextStream) -> None:
        self.stream = stream
        self.offset = 0  # characters before those of the stream
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish: FinishReason | None = None
        self.stop_reason: str | int | None = None


class Answer:
    """Builds the answer to one request from the engine's outputs.

    Mutable; owned by whoever reads the outputs. `failure` is the engine's message
    when a choice ended with an error.

    Args:
        shown: as `TextStream`.
        begins: for each option of the request's gate the text with which the answer begins, see
            `decisions.Gated`.

    Attributes:
        gate: what the request's gate decided.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: Request,
        shown: frozenset[int] = frozenset(),
        begins: Sequence[str] = (),
    ) -> None:
        self.request = request
        self.cached_tokens = 0
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self.pooled: tuple[bytes, ...] = ()
        self.scores: tuple[float, ...] = ()
        self.gate: GateOutcome | None = None
        self.failure = ""
        self._tokenizer = tokenizer
        self._shown = shown
        self._begins = begins
        self._choices = [_ChoiceState(self._stream()) for _ in range(request.sampling.n)]
        self._unfinished = request.sampling.n

    def _stream(self, header: Sequence[int] = ()) -> TextStream:
        """The text of what follows the prompt and `header`."""
        ids = (*self.request.prompt, *header) if header else self.request.prompt
        return TextStream(self._tokenizer, ids, self.request.sampling, shown=self._shown)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """What the answer's tokens follow: the prompt, and the header of a gate that has opened."""
        return (*self.request.prompt, *self._header())

    @property
    def prompt_tokens(self) -> int:
        """Tokens read: the prompt, and a gate's question and the header that it opened with.
        Of a header that goes on from the question, the question counts once."""
        count, gate = len(self.request.prompt), self.request.gate
        if gate is None:
            return count
        asked = gate.probes[0].suffix
        header = self._header()
        goes_on = len(header) > 0 and header[: len(asked)] == asked
        return count + len(header) + (0 if goes_on else len(asked))

    def _header(self) -> tuple[int, ...]:
        if self.request.gate is None or self.gate is None:
            return ()
        return self.request.gate.headers[self.gate.chosen] or ()

    @property
    def done(self) -> bool:
        """Whether every choice has finished."""
        return not self._unfinished

    def push(self, output: SequenceOutput) -> Delta | None:
        """Take one engine output.

        Returns:
            The delta, or None when the choice had already ended at a stop string. When
            the delta has a `finish_reason` and the output no `finish`, the caller cancels
            this choice: the engine knows no stop strings.
        """
        choice = self._choices[output.choice]
        if choice.finish is not None:
            return None
        begin = self._open(choice, output.gate) if output.gate is not None else ""
        text = choice.stream.push(output.tokens, output.finish)
        finish = output.finish
        if isinstance(text.stopped, str):
            finish = FinishReason.STOP
        tokens = output.tokens[: text.tokens]
        logprobs = output.logprobs[: text.tokens]
        added = begin + text.text
        choice.text.append(added)
        choice.token_ids.extend(tokens)
        choice.logprobs.extend(logprobs)
        choice.finish = finish
        self._unfinished -= finish is not None
        choice.stop_reason = text.stopped
        if output.choice == 0:  # the others read what this one computed
            self.cached_tokens = output.cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.pooled:
            self.pooled = output.pooled
        if output.scores:
            self.scores = output.scores
        if finish is FinishReason.ERROR:
            self.failure = output.error or "the step that computed it failed"
        return Delta(
            choice=output.choice,
            text=added,
            token_ids=tokens,
            logprobs=logprobs,
            token_offsets=tuple(choice.offset + start for start in text.token_offsets)
            if choice.offset
            else text.token_offsets,
            finish_reason=finish,
            stop_reason=text.stopped,
            cached_tokens=self.cached_tokens,
            prompt_logprobs=output.prompt_logprobs,
            gate=output.gate,
        )

    def _open(self, choice: _ChoiceState, outcome: GateOutcome) -> str:
        """Take a gate's outcome; returns the text with which the choice begins."""
        self.gate = outcome
        header = self.request.gate.headers[outcome.chosen] if self.request.gate else None
        if header is None:
            return ""
        choice.stream = self._stream(header)
        begin = self._begins[outcome.chosen] if self._begins else ""
        choice.offset = len(begin)
        return begin

    def completion(self) -> Completion:
        """The whole answer; choices that have not finished count as cancelled."""
        return Completion(
            id=self.request.id,
            prompt_token_ids=self.request.prompt,
            choices=tuple(
                Choice(
                    index=index,
                    text="".join(choice.text),
                    token_ids=tuple(choice.token_ids),
                    finish_reason=choice.finish or FinishReason.CANCELLED,
                    stop_reason=choice.stop_reason,
                    logprobs=tuple(choice.logprobs),
                )
                for index, choice in enumerate(self._choices)
            ),
            cached_tokens=self.cached_tokens,
            prompt_logprobs=self.prompt_logprobs,
            pooled=self.pooled,
            scores=self.scores,
            gate=self.gate,
        )


@dataclass(frozen=True, slots=True)
class Score:
    """Log-likelihood of given tokens under the model.

    Attributes:
        token_ids: the scored tokens.
        logprobs: natural-log probability of each given everything before it; None for
            a first token that nothing precedes.
        entries: rank and alternatives of each, as asked for.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    entries: tuple[TokenLogprob | None, ...]

    @property
    def total(self) -> float:
        """Sum of the logprobs that exist, added left to right."""
        return sum((value for value in self.logprobs if value is not None), 0.0)

    @classmethod
    def of(cls, completion: Completion, context_tokens: int) -> Score:
        """The score of a prompt's tokens after the first `context_tokens`."""
        assert completion.prompt_logprobs is not None
        entries = completion.prompt_logprobs[context_tokens:]
        return cls(
            token_ids=completion.prompt_token_ids[context_tokens:],
            logprobs=tuple(None if entry is None else entry.logprob for entry in entries),
            entries=entries,
        )
