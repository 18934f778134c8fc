"""What this machine can do at most: memory read bandwidth and matrix arithmetic.

    python -m bench.limits THREADS

Prints JSON; run in a process of its own so that its threads end with it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

READ_BYTES = 1 << 29
MATRIX = 2048


@dataclass(frozen=True)
class Limits:
    """Bytes a second read from memory, and floating-point operations a second in `dtype`."""

    read_bytes: float
    flops: float


# One H200: a device copy (bytes read and written) and bfloat16 products, both measured.
H200 = Limits(4.3e12, 790e12)


def measure(threads: int, dtype: str) -> Limits:
    """Best of several tries with `threads` threads, in a fresh process."""
    command = [sys.executable, "-m", "bench.limits", str(threads), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return Limits(**json.loads(done.stdout))


def _best(work: Callable[[], object], tries: int) -> float:
    times = []
    for _ in range(tries):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.quantiles(times, n=10)[0]


def main() -> None:
    """Measure and print."""
    import torch

    threads, dtype = int(sys.argv[1]), getattr(torch, sys.argv[2])
    torch.set_num_threads(threads)
    block = torch.ones(READ_BYTES // 4)
    read = READ_BYTES / _best(block.sum, 12)
    left, right = torch.randn(MATRIX, MATRIX).to(dtype), torch.randn(MATRIX, MATRIX).to(dtype)
    flops = 2 * MATRIX**3 / _best(lambda: left @ right, 12)
    print(json.dumps({"read_bytes": read, "flops": flops}))


if __name__ == "__main__":
    main()
