"""Replies of OpenAI-compatible servers to readings. Trusts nothing in them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.verify.probe import Reading, ToolCall, Usage

SHOWN = 300  # characters of a server's error that a reading keeps
ABOVE_ZERO = 0.01  # nats; by so much rounding may lift the logprob of a sure token
LEAST = -1e300  # nats; less than that is minus infinity


class Unreadable(ValueError):
    """A reply that is not what the API says; names what is wrong with it."""


def loads(content: bytes) -> Any:
    """The JSON value of a reply. A lone surrogate, which JSON may hold and no file, terminal or
    metric can, becomes its escape as text: it still differs from every other one.

    Raises:
        ValueError, RecursionError: it is none.
    """
    body = json.loads(content)
    return _printable(body) if b"\\ud" in content.lower() else body


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list):
        return [_printable(one) for one in value]
    if isinstance(value, dict):
        return {_printable(name): _printable(one) for name, one in value.items()}
    return value


def refusal(status: int, content: bytes, seconds: float) -> Reading:
    """The reading of a status other than 200: the server's own message, if it has one."""
    text = content.decode("utf-8", "replace").strip()
    try:
        error = loads(content)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    shown = " ".join(text.split())[:SHOWN]
    return Reading(False, error=f"status {status}: {shown}", seconds=seconds)


def read(content: bytes, *, chat: bool, seconds: float) -> Reading:
    """The first choice of a reply; not ok, and says why, when it cannot be read."""
    try:
        return _read(content, chat, seconds)
    # Whatever a foreign server nests where, a field of another kind fails as one of these.
    except (Unreadable, TypeError, AttributeError, RecursionError) as error:
        return Reading(False, error=f"unreadable: {error}", seconds=seconds)


def _read(content: bytes, chat: bool, seconds: float) -> Reading:
    try:
        body = loads(content)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"not JSON: {error}") from None
    choices = _get(body, "choices", list)
    if not choices:
        raise Unreadable("choices is empty")
    choice = choices[0]
    message = _get(choice, "message", dict) if chat else choice
    text = message.get("content" if chat else "text")
    if text is None and chat:
        text = ""  # an answer of calls only
    if not isinstance(text, str):
        raise Unreadable(f"the answer's text is {text!r:.40}")
    ids = _token_ids(choice)
    reported = choice.get("logprobs")
    tokens, logprobs, top = _logprobs(reported, chat)
    return Reading(
        True,
        text=text,
        tokens=tokens or tuple(f"token_id:{token}" for token in ids),
        logprobs=logprobs,
        top=top,
        finish=str(choice.get("finish_reason") or ""),
        tool_calls=_calls(message) if chat else (),
        usage=_usage(body),
        fingerprint=str(body.get("system_fingerprint") or ""),
        seconds=seconds,
        token_ids=ids,
    )


Reported = tuple[tuple[str, ...], tuple[float, ...], tuple[tuple[tuple[str, float], ...], ...]]


def _logprobs(reported: Any, chat: bool) -> Reported:
    if reported is None or (chat and reported.get("content", ()) is None):
        return (), (), ()
    return _chat(reported) if chat else _lists(reported)


def _chat(reported: Any) -> Reported:
    """`logprobs.content` of a chat: an object a token."""
    entries = _get(reported, "content", list)
    return (
        tuple(_token(entry) for entry in entries),
        tuple(number(entry.get("logprob")) for entry in entries),
        tuple(
            tuple(
                (_token(one), number(one.get("logprob"))) for one in entry.get("top_logprobs") or ()
            )
            for entry in entries
        ),
    )


def _lists(reported: Any) -> Reported:
    """`logprobs` of a completion: parallel lists."""
    tokens = _get(reported, "tokens", list)
    values = _get(reported, "token_logprobs", list)
    alternatives = reported.get("top_logprobs") or [None] * len(tokens)
    if not len(tokens) == len(values) == len(alternatives):
        raise Unreadable(f"{len(tokens)} tokens with {len(values)} logprobs")
    return (
        tuple(map(str, tokens)),
        tuple(map(number, values)),
        tuple(
            tuple((str(token), number(value)) for token, value in (one or {}).items())
            for one in alternatives
        ),
    )


def _token(entry: Any) -> str:
    """A token's text, or its bytes where the text has replacement characters in it."""
    text: str = _get(entry, "token", str)
    raw = entry.get("bytes")
    if "\N{REPLACEMENT CHARACTER}" in text and isinstance(raw, list) and raw:
        return name_of_bytes(bytes(one & 255 for one in raw if isinstance(one, int)))
    return text


def name_of_bytes(raw: bytes) -> str:
    """How a token is named whose bytes are no text: as OpenAI's completions do it."""
    return "bytes:" + "".join(f"\\x{one:02x}" for one in raw)


def number(value: Any) -> float:
    """A logprob: a number up to 0, or minus infinity."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not value <= ABOVE_ZERO:  # NaN is not, either
        raise Unreadable(f"a logprob is {value!r:.40}")
    return float(value) if value > LEAST else -math.inf


def _token_ids(choice: Mapping[str, Any]) -> tuple[int, ...]:
    ids = choice.get("token_ids")
    if not isinstance(ids, Sequence) or isinstance(ids, str):
        return ()
    if not all(isinstance(one, int) for one in ids):
        raise Unreadable("token_ids are no integers")
    return tuple(ids)


def _calls(message: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    found = []
    for call in message.get("tool_calls") or ():
        function = _get(call, "function", dict)
        arguments = function.get("arguments")
        # Some servers send the object itself: what a client would see is its text.
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        found.append(ToolCall(str(function.get("name") or ""), text))
    return tuple(found)


def _usage(body: Mapping[str, Any]) -> Usage | None:
    usage = body.get("usage")
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    if not all(isinstance(count, int) for count in counts):
        return None
    return Usage(
        int(counts[0] or 0), int(counts[1] or 0), cached if isinstance(cached, int) else None
    )


def _get(body: Any, name: str, kind: type) -> Any:
    """A field of an object, of the type that the API gives it."""
    value = body.get(name) if isinstance(body, dict) else None
    if not isinstance(value, kind):
        raise Unreadable(f"{name} is {value!r:.40}, not a {kind.__name__}")
    return value
