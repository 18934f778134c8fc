"""The keyword arguments of the Python doors, and what they configure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal, TypedDict, Unpack

from lockstep.branch import check_branch_name
from lockstep.config import (
    BranchOptions,
    CacheConfig,
    ConfigError,
    EngineConfig,
    ModelOptions,
    SchedulerConfig,
)


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
    branches: Mapping[str, str | os.PathLike[str]]
    branch_depth: Literal["full", "exit"]
    keep_activations: bool
    keep_tails: bool


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
    "branches": ("branches", "load"),
    "branch_depth": ("branches", "depth"),
    "keep_activations": ("branches", "keep_activations"),
    "keep_tails": ("branches", "keep_tails"),
}


def engine_config(model: str, **settings: Unpack[EngineSettings]) -> EngineConfig:
    """The configuration that a door's keyword arguments stand for.

    Raises:
        ConfigError: an unknown setting, or a value out of range.
    """
    rooms: dict[str, dict[str, Any]] = {
        "model": {"name": model},
        "cache": {},
        "scheduler": {},
        "branches": {},
    }
    for name, value in settings.items():
        if name not in _ROOMS:
            raise ConfigError(f"unknown setting {name!r}; there are {', '.join(_ROOMS)}")
        room, key = _ROOMS[name]
        rooms[room][key] = _folders(value) if name == "branches" else value
    return EngineConfig(
        model=ModelOptions(**rooms["model"]),
        cache=CacheConfig(**rooms["cache"]),
        scheduler=SchedulerConfig(**rooms["scheduler"]),
        branches=BranchOptions(**rooms["branches"]),
    )


def _folders(branches: Any) -> tuple[tuple[str, str], ...]:
    """Branches as the engine's process, which may stand elsewhere, finds them.

    Raises:
        ConfigError, BranchError: no map from names to folders, or a name that cannot be one.
    """
    if not isinstance(branches, Mapping):
        raise ConfigError(f"branches must map names to folders, got {branches!r}")
    for name, folder in branches.items():
        check_branch_name(name)
        if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
            raise ConfigError(f"branches: {name!r} must have a folder, got {folder!r}")
    return tuple((name, os.path.abspath(folder)) for name, folder in branches.items())
