"""What does a step cost before and after the device? Scheduler time without a model.

Prints microseconds per step of `schedule()` and `complete()`, for decoding batches of
several sizes and contexts (nothing may grow with the context), for one and two cache
groups, for a queue that waits behind a full pool, and for a crowd with one prefix.
The limit beside them is the decode step of an 8B model on one H200, 3.56 ms (SmolLM2's
on two CPU threads takes more): what the device waits for.

    python bench/scheduler.py
"""

from __future__ import annotations

import time
from statistics import median

from lockstep.cache import PrefixCache
from lockstep.cache.groups import make_groups
from lockstep.cache.pool import PagePool
from lockstep.config import SchedulerConfig
from lockstep.engine.scheduler import Scheduler
from lockstep.runner.plan import Plan, RunResult, StepResult
from lockstep.types import LayerGroup, Request, SamplingParams

FULL = LayerGroup("full", "full", (0,), 1, 64)
SLIDING = LayerGroup("sliding", "sliding", (1,), 1, 64, 512)
STEPS = 200


def build(groups: tuple[LayerGroup, ...], slabs: int) -> Scheduler:
    cache = PrefixCache(PagePool(slabs, (1,) * len(groups)), make_groups(groups, 16), 16)
    config = SchedulerConfig(max_step_tokens=8192, max_sequences=256, max_chunk_tokens=8192)
    return Scheduler(cache, config, (0, len(groups)), "bench")


def answer(plan: Plan) -> StepResult:
    runs = tuple(RunResult(7 if run.sample is not None else None) for run in plan.runs)
    return StepResult(plan.step, runs)


def measure(scheduler: Scheduler) -> tuple[float, float]:
    """Median microseconds of schedule and complete over the next steps."""
    planned, completed = [], []
    for _ in range(STEPS):
        begin = time.perf_counter()
        plan = scheduler.schedule()
        middle = time.perf_counter()
        assert plan is not None
        result = answer(plan)
        resumed = time.perf_counter()
        scheduler.complete(plan, result)
        completed.append(time.perf_counter() - resumed)
        planned.append(middle - begin)
    return median(planned) * 1e6, median(completed) * 1e6


def row(name: str, groups: tuple[LayerGroup, ...], batch: int, context: int, queue: int) -> None:
    pages = batch * (context + 4 * STEPS) // 16 + 1
    scheduler = build(groups, pages * len(groups))
    for number in range(batch + queue):
        prompt = tuple((number * 7919 + i * 31) % 49152 for i in range(context))
        request = Request(f"r{number}", prompt, SamplingParams(max_tokens=10 * STEPS))
        scheduler.add(request, context + 10 * STEPS)
    while any(s.remaining > 1 for s in scheduler.running) or len(scheduler.running) < batch:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.complete(plan, answer(plan))
    planned, completed = measure(scheduler)
    share = (planned + completed) / 3560
    print(
        f"{name:<18}{len(scheduler.running):>6}{context:>9}{len(scheduler.waiting):>8}"
        f"{planned:>13.0f}{completed:>13.0f}{planned + completed:>11.0f}{share:>12.1%}"
    )


def crowd(count: int, prefix: int) -> None:
    """Many requests with one prefix at once: the costliest single step, and what was computed."""
    scheduler = build((FULL,), 64 * (prefix + 200) // 16)
    for number in range(count):
        prompt = (*(i * 31 % 49152 for i in range(prefix)), *range(number, number + 20))
        scheduler.add(Request(f"r{number}", prompt, SamplingParams(max_tokens=4)), prefix + 24)
    worst = total = 0.0
    while scheduler.has_work:
        begin = time.perf_counter()
        plan = scheduler.schedule()
        took = time.perf_counter() - begin
        worst, total = max(worst, took), total + took
        assert plan is not None
        scheduler.complete(plan, answer(plan))
    stats = scheduler.stats()
    prompts = stats.computed_tokens - 3 * count
    print(
        f"{count} requests, prefix {prefix} + 20 own: prompt tokens {prompts} "
        f"(ideal {prefix + 20 * count}), schedule worst {worst * 1e3:.1f} ms, "
        f"mean {total / stats.steps * 1e6:.0f} us over {stats.steps} steps"
    )


def main() -> None:
    print(
        f"{'groups':<18}{'batch':>6}{'context':>9}{'queue':>8}{'schedule us':>13}"
        f"{'complete us':>13}{'step us':>11}{'of 3.56 ms':>12}"
    )
    for batch in (1, 16, 64, 256):
        row("full", (FULL,), batch, 200, 0)
    row("full", (FULL,), 64, 8000, 0)
    row("full + sliding", (FULL, SLIDING), 64, 200, 0)
    row("full + sliding", (FULL, SLIDING), 64, 8000, 0)
    row("full, queue", (FULL,), 64, 200, 1000)
    crowd(32, 1000)
    crowd(1000, 1000)


if __name__ == "__main__":
    main()
