"""Logprobs on the wire: the chat shape, the completions shape and the prompt extension."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import UNSET

from lockstep.outputs import Delta
from lockstep.server.replies import (
    Alternative,
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
)
from lockstep.text import TextStream, Tokenizer
from lockstep.types import FinishReason, Request, SamplingParams, TokenLogprob

# JSON has no infinity; this is what OpenAI writes for a token that cannot be drawn.
NEVER = -9999.0


def finite(logprob: float) -> float:
    """The logprob as JSON can carry it."""
    return max(logprob, NEVER) if not math.isnan(logprob) else NEVER


def shown_tokens(delta: Delta, request: Request) -> int:
    """How many of a delta's tokens stand in a chat's logprob list.

    The token that ended the sequence is left out when its text is, so that the bytes
    of the listed tokens join to the text.
    """
    count = len(delta.token_ids)
    hidden = (
        delta.finish_reason is FinishReason.STOP
        and not isinstance(delta.stop_reason, str)
        and not request.sampling.include_stop_str_in_output
        and count > 0
        and delta.token_ids[-1] in request.stop_ids
    )
    return count - hidden


def chat_logprobs(tokenizer: Tokenizer, request: Request, delta: Delta) -> ChatLogprobs:
    """`choices[].logprobs` of a chat completion or chunk."""
    entries = delta.logprobs[: shown_tokens(delta, request)]
    return ChatLogprobs(content=[_chat_entry(tokenizer, request, entry) for entry in entries])


def _chat_entry(tokenizer: Tokenizer, request: Request, entry: TokenLogprob) -> ChatLogprob:
    own = _alternative(tokenizer, entry.token, entry.logprob)
    given = request.sampling.logprob_token_ids
    return ChatLogprob(
        token=own.token,
        logprob=own.logprob,
        bytes=own.bytes,
        top_logprobs=[_alternative(tokenizer, token, value) for token, value in entry.top],
        given=[
            _alternative(tokenizer, token, value)
            for token, value in zip(given, entry.given, strict=True)
        ]
        if given
        else UNSET,
    )


def _alternative(tokenizer: Tokenizer, token: int, logprob: float) -> Alternative:
    return Alternative(
        token=tokenizer.token_text(token),
        logprob=finite(logprob),
        bytes=list(tokenizer.token_bytes(token)),
    )


def completion_logprobs(
    tokenizer: Tokenizer, request: Request, delta: Delta, offset: int
) -> CompletionLogprobs:
    """`choices[].logprobs` of a completion; `offset` is the length of an echoed prompt.

    Every generated token has an entry, also the one that ended the sequence and has no
    text: clients that score with `echo` and `max_tokens: 1` drop exactly one entry.
    """
    return _parallel_lists(
        tokenizer,
        request,
        delta.token_ids,
        delta.logprobs,
        [offset + start for start in delta.token_offsets],
    )


def echo_logprobs(
    tokenizer: Tokenizer, request: Request, entries: Sequence[TokenLogprob | None]
) -> CompletionLogprobs:
    """The completions shape for the prompt's own tokens; the first has no logprob."""
    stream = TextStream(tokenizer, (), SamplingParams(skip_special_tokens=False))
    offsets = stream.push(request.prompt, FinishReason.LENGTH).token_offsets
    return _parallel_lists(tokenizer, request, request.prompt, entries, offsets)


def append(first: CompletionLogprobs, second: CompletionLogprobs) -> None:
    """Put the following stretch of a choice behind the first."""
    first.tokens.extend(second.tokens)
    first.token_logprobs.extend(second.token_logprobs)
    first.top_logprobs.extend(second.top_logprobs)
    first.text_offset.extend(second.text_offset)
    if first.given_logprobs is not UNSET and second.given_logprobs is not UNSET:
        first.given_logprobs.extend(second.given_logprobs)


def prompt_logprobs(
    tokenizer: Tokenizer, request: Request, entries: Sequence[TokenLogprob | None]
) -> PromptLogprobs:
    """The `prompt_logprobs` extension: per position, token id to its logprob.

    Alternatives, the prompt's own token, and the ids of `logprob_token_ids` (without rank).
    """
    given = request.sampling.logprob_token_ids
    return [None if entry is None else _prompt_entry(tokenizer, entry, given) for entry in entries]


def _prompt_entry(
    tokenizer: Tokenizer, entry: TokenLogprob, given: Sequence[int]
) -> dict[str, PromptLogprob]:
    ranked: dict[int, tuple[float, int | None]] = {
        token: (value, rank) for rank, (token, value) in enumerate(entry.top, 1)
    }
    ranked.setdefault(entry.token, (entry.logprob, entry.rank))
    for token, value in zip(given, entry.given, strict=False):
        ranked.setdefault(token, (value, None))
    return {
        str(token): PromptLogprob(
            logprob=finite(value), rank=rank, decoded_token=tokenizer.token_text(token)
        )
        for token, (value, rank) in ranked.items()
    }


def _parallel_lists(
    tokenizer: Tokenizer,
    request: Request,
    tokens: Sequence[int],
    entries: Sequence[TokenLogprob | None],
    offsets: Sequence[int],
) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=[tokenizer.token_text(token) for token in tokens],
        token_logprobs=[None if entry is None else finite(entry.logprob) for entry in entries],
        top_logprobs=[None if entry is None else _top(tokenizer, entry) for entry in entries],
        text_offset=list(offsets),
        given_logprobs=[
            [] if entry is None else [finite(value) for value in entry.given] for entry in entries
        ]
        if request.sampling.logprob_token_ids
        else UNSET,
    )


def _top(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, float]:
    """Alternatives by their text; the token itself is added when it is not among them."""
    top: dict[str, float] = {}
    for token, value in (*entry.top, (entry.token, entry.logprob)):
        top.setdefault(tokenizer.token_text(token), finite(value))
    return top
