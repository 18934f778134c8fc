"""Lockstep: an LLM inference engine in which no answer changes by sharing.

The public names are loaded on first use, so that light processes (the HTTP
server, the command line's help) do not pay for importing PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.types import (
    Completion,
    Grammar,
    LockstepError,
    RequestError,
    SamplingParams,
    TokenLogprob,
)

if TYPE_CHECKING:
    from lockstep.llm import LLM, AsyncLLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "Completion",
    "Grammar",
    "LockstepError",
    "RequestError",
    "SamplingParams",
    "TokenLogprob",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in ("LLM", "AsyncLLM"):
        from lockstep import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
