"""The keyword arguments of the Python doors, and what they configure."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack

from lockstep.config import CacheConfig, ConfigError, EngineConfig, ModelOptions, SchedulerConfig

_DTYPES = ("auto", "bfloat16", "float32")
_BACKENDS = ("auto", "native", "torch", "triton")


class EngineSettings(TypedDict, total=False):
    """Keyword arguments of both doors; `lockstep.config` documents each and its default."""

    dtype: Literal["auto", "bfloat16", "float32"]
    device: str
    backend: Literal["auto", "native", "torch", "triton"]
    threads: int
    cuda_graphs: bool
    page_tokens: int
    cache_bytes: int
    prefix_caching: bool
    max_step_tokens: int
    max_sequences: int
    max_chunk_tokens: int
    max_context: int
    max_queue: int
    overlap: bool


_ROOMS: dict[str, tuple[str, str]] = {
    **{name: ("model", name) for name in ("dtype", "device", "backend", "threads", "cuda_graphs")},
    "page_tokens": ("cache", "page_tokens"),
    "cache_bytes": ("cache", "memory_bytes"),
    "prefix_caching": ("cache", "prefix_caching"),
    **{
        name: ("scheduler", name)
        for name in (
            "max_step_tokens",
            "max_sequences",
            "max_chunk_tokens",
            "max_context",
            "max_queue",
            "overlap",
        )
    },
}


def engine_config(model: str, **settings: Unpack[EngineSettings]) -> EngineConfig:
    """The configuration that a door's keyword arguments stand for.

    Raises:
        ConfigError: an unknown setting, or a value out of range.
    """
    rooms: dict[str, dict[str, Any]] = {"model": {"name": model}, "cache": {}, "scheduler": {}}
    for name, value in settings.items():
        if name not in _ROOMS:
            raise ConfigError(f"unknown setting {name!r}; there are {', '.join(_ROOMS)}")
        room, key = _ROOMS[name]
        rooms[room][key] = value
    for name, allowed in (("dtype", _DTYPES), ("backend", _BACKENDS)):
        value = rooms["model"].get(name, "auto")
        if value not in allowed:
            raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    return EngineConfig(
        model=ModelOptions(**rooms["model"]),
        cache=CacheConfig(**rooms["cache"]),
        scheduler=SchedulerConfig(**rooms["scheduler"]),
    )
