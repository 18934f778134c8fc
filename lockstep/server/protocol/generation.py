"""The fields that generating routes share, and what they mean as `SamplingParams`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SkipValidation

from lockstep.server.constraints import grammar_of
from lockstep.server.protocol.body import Body
from lockstep.text.grammar import MAX_CHOICES
from lockstep.types import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_LOGPROB_IDS,
    MAX_STOPS,
    RequestError,
    SamplingParams,
)


class StreamOptions(Body):
    """Options of a streamed answer.

    Attributes:
        include_usage: a last chunk without choices carries the usage.
        continuous_usage_stats: extension, vLLM's: the chunks before it carry the usage so far.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # padding against traffic analysis; never added here


class GenerationBody(Body):
    """Fields that completions and chat completions share.

    Validation by pydantic holds the server's loop, so whatever may be long is bounded or
    checked later: a body of megabytes costs milliseconds here, whatever is wrong with it.

    Attributes:
        top_k .. logprobs_mode, ignore_eos, skip_special_tokens: extensions; see `SamplingParams`.
        response_format: OpenAI's; structured_outputs, guided_*: extensions, vLLM's: see
            `constraints`.
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
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], SkipValidation] | None = None
    seed: int | None = None
    response_format: dict[str, Any] | None = None

    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(max_length=MAX_CHOICES)] | None = None
    guided_grammar: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOPS)] | None = None
    bad_words: Annotated[list[str], Field(max_length=MAX_BAD_WORDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Annotated[list[int], Field(max_length=MAX_LOGPROB_IDS)] | None = None
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
    constraint_fields: ClassVar[tuple[str, ...]] = (
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
    )
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

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

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
        values["grammar"] = grammar_of(
            {name: getattr(self, name) for name in self.constraint_fields}
        )
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
        if self.continuous_usage and not self.include_usage:
            raise RequestError(
                "stream_options.continuous_usage_stats needs include_usage: true",
                field="stream_options",
            )
        for name, allowed in self.neutral.items():
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise RequestError(
                    f"{name} is not supported by this server",
                    field=name,
                    code="unsupported_parameter",
                )


def _token_keys(bias: Any) -> dict[int, float]:
    """JSON object keys are strings; token ids are not."""
    if not isinstance(bias, dict) or len(bias) > MAX_LOGIT_BIAS_ENTRIES:
        raise RequestError(
            f"logit_bias must map at most {MAX_LOGIT_BIAS_ENTRIES} token ids to numbers",
            field="logit_bias",
        )
    result: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise RequestError(f"logit_bias: {key!r} is not a token id", field="logit_bias")
        token = int(key)
        if token in result:
            raise RequestError(f"logit_bias: token {token} is there twice", field="logit_bias")
        result[token] = value
    return result
