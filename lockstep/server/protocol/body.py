"""Base of every request body."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Body(BaseModel):
    """Base of every request body."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, data: Any) -> Any:
        """Keep one unknown field at most: it is refused, and the others need no error each."""
        if not isinstance(data, dict) or len(data) <= len(cls.model_fields):
            return data
        if cls.model_config.get("extra") != "forbid":
            return data
        names = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next(name for name in data if name not in names)
        return {unknown: data[unknown], **{name: data[name] for name in names if name in data}}
