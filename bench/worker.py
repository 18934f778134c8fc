"""What a benchmarked engine looks like to `bench.throughput`: a process that takes jobs as lines.

Standard library only, so that it can be imported by any engine's own environment. A worker loads
its engine, generates one token, reports ready, then answers each job line with a result line.
Engines print what they like to standard output while they load; result lines carry a mark.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

MARK = "@@lockstep-bench "


@dataclass(frozen=True)
class Job:
    """Work for an engine: greedy, exactly `new_tokens` each, end tokens ignored.

    Attributes:
        prompts: token ids, all submitted together.
        new_tokens: to generate for each prompt.
    """

    prompts: list[list[int]]
    new_tokens: int


@dataclass(frozen=True)
class Result:
    """What a job took: seconds, tokens generated, and prompt rows computed where known."""

    wall: float
    tokens: int
    computed: int | None = None


Generate = Callable[[Job], tuple[int, int | None]]


def say(message: dict[str, object]) -> None:
    """Send one line to the benchmark."""
    print(MARK + json.dumps(message), flush=True)


def serve(generate: Generate) -> None:
    """Report ready after one token, then run jobs from standard input until it closes.

    Args:
        generate: runs a job; returns tokens generated and rows computed (None if unknown).
    """
    generate(Job([[1, 2, 3, 4]], 1))
    say({"ready": True})
    for line in sys.stdin:
        job = Job(**json.loads(line))
        start = time.perf_counter()
        tokens, computed = generate(job)
        say(asdict(Result(time.perf_counter() - start, tokens, computed)))
