"""The way in at a door: prompts and conversations to engine requests.

One code path for `LLM`, `AsyncLLM` and the HTTP server. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from lockstep.text import Tokenizer
from lockstep.text.dialect import Dialect, dialect_of
from lockstep.text.prompt import ChatPrompt, Shown, show
from lockstep.text.turn import Turn, functions_of
from lockstep.types import (
    MAX_SEED,
    EngineInfo,
    Gate,
    Pooling,
    Request,
    RequestError,
    SamplingParams,
)

Prompt = str | Sequence[int]
ChatMessage = Mapping[str, Any]
Conversation = Sequence[ChatMessage]
Tools = Sequence[Mapping[str, Any]] | None
"""Functions that the model is told of, as in a body of `/v1/chat/completions`."""

Params = SamplingParams | Sequence[SamplingParams] | None
T = TypeVar("T")

COMPLETION_DEFAULTS = SamplingParams()
CHAT_DEFAULTS = SamplingParams(max_tokens=None)
MAX_PRIORITY = 2**31 - 1
LONG_TEXT = 50_000
"""Characters from which text is tokenised beside an event loop, where others would wait for it:
about ten milliseconds."""


def is_one_prompt(prompts: object) -> bool:
    """Whether `prompts` is one prompt (a text or token ids) and not a list of them."""
    if isinstance(prompts, str):
        return True
    return isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], int)


def is_one_conversation(messages: object) -> bool:
    """Whether `messages` is one conversation and not a list of them."""
    return isinstance(messages, Sequence) and bool(messages) and isinstance(messages[0], Mapping)


class RequestBuilder:
    """Turns prompts into engine requests: tokenises, resolves ids, validates.

    Args:
        tokenizer: the model's.
        info: of the engine that will run the requests; it sets the limits.
        dialect: how the model is told of functions; by default what its template says.
    """

    def __init__(
        self, tokenizer: Tokenizer, info: EngineInfo, dialect: Dialect | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.info = info
        self.dialect = dialect or dialect_of(tokenizer)

    def encode(
        self, prompt: Prompt, *, add_special_tokens: bool = True, field: str = "prompt"
    ) -> list[int]:
        """Token ids of a prompt.

        Args:
            field: what the client calls the prompt, for errors.

        Raises:
            RequestError: neither text nor token ids, empty, or an id outside the vocabulary.
        """
        if isinstance(prompt, str):
            check_text(field, prompt)
            ids = self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
            ids = self._check_ids(prompt, field)
        else:
            raise RequestError(
                f"{field} must be a string or a list of token ids, got {type(prompt).__name__}",
                field=field,
            )
        if not ids:
            raise RequestError(f"{field} must not be empty", field=field, code="empty_prompt")
        return ids

    def show(self, turn: Turn) -> Shown:
        """A turn as the model's chat template is given it.

        Raises:
            RequestError: not a list of messages, or as `text.prompt.show`.
        """
        check_conversation(turn.messages)
        return show(self.tokenizer, self.dialect, turn)

    def chat(self, turn: Turn) -> ChatPrompt:
        """A turn, ready for the assistant's.

        Raises:
            RequestError: as `show`; no template, or the template's complaint.
        """
        return ChatPrompt.of(self.tokenizer, self.show(turn))

    def encode_chat(self, messages: Conversation, tools: Tools = None) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn.

        Raises:
            RequestError: as `chat`.
        """
        return list(self.chat(Turn(messages, functions_of(tools))).ids)

    def build(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str = "",
        priority: int = 0,
        field: str = "prompt",
        score_from: int = 1,
        pooling: Pooling = "",
        branch: str = "",
        branch_key: str = "",
        branch_from: int = 0,
        gate: Gate | None = None,
    ) -> Request:
        """A request with its seed drawn and its stop and bad ids resolved.

        Args:
            ids: the prompt, already checked by `encode` or made by `encode_chat`.
            field: what the client calls the prompt, for errors.
            score_from .. gate: see `Request`.

        Raises:
            RequestError: too long for the model, or an id outside the vocabulary.
        """
        self.check_length(len(ids), params, field=field)
        if gate is not None:
            self._check_gate(len(ids), params, gate, field=field)
        ends = () if params.ignore_eos else self.tokenizer.eos_ids
        stop_ids = tuple(dict.fromkeys((*ends, *params.stop_token_ids)))
        self._check_params(params, stop_ids)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError(f"priority must be an integer, got {priority!r}", field="priority")
        if abs(priority) > MAX_PRIORITY:
            raise RequestError(
                f"priority must be in [{-MAX_PRIORITY}, {MAX_PRIORITY}], got {priority}",
                field="priority",
            )
        if params.seed is None:
            params = dataclasses.replace(params, seed=secrets.randbelow(MAX_SEED))
        return Request(
            id=request_id or uuid.uuid4().hex,
            prompt=tuple(ids),
            sampling=params,
            stop_ids=stop_ids,
            bad_ids=self.tokenizer.bad_word_ids(params.bad_words) if params.bad_words else (),
            priority=priority,
            score_from=score_from,
            pooling=pooling,
            branch=branch,
            branch_key=branch_key,
            branch_from=branch_from,
            gate=gate,
        )

    def check_length(self, prompt_tokens: int, params: SamplingParams, *, field: str) -> None:
        """Refuse what does not fit; nothing is ever cut off.

        Raises:
            RequestError: code "context_length_exceeded", with both numbers.
        """
        limit = self.info.max_context
        wanted = 0 if params.max_tokens == 0 else 1
        if prompt_tokens + wanted > limit:
            raise RequestError(
                f"the prompt has {prompt_tokens} tokens, but the model's context holds {limit}"
                + (" including at least one to generate" if wanted else ""),
                field=field,
                code="context_length_exceeded",
            )

    def _check_gate(self, tokens: int, params: SamplingParams, gate: Gate, *, field: str) -> None:
        """Refuse a question that does not fit behind the prompt, and what nothing can be behind a
        gate.

        Raises:
            RequestError: see there.
        """
        if params.max_tokens == 0:
            raise RequestError(
                "max_tokens must be at least 1 beside a gate: a decision alone needs no gate",
                field="max_tokens",
            )
        if params.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs cannot stand beside a gate", field="prompt_logprobs"
            )
        longest = max(len(probe.suffix) + len(probe.path) for probe in gate.probes)
        header = max(len(header) for header in gate.headers if header is not None)
        limit = self.info.max_context
        if tokens + longest > limit or tokens + header + 1 > limit:
            raise RequestError(
                f"the prompt has {tokens} tokens, the gate's question {longest} and the answer's "
                f"beginning {header}, but the model's context holds {limit} including at least "
                "one to generate",
                field=field,
                code="context_length_exceeded",
            )

    def _check_ids(self, ids: Sequence[Any], field: str) -> list[int]:
        for index, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, int):
                raise RequestError(
                    f"{field}[{index}] must be a token id, got {token!r}", field=field
                )
            self._check_id(field, token)
        return list(ids)

    def _check_params(self, params: SamplingParams, stop_ids: Sequence[int]) -> None:
        for token in params.logit_bias:
            self._check_id("logit_bias", token)
        for token in params.stop_token_ids:
            self._check_id("stop_token_ids", token)
        for token in params.logprob_token_ids:
            self._check_id("logprob_token_ids", token)
        if params.min_tokens and len(stop_ids) >= self.info.vocab_size:
            raise RequestError(
                "min_tokens leaves no token that could be drawn: every id of the vocabulary is "
                "a stop or end-of-sequence id",
                field="min_tokens",
            )
        for text in params.stop:
            check_text("stop", text)
        for text in params.bad_words:
            check_text("bad_words", text)

    def _check_id(self, field: str, token: int) -> None:
        if not 0 <= token < self.info.vocab_size:
            raise RequestError(
                f"{field}: token id {token} is outside the vocabulary [0, {self.info.vocab_size})",
                field=field,
            )


def longest_read(request: Request) -> int:
    """Most tokens of a request that are read before any is written: its prompt, and behind it
    a gate's question or the header that it opens with."""
    gate = request.gate
    if gate is None:
        return len(request.prompt)
    asked = max(len(probe.suffix) + len(probe.path) for probe in gate.probes)
    return len(request.prompt) + max(asked, *(len(header or ()) for header in gate.headers))


def check_conversation(messages: Conversation) -> None:
    """Refuse what no chat template can read.

    Raises:
        RequestError: not a list of messages, or text that is not valid Unicode.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages must be a non-empty list of {role, content}", field="messages")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                f"each message must be an object with a role, got {message!r}", field="messages"
            )
        check_text("messages", json.dumps(message, ensure_ascii=False, default=str))


def check_text(field: str, text: str) -> None:
    """Refuse text that cannot be written as UTF-8.

    Raises:
        RequestError: a lone surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{field} has a lone surrogate at character {error.start}: it is not valid Unicode",
            field=field,
        ) from None


def completion_requests(
    builder: RequestBuilder, prompts: Sequence[Prompt], params: Params
) -> list[Request]:
    """A request for each prompt.

    Raises:
        RequestError: as `RequestBuilder` and `spread_params`.
    """
    own = spread_params(params, COMPLETION_DEFAULTS, prompts)
    return [
        builder.build(builder.encode(prompt), each)
        for prompt, each in zip(prompts, own, strict=True)
    ]


def chat_requests(
    builder: RequestBuilder,
    conversations: Sequence[Conversation],
    params: Params,
    tools: Tools = None,
) -> list[Request]:
    """A request for the assistant's next message in each conversation.

    Raises:
        RequestError: as `RequestBuilder` and `spread_params`.
    """
    own = spread_params(params, CHAT_DEFAULTS, conversations)
    return [
        builder.build(builder.encode_chat(conversation, tools), each, field="messages")
        for conversation, each in zip(conversations, own, strict=True)
    ]


def score_requests(
    builder: RequestBuilder,
    texts: Sequence[Prompt],
    contexts: Sequence[Prompt | Conversation | None],
    alternatives: int,
) -> tuple[list[Request], list[int]]:
    """Requests that score `texts`, each after its context, and the contexts' token counts.

    A context and its text are tokenised apart and joined as ids, so that the scored
    tokens do not depend on how the border would have been merged.

    Raises:
        RequestError: as `RequestBuilder.encode`, or different numbers of texts and contexts.
    """
    if len(contexts) != len(texts):
        raise RequestError(
            f"context has {len(contexts)} entries for {len(texts)} texts", field="context"
        )
    if isinstance(alternatives, bool) or not isinstance(alternatives, int):
        raise RequestError(
            f"alternatives must be an integer, got {alternatives!r}", field="alternatives"
        )
    params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=alternatives)
    requests: list[Request] = []
    lengths: list[int] = []
    for text, context in zip(texts, contexts, strict=True):
        before: list[int] = []
        if context is not None and is_one_conversation(context):
            before = builder.encode_chat(cast("Conversation", context))
        elif context is not None:
            before = builder.encode(cast("Prompt", context), field="context")
        ids = builder.encode(text, add_special_tokens=context is None)
        # What stands before the text is read, and may come from the cache.
        first = max(1, len(before))
        requests.append(builder.build([*before, *ids], params, score_from=first))
        lengths.append(len(before))
    return requests, lengths


def one_params(params: SamplingParams | None, default: SamplingParams) -> SamplingParams:
    """The sampling parameters of one request.

    Raises:
        RequestError: something else than a SamplingParams.
    """
    if params is None:
        return default
    return _check_one_params(params)


def spread_params(
    params: Params, default: SamplingParams, batch: Sequence[T]
) -> list[SamplingParams]:
    """One SamplingParams for each entry of `batch`.

    Raises:
        RequestError: something else than SamplingParams, or another number of them.
    """
    _check_batch("prompt", batch)
    if params is None or isinstance(params, SamplingParams):
        return [default if params is None else params] * len(batch)
    if not isinstance(params, list | tuple):
        _check_one_params(params)
    own = [_check_one_params(entry) for entry in params]
    if len(own) != len(batch):
        raise RequestError(
            f"{len(own)} sampling parameters for {len(batch)} prompts", field="params"
        )
    return own


def _check_one_params(params: object) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        raise RequestError(f"params must be SamplingParams, got {params!r}", field="params")
    return params


def _check_batch(field: str, batch: object) -> None:
    if not isinstance(batch, Sequence):
        raise RequestError(
            f"{field} must be one entry or a list of them, got {type(batch).__name__}", field=field
        )


def spread_context(
    context: Prompt | Conversation | Sequence[Prompt | Conversation] | None, batch: Sequence[T]
) -> list[Prompt | Conversation | None]:
    """One context for each entry of `batch`.

    Raises:
        RequestError: neither a prompt, nor a conversation, nor a list of them.
    """
    _check_batch("prompt", batch)
    if context is None or is_one_prompt(context) or is_one_conversation(context):
        return [cast("Prompt | Conversation | None", context)] * len(batch)
    _check_batch("context", context)
    return list(cast("Sequence[Prompt | Conversation]", context))
