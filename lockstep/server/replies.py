"""Reply bodies, one struct a JSON object; names and nesting are OpenAI's.

A field that is UNSET is left out of the JSON, one that is None is written as null.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from lockstep.decisions import Decision


class Reply(msgspec.Struct, kw_only=True):
    """Base of every reply body."""


class ModelCard(Reply):
    """One served model."""

    id: str
    created: int
    object: str = "model"
    owned_by: str = "lockstep"
    max_model_len: int | UnsetType = UNSET
    parent: str | UnsetType = UNSET  # of a branch: the model that it leaves


class ModelList(Reply):
    """Reply of `GET /v1/models`."""

    data: list[ModelCard]
    object: str = "list"


class PromptTokensDetails(Reply):
    """Where prompt tokens came from."""

    cached_tokens: int


class CompletionTokensDetails(Reply):
    """What generated tokens were for."""

    reasoning_tokens: int


class Usage(Reply):
    """Token counts of a whole request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class Alternative(Reply):
    """One token among the alternatives at a position; `bytes` are its raw bytes."""

    token: str
    logprob: float
    bytes: list[int]


class GateDecision(Reply):
    """What a gate decided. `option` is true or false of a predicate; probabilities have the
    options' texts as keys, in their order."""

    option: str | bool
    probabilities: dict[str, float]
    confidence: float
    mass: float
    source: str

    @classmethod
    def of(cls, decision: Decision) -> GateDecision:
        """On the wire."""
        texts = [option.text for option in decision.question.options]
        return cls(
            option=decision.value,
            probabilities=dict(zip(texts, decision.probabilities, strict=True)),
            confidence=decision.confidence,
            mass=decision.mass,
            source=decision.source,
        )


class ChatLogprob(Reply):
    """One position. `given` is the extension that answers `logprob_token_ids`."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Alternative]
    given: list[Alternative] | UnsetType = UNSET


class ChatLogprobs(Reply):
    """Logprobs of a chat choice, one entry a token."""

    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(Reply):
    """The completions shape: parallel lists. `given_logprobs` answers `logprob_token_ids`."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    given_logprobs: list[list[float]] | UnsetType = UNSET


class PromptLogprob(Reply):
    """Extension: one token at a prompt position, in an object keyed by token id."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CalledFunction(Reply):
    """The function of a call, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(Reply):
    """A call in a whole message."""

    id: str
    function: CalledFunction
    type: str = "function"


class ChatMessage(Reply):
    """The assistant's message; `content` is null when there are calls and nothing else."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Reply):
    """A choice of a whole chat answer."""

    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Reply):
    """A whole chat answer."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    object: str = "chat.completion"
    decision: GateDecision | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class FunctionDelta(Reply):
    """What a chunk adds to the function of a call."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(Reply):
    """What a chunk adds to the call that has this index; the first names it."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatDelta(Reply):
    """What a chunk adds to a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Reply):
    """A choice in a chunk."""

    index: int
    delta: ChatDelta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Reply):
    """A chunk of a streamed chat answer."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str
    object: str = "chat.completion.chunk"
    decision: GateDecision | UnsetType = UNSET
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(Reply):
    """A choice of a whole answer, or what a chunk adds to one."""

    index: int
    text: str
    finish_reason: str | None = None
    logprobs: CompletionLogprobs | None = None
    stop_reason: str | int | None = None
    decision: GateDecision | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(Reply):
    """A whole answer, or a chunk of a streamed one."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str
    object: str = "text_completion"
    decision: GateDecision | UnsetType = UNSET
    usage: Usage | UnsetType | None = UNSET


encode = msgspec.json.Encoder().encode
