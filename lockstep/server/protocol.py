"""Request bodies, and what they mean as `SamplingParams`.

Strict: a wrong type is an error, and so is an unknown field. OpenAI fields that this
server does not implement are accepted only with values that leave the answer as it is.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from lockstep.types import RequestError, SamplingParams

MAX_PROMPTS = 2048  # of a request, each choice counted
MAX_MESSAGES = 8192


class Body(BaseModel):
    """Base of every request body."""

    model_config = ConfigDict(strict=True, extra="forbid")


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: bool = False  # padding against traffic analysis; never added here


class GenerationBody(Body):
    """Fields that completions and chat completions share.

    Attributes:
        top_k .. logprobs_mode, ignore_eos, skip_special_tokens: extensions; see `SamplingParams`.
        return_token_ids: extension: choices carry `token_ids`, the reply `prompt_token_ids`.
        priority: extension: lower runs earlier.
        user .. metadata: accepted and not used; they change no answer.
    """

    model: str
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    logprobs_mode: Literal["raw", "processed"] | None = None
    return_token_ids: bool = False
    priority: int = 0

    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None

    aliases: ClassVar[dict[str, str]] = {}
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}
    sampling_fields: ClassVar[tuple[str, ...]] = (
        "temperature",
        "top_p",
        "n",
        "max_tokens",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "top_k",
        "min_p",
        "repetition_penalty",
        "min_tokens",
        "include_stop_str_in_output",
        "ignore_eos",
        "skip_special_tokens",
        "prompt_logprobs",
        "logprobs_mode",
    )

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self) -> SamplingParams:
        """The parameters that this body asks for; fields left out or null take defaults.

        Raises:
            RequestError: naming the field as the client wrote it.
        """
        self._refuse_unsupported()
        values: dict[str, Any] = self._own_sampling()
        for name in self.sampling_fields:
            value = getattr(self, name)
            if value is not None:
                values[name] = value
        for name in ("stop", "stop_token_ids", "bad_words", "logprob_token_ids"):
            value = getattr(self, name)
            if value is not None:
                values[name] = (value,) if isinstance(value, str) else tuple(value)
        if self.logit_bias is not None:
            values["logit_bias"] = _token_keys(self.logit_bias)
        try:
            return SamplingParams(**values)
        except RequestError as error:
            name = self.aliases.get(error.field, error.field)
            message = str(error).replace(error.field, name, 1)
            raise RequestError(message, field=name, code=error.code) from None

    def _own_sampling(self) -> dict[str, Any]:
        """Parameters that only this kind of body has."""
        raise NotImplementedError

    def _refuse_unsupported(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "stream_options is only allowed with stream: true", field="stream_options"
            )
        for name, allowed in self.neutral.items():
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise RequestError(
                    f"{name} is not supported by this server",
                    field=name,
                    code="unsupported_parameter",
                )


class CompletionBody(GenerationBody):
    """Body of `POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"suffix": ("",)}

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one an answer.

        Raises:
            RequestError: none, or too many.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise RequestError("prompt must not be empty", field="prompt", code="empty_prompt")
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        if len(self.prompt) * (self.n or 1) > MAX_PROMPTS:
            raise RequestError(
                f"{len(self.prompt)} prompts with n={self.n or 1} ask for "
                f"{len(self.prompt) * (self.n or 1)} answers, at most {MAX_PROMPTS} are allowed",
                field="prompt",
            )
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]

    def _own_sampling(self) -> dict[str, Any]:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError(
                "best_of is not supported by this server unless it equals n",
                field="best_of",
                code="unsupported_parameter",
            )
        values: dict[str, Any] = {}
        wanted = 0 if self.logprobs is None and self.logprob_token_ids else self.logprobs
        if wanted is not None:
            values["logprobs"] = wanted
            if self.echo:
                values["prompt_logprobs"] = wanted
        return values


class ChatMessageBody(BaseModel):
    """One message. Fields that only tools or media need may be present if null or empty."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None

    def rendered(self, index: int) -> dict[str, Any]:
        """The message as a chat template reads it; "developer" is called "system" there.

        Raises:
            RequestError: content other than text, or a field that this server does not know.
        """
        for name, value in (self.model_extra or {}).items():
            if value not in (None, [], {}):
                raise RequestError(
                    f"messages[{index}].{name} is not supported by this server",
                    field="messages",
                    code="unsupported_parameter",
                )
        message = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self._text(index),
        }
        if self.name is not None:
            message["name"] = self.name
        return message

    def _text(self, index: int) -> str:
        if self.content is None:
            raise RequestError(f"messages[{index}].content is missing", field="messages")
        if isinstance(self.content, str):
            return self.content
        texts: list[str] = []
        for part in self.content:
            text = part.get("text")
            if part.get("type") != "text" or not isinstance(text, str):
                raise RequestError(
                    f"messages[{index}].content: only parts of type 'text' are supported, "
                    f"got type {part.get('type')!r}",
                    field="messages",
                )
            texts.append(text)
        return "".join(texts)


class ChatBody(GenerationBody):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessageBody], Field(max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None  # a hint for speed; the answer is the same
    reasoning_effort: str | None = None
    verbosity: str | None = None
    web_search_options: dict[str, Any] | None = None

    aliases: ClassVar[dict[str, str]] = {"logprobs": "top_logprobs"}
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "response_format": ({"type": "text"},),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as a chat template reads them."""
        return [message.rendered(index) for index, message in enumerate(self.messages)]

    def _own_sampling(self) -> dict[str, Any]:
        values: dict[str, Any] = {"max_tokens": self.max_completion_tokens}
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise RequestError(
                "give max_completion_tokens or max_tokens, not both", field="max_tokens"
            )
        if self.logprobs:
            values["logprobs"] = self.top_logprobs or 0
        else:
            for name in ("top_logprobs", "logprob_token_ids"):
                if getattr(self, name):
                    raise RequestError(f"{name} needs logprobs: true", field=name)
        return values


def _token_keys(bias: dict[str, float]) -> dict[int, float]:
    """JSON object keys are strings; token ids are not."""
    result: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise RequestError(f"logit_bias: {key!r} is not a token id", field="logit_bias")
        result[int(key)] = value
    return result
