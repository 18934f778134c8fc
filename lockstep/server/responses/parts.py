"""Parts of items, as clients write them: all of them texts.

They are read here and not by pydantic: in a body of a hundred thousand small parts that
would hold the server's loop for a second, and for many more if each of them is wrong.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from lockstep.types import RequestError

# Where a part of each type has its text.
_TEXTS = {
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "reasoning_text": "text",
    "summary_text": "text",
}
# What servers and OpenAI's client (`parsed`) add to a text that was given out.
_ADDED = frozenset({"annotations", "logprobs", "parsed"})

MESSAGE = ("input_text", "output_text", "refusal")
TEXT = ("input_text", "output_text")
REASONING = ("reasoning_text", "summary_text")


def read_parts(parts: Sequence[Any], where: str, types: Container[str]) -> list[tuple[str, str]]:
    """Each part's type and text.

    Args:
        where: their list's place in the request, for errors.
        types: those that may stand there.

    Raises:
        RequestError: another type, no text, or a field that this server does not know.
    """
    return [_read(part, where, index, types) for index, part in enumerate(parts)]


def _read(part: Any, where: str, index: int, types: Container[str]) -> tuple[str, str]:
    if not isinstance(part, dict):
        raise RequestError(f"{where}[{index}] must be an object with a type", field="input")
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in types:
        raise RequestError(
            f"{where}[{index}]: parts of type {kind!r} are not supported here, only text is",
            field="input",
            code="unsupported_parameter",
        )
    name = _TEXTS[kind]
    text = part.get(name)
    if not isinstance(text, str):
        raise RequestError(f"{where}[{index}].{name} must be a string", field="input")
    if len(part) > 2:
        for key, value in part.items():
            if key not in ("type", name) and key not in _ADDED and not is_nothing(value):
                raise unknown(f"{where}[{index}].{key}")
    return kind, text


def is_nothing(value: Any) -> bool:
    """Whether a field that is not known says nothing and may stand there."""
    return value is None or value in ([], {}, "")


def unknown(where: str) -> RequestError:
    """The error of a field that is not known and says something."""
    return RequestError(
        f"{where} is not supported by this server", field="input", code="unsupported_parameter"
    )
