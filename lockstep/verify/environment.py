"""What ran a check: versions and hardware, as plain values for a record."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

from lockstep import __version__

_PACKAGES = ("httpx", "numpy", "scipy", "torch", "triton", "transformers", "vllm")


def versions() -> dict[str, str]:
    """Of Lockstep, Python, and those packages that are installed here; none is imported."""
    found = {"lockstep": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, str]:
    """Of the machine that asks, which need not be the one that answers."""
    return {
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _cpu(),
        "cores": str(os.cpu_count() or 0),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
