"""Typed reads of a model's configuration, whatever file it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.types import ModelError


class CheckedValues:
    """Reads that check what they find and remember which keys were read.

    Args:
        values: the configuration; null is as good as absent.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._read: set[str] = set()

    def fail(self, key: str, complaint: str) -> ModelError:
        """The error for a key, naming the model and the key in full."""
        raise NotImplementedError

    def optional(self, key: str) -> Any:
        """The value, or None when it is absent or null."""
        self._read.add(key)
        return self._values.get(key)

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer, by default a positive one; without a default the key must be there."""
        value = self._wanted(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.fail(key, f"must be an integer of at least {least}, is {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number; without a default the key must be there."""
        value = self._wanted(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self.fail(key, f"must be a positive number, is {value!r}")
        return float(value)

    def _wanted(self, key: str, default: float | None) -> Any:
        value = self.optional(key)
        if value is None:
            value = default
        if value is None:
            raise self.fail(key, "is missing")
        return value
