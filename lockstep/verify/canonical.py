"""One text for one value, so that a hash of it means the value."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def canonical_json(value: Any) -> str:
    """Compact JSON with sorted keys and no escapes beyond those that JSON requires.

    Raises:
        ValueError: NaN or an infinity, which JSON cannot carry.
        TypeError: a value that is no JSON, or an object's key that is no string.
    """
    _only_text_keys(value)
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def canonical_bytes(value: Any) -> bytes:
    """The canonical JSON in UTF-8. A lone surrogate, which JSON may hold, keeps its own bytes."""
    return canonical_json(value).encode("utf-8", "surrogatepass")


def digest(value: Any) -> str:
    """SHA-256 of the canonical bytes, in hexadecimal."""
    return hashlib.sha256(canonical_bytes(value)).hexdigest()


def _only_text_keys(value: Any) -> None:
    """json.dumps would write the key 1 as "1": two values, one text."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} of an object must be a string")
            _only_text_keys(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _only_text_keys(inner)
