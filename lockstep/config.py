"""One frozen dataclass per room; the one place for defaults and their validation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from lockstep.types import LockstepError


class ConfigError(LockstepError, ValueError):
    """A setting out of range: the message names the setting, the value and the limit."""


def _at_least(name: str, value: int, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an integer, got {value!r}")
    if value < low:
        raise ConfigError(f"{name} must be at least {low}, got {value}")


def _boolean(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, got {value!r}")


def _string(name: str, value: str) -> None:
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be a string, got {value!r}")


# By kind of device: a GPU wants thousands of rows a step to be busy, and has the memory.
DEFAULTS: dict[str, dict[str, int]] = {
    "cpu": {
        "page_tokens": 16,
        "max_step_tokens": 512,
        "max_sequences": 64,
        "max_chunk_tokens": 256,
    },
    "cuda": {
        "page_tokens": 32,
        "max_step_tokens": 8192,
        "max_sequences": 256,
        "max_chunk_tokens": 4096,
    },
}


def _defaults(device: str) -> dict[str, int]:
    """Defaults of a device such as "cpu", "cuda" or "cuda:1"; of the CPU where unknown."""
    return DEFAULTS.get(device.partition(":")[0], DEFAULTS["cpu"])


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What to load and where to put it.

    Attributes:
        name: a path, a packaged name (`smollm2`, `gemma3-270m`) or a hub id.
        dtype: of weights, activations and cache; "auto" is bfloat16.
        device: "auto" takes CUDA when present, else the CPU; a named device that
            is absent is an error, never a silent fallback.
        backend: kernels to use; "auto" takes Triton on CUDA and the native form on a CPU
            ("torch" on a CPU without a C++ compiler).
        threads: CPU threads of the engine; 0 means all cores this process may use.
        cuda_graphs: replay captured decode steps on CUDA. They have the same bits; without
            them every kernel of a step is launched from Python.
    """

    name: str = "smollm2"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    device: str = "auto"
    backend: Literal["auto", "native", "torch", "triton"] = "auto"
    threads: int = 0
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        _string("device", self.device)
        _at_least("threads", self.threads, 0)
        _boolean("cuda_graphs", self.cuda_graphs)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The page pool and the prefix tree.

    Attributes:
        page_tokens: tokens a page; divides the attention block (`kernels.tree.BLOCK`).
            0 takes the device's default: 16 on a CPU, 32 on CUDA.
        memory_bytes: bytes of the pool; 0 means sized by the runner from free memory.
        prefix_caching: keep finished sequences' pages for reuse.
    """

    page_tokens: int = 0
    memory_bytes: int = 0
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        _at_least("page_tokens", self.page_tokens, 0)
        _at_least("memory_bytes", self.memory_bytes, 0)
        _boolean("prefix_caching", self.prefix_caching)

    def resolved(self, device: str) -> CacheConfig:
        """The same with the device's defaults in place of zeros."""
        return replace(self, page_tokens=self.page_tokens or _defaults(device)["page_tokens"])


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How steps are filled. A budget of 0 takes the device's default (`DEFAULTS`).

    Attributes:
        max_step_tokens: token budget of one step, over all sequences.
        max_sequences: sequences that may run at once.
        max_chunk_tokens: most prompt tokens of one sequence in one step while
            others are running (keeps a long prompt from starving them).
        max_context: most tokens (prompt plus output) of a sequence; 0 means the model's own.
        max_queue: waiting requests beyond which a submit is refused; 0 means no limit.
    """

    max_step_tokens: int = 0
    max_sequences: int = 0
    max_chunk_tokens: int = 0
    max_context: int = 0
    max_queue: int = 0

    def __post_init__(self) -> None:
        _at_least("max_step_tokens", self.max_step_tokens, 0)
        _at_least("max_sequences", self.max_sequences, 0)
        _at_least("max_chunk_tokens", self.max_chunk_tokens, 0)
        _at_least("max_context", self.max_context, 0)
        _at_least("max_queue", self.max_queue, 0)

    def resolved(self, device: str) -> SchedulerConfig:
        """The same with the device's defaults in place of zeros."""
        defaults = _defaults(device)
        return replace(
            self,
            max_step_tokens=self.max_step_tokens or defaults["max_step_tokens"],
            max_sequences=self.max_sequences or defaults["max_sequences"],
            max_chunk_tokens=self.max_chunk_tokens or defaults["max_chunk_tokens"],
        )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine needs to start."""

    model: ModelOptions = field(default_factory=ModelOptions)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP door.

    Attributes:
        host, port: where to listen; port 0 takes a free one.
        served_name: the model name that clients use; "" means the name it was loaded by.
        max_body_bytes: larger request bodies get 413.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_name: str = ""
    max_body_bytes: int = 4 * 1024 * 1024

    def __post_init__(self) -> None:
        _at_least("port", self.port, 0)
        _at_least("max_body_bytes", self.max_body_bytes, 1024)
