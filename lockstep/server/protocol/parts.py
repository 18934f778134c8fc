"""JSON in a prompt."""

from __future__ import annotations

import json
from typing import Any

from lockstep.types import RequestError

MAX_DEPTH = 32
MAX_VALUES = 10_000
MAX_BYTES = 256 * 1024


def json_text(value: Any, where: str) -> str:
    """Compact JSON text of an object or array.

    Raises:
        RequestError: beyond 32 levels, 10,000 values or 256 KiB.
    """
    waiting: list[tuple[Any, int]] = [(value, 1)]
    count = 0
    while waiting:
        item, depth = waiting.pop()
        count += 1
        if count > MAX_VALUES:
            raise RequestError(f"{where} has more than {MAX_VALUES} values", field=where)
        if isinstance(item, dict | list):
            if depth > MAX_DEPTH:
                raise RequestError(f"{where} is nested deeper than {MAX_DEPTH}", field=where)
            inner = item.values() if isinstance(item, dict) else item
            waiting.extend((child, depth + 1) for child in inner)
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    size = len(text.encode(errors="surrogatepass"))
    if size > MAX_BYTES:
        raise RequestError(
            f"{where} is {size} bytes of JSON, at most {MAX_BYTES} are allowed", field=where
        )
    return text


def content_text(value: str | dict[str, Any] | list[Any] | None, where: str) -> str:
    """Text as it is, JSON as text, nothing as nothing."""
    if value is None or isinstance(value, str):
        return value or ""
    return json_text(value, where)
