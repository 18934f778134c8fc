"""What one request asks of an endpoint, and what it gave: records of plain values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.types import RequestError

# Fields of the HTTP body that a probe sets itself.
OWN_FIELDS = frozenset(
    {
        "model",
        "messages",
        "prompt",
        "max_tokens",
        "temperature",
        "top_p",
        "seed",
        "stop",
        "logprobs",
        "top_logprobs",
        "tools",
        "tool_choice",
        "stream",
        "n",
    }
)
NUMBER = (int, float)


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """One request: a conversation or a plain prompt, and how it samples.

    Attributes:
        messages: the conversation, asked of `/chat/completions`; or
        prompt: a text, asked of `/completions`. Exactly one of the two.
        max_tokens: most tokens of the answer.
        temperature: 0 is greedy, and the default.
        top_p, seed, stop: as OpenAI's; left out of the body where None or empty.
        logprobs: how many alternatives to report at each position; None reports none.
        tools, tool_choice: as OpenAI's; conversations only.
        extra: further fields of the HTTP body, e.g. response_format, for servers that know
            them. A local model refuses them.

    Raises:
        RequestError: naming the field and the value.
    """

    messages: tuple[Mapping[str, Any], ...] = ()
    prompt: str = ""
    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if bool(self.messages) == bool(self.prompt):
            raise RequestError("give messages or a prompt, exactly one of them", field="messages")
        if self.tools and not self.messages:
            raise RequestError("tools belong to a conversation: give messages", field="tools")
        _integer("max_tokens", self.max_tokens, 1, 1_000_000)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, 128)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        for name, value, high in (
            ("temperature", self.temperature, 1e6),
            ("top_p", 1.0 if self.top_p is None else self.top_p, 1.0),
        ):
            if isinstance(value, bool) or not isinstance(value, NUMBER) or not 0 <= value <= high:
                raise RequestError(f"{name} must be in [0, {high:g}], got {value!r}", field=name)
        own = sorted(OWN_FIELDS & set(self.extra))
        if own:
            raise RequestError(f"extra may not set {', '.join(own)}", field="extra")

    def canonical(self) -> dict[str, Any]:
        """A JSON value that is equal exactly for equal requests: every field, typed."""
        return {
            "messages": [dict(message) for message in self.messages],
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": float(self.temperature),
            "top_p": None if self.top_p is None else float(self.top_p),
            "seed": self.seed,
            "stop": list(self.stop),
            "logprobs": self.logprobs,
            "tools": [dict(tool) for tool in self.tools],
            "tool_choice": self.tool_choice,
            "extra": dict(self.extra),
        }

    def body(self, model: str) -> dict[str, Any]:
        """The HTTP body; no field that the request leaves to the server."""
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
        }
        optional = {"top_p": self.top_p, "seed": self.seed, "tool_choice": self.tool_choice}
        body |= {name: value for name, value in optional.items() if value is not None}
        if self.stop:
            body["stop"] = list(self.stop)
        if self.tools:
            body["tools"] = list(self.tools)
        if self.messages:
            body["messages"] = list(self.messages)
            if self.logprobs is not None:
                body["logprobs"] = True
                body["top_logprobs"] = self.logprobs
        else:
            body["prompt"] = self.prompt
            if self.logprobs is not None:
                body["logprobs"] = self.logprobs
        return {**body, **self.extra}

    @property
    def path(self) -> str:
        """The route below the API's base."""
        return "/chat/completions" if self.messages else "/completions"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One function call in an answer; `arguments` is the text as the server sent it."""

    name: str
    arguments: str

    @property
    def parses(self) -> bool:
        """Whether the arguments are a JSON object, which OpenAI's clients need them to be."""
        try:
            return isinstance(json.loads(self.arguments), dict)
        except (ValueError, RecursionError):
            return False


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts as the server reports them; `cached_tokens` is None where it reports none."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """What one request to one endpoint gave; nothing in it was made up where the server was silent.

    Attributes:
        ok: an answer that could be read; all else holds only then.
        text: the answer's content.
        tokens: its tokens' texts ("bytes:..." where the text does not say which token it is,
            "token_id:N" where the server gives ids and no texts); () when it reports neither.
        logprobs: natural-log probabilities, one for each of `tokens` or () when not reported.
        top: the alternatives at each position, (token, logprob) as reported; like `logprobs`.
        finish: the finish_reason.
        tool_calls: the answer's calls.
        usage: None when not reported.
        fingerprint: system_fingerprint, "" if none.
        error: "" when ok, else "status 500: ...", "timeout", "unreadable: ..." or
            "unreachable: ...".
        seconds: from sending to the last byte.
        token_ids: () when not reported.
    """

    ok: bool
    text: str = ""
    tokens: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[str, float], ...], ...] = ()
    finish: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    usage: Usage | None = None
    fingerprint: str = ""
    error: str = ""
    seconds: float = 0.0
    token_ids: tuple[int, ...] = ()


def _integer(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name} must be in [{low}, {high}], got {value!r}", field=name)
