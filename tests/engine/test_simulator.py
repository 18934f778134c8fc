"""Random driving of the engine on an executor that knows what every page should hold.

Tiny vocabularies make shared prefixes and false friends frequent; tiny pools make
eviction and preemption the normal case. After every step the books of the cache are
checked, and that the most important sequence is served; at the end every answer must be
what the sequence gives alone.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence as Ordered
from functools import cache

import pytest

from lockstep.config import BranchOptions, CacheConfig, SchedulerConfig
from lockstep.engine.loop import Engine
from lockstep.engine.sequence import Sequence, State
from lockstep.runner.plan import Plan
from lockstep.types import (
    FinishReason,
    LayerGroup,
    Request,
    RequestError,
    SamplingParams,
    SequenceOutput,
    TokenLogprob,
)
from tests.fakes import FakeExecutor, expected_tokens, hashes

FULL = (LayerGroup("full", "full", (0, 1), 1, 8),)


def mixed(window: int) -> tuple[LayerGroup, ...]:
    return (
        LayerGroup("full", "full", (0,), 1, 8),
        LayerGroup("sliding", "sliding", (1,), 1, 8, window),
    )


PAGE = 4
SLACK = PAGE
"""Steps that the best sequence may lose to a wait for another's prefix or to one restart on an
empty pool, beyond one a token of its own."""
SLIDING = (LayerGroup("sliding", "sliding", (0, 1), 1, 8, 6),)


class Driver:
    """One engine under random load, and what is known about every request."""

    def __init__(
        self,
        seed: int,
        executor: FakeExecutor,
        config: SchedulerConfig,
        keep: bool,
        branches: BranchOptions | None = None,
    ):
        self.random = random.Random(seed)
        self.executor = executor
        executor.fails = self.fails
        executor.keep_plans = False
        self.engine = Engine(executor, config, CacheConfig(prefix_caching=keep), branches=branches)
        self.requests: dict[str, Request] = {}
        self.open: set[tuple[str, int]] = set()
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.scores: dict[str, tuple[TokenLogprob | None, ...]] = {}
        self.pooled: dict[str, int] = {}
        self.finish: dict[tuple[str, int], FinishReason] = {}
        self.failing = False
        self.failed_numbers: set[int] = set()
        self.prefixes = [self.draw(self.random.randint(3, 24)) for _ in range(3)]
        self.submitted = 0
        self.leader = -1  # number of the best sequence, and the steps that it has left
        self.allowed = 0

    def draw(self, count: int) -> tuple[int, ...]:
        return tuple(self.random.randrange(3) for _ in range(count))

    def fails(self, plan: Plan) -> bool:
        return self.failing

    def submit(self) -> None:
        chance = self.random
        shared = chance.choice(self.prefixes)
        prompt = shared[: chance.randint(1, len(shared))] + self.draw(chance.randint(0, 8))
        pooling = chance.choice((*[""] * 8, "last", "mean"))
        count = 0 if pooling else chance.choice((0, 1, 3, 12))
        params = SamplingParams(
            max_tokens=count,
            n=1 if pooling else chance.choice((1, 1, 1, 3)),
            seed=chance.randrange(3),
            prompt_logprobs=None if pooling else chance.choice((None, None, None, 1)),
        )
        request = Request(
            f"r{len(self.requests)}",
            prompt,
            params,
            priority=chance.choice((0, 0, 0, 1, -1)),
            salt=chance.choice(("", "", "b")),
            score_from=chance.choice((1, chance.randint(1, len(prompt)))),
            pooling=pooling,
            stop_ids=() if pooling else chance.choice(((), (), (1,))),
        )
        try:
            self.engine.submit(request)
        except RequestError as error:
            assert error.code == "context_length_exceeded"  # noqa: PT017
            return
        self.requests[request.id] = request
        self.open.update((request.id, choice) for choice in range(params.n))
        self.submitted += params.n

    def step(self, fail: bool = False) -> None:
        self.failing = fail
        self.watch_the_best()
        had_work = self.engine.has_work()
        before = self.engine.stats()
        outputs = self.engine.step()
        self.failing = False
        after = self.engine.stats()
        assert not had_work or outputs or after.computed_tokens > before.computed_tokens
        for output in outputs:
            key = (output.request, output.choice)
            assert key in self.open, "an output after the end"
            self.take(output)
            self.tokens[key].extend(output.tokens)
            if output.prompt_logprobs is not None:
                assert output.request not in self.scores
                self.scores[output.request] = output.prompt_logprobs
            if output.pooled:
                assert output.request not in self.pooled
                parts = [int.from_bytes(part, "little") for part in output.pooled]
                self.pooled[output.request] = sum(parts)
            if output.finish is not None:
                self.finish[key] = output.finish
                self.open.remove(key)
        self.engine.check_integrity()
        assert after.submitted == self.submitted
        assert after.submitted == (
            after.running + after.waiting + after.finished + after.cancelled + after.failed
        )
        assert after.pages_used + after.pages_cached <= after.pages_total

    def take(self, output: SequenceOutput) -> None:
        """For drivers that look at more of an output."""

    def left(self, sequence: Sequence) -> int:
        """Steps of one token each that it has before it."""
        return sequence.max_len - sequence.computed

    def watch_the_best(self) -> None:
        """Nobody starves: whoever is best, and stays it, ends within a step for each of its own
        tokens that are yet to be computed, plus `SLACK`, whatever else is in the queue. Others
        may have overtaken one that waited for a prefix: it then waits for those that run."""
        scheduler = self.engine._scheduler
        best = min(scheduler.running + scheduler.waiting, key=lambda s: s.rank, default=None)
        if best is None:
            return
        if best.number != self.leader:
            self.leader = best.number
            ahead = scheduler.running if best.state is State.WAITING else []
            self.allowed = SLACK + sum(map(self.left, [best, *ahead]))
        assert self.allowed > 0, f"sequence {best.number} is the best and starves"
        self.allowed -= 1

    def drain(self) -> int:
        bound = 2 * sum(
            len(self.requests[name].prompt) + (self.requests[name].sampling.max_tokens or 0)
            for name, _ in self.open
        )
        steps = 0
        while self.engine.has_work():
            self.step()
            steps += 1
            assert steps <= bound + 1, "no progress"
        return steps

    def check_answers(self) -> None:
        for key, finish in self.finish.items():
            request = self.requests[key[0]]
            whole = expected_tokens(
                request.prompt,
                request.sampling.max_tokens or 0,
                self.executor.vocab_size,
                key[1],
                request.sampling.seed or 0,
            )
            got = self.tokens[key]
            assert got == whole[: len(got)]
            assert not set(got[:-1]) & set(request.stop_ids)
            if finish is FinishReason.STOP:
                assert got[-1] in request.stop_ids
            if finish is FinishReason.LENGTH:
                assert len(got) == len(whole)
                assert not set(got) & set(request.stop_ids)
                if request.sampling.prompt_logprobs is not None and key[1] == 0:
                    self.check_scores(request, self.scores[key[0]])
                if request.pooling:
                    rows = hashes(request.prompt)
                    expected = sum(rows) if request.pooling == "mean" else rows[-1]
                    assert self.pooled[key[0]] == expected
        self.check_leaks()

    @staticmethod
    def check_scores(request: Request, entries: Ordered[TokenLogprob | None]) -> None:
        """Every token from `score_from` on has the entry of its own id, those before none."""
        scored = [entry.token for entry in entries if entry is not None]
        assert scored == list(request.prompt[request.score_from :])
        assert entries[: request.score_from] == (None,) * request.score_from
        assert len(entries) == len(request.prompt)

    def check_leaks(self) -> None:
        stats = self.engine.stats()
        assert stats.pages_used == 0
        self.engine.flush_cache()
        assert self.engine.stats().pages_cached == 0
        self.engine.check_integrity()


SHAPES = [
    (FULL, (1,), 14),
    (FULL, (3,), 40),
    (mixed(5), (1, 2), 16),
    (mixed(9), (3, 2), 9),
    (mixed(2), (2, 3), 8),
    (mixed(1), (1, 1), 24),
    (mixed(9), (4, 4), 5),
    (mixed(20), (6, 5), 4),
    (SLIDING, (2,), 8),
]
SEEDS = range(6)


@cache
def drive(
    groups: tuple[LayerGroup, ...],
    pages_per_slab: tuple[int, ...],
    slabs: int,
    seed: int,
    overlap: bool,
) -> Counter[str]:
    """One engine driven to the end; how often it was pressed."""
    chance = random.Random(seed * 1000 + slabs)
    executor = FakeExecutor(
        groups=groups,
        vocab_size=3,
        max_context=48,
        page_tokens=PAGE,
        num_slabs=slabs,
        pages_per_slab=pages_per_slab,
    )
    config = SchedulerConfig(
        max_step_tokens=chance.choice((3, 8, 24)),
        max_sequences=chance.choice((2, 6)),
        max_chunk_tokens=chance.choice((3, 8)),
        overlap=overlap,
    )
    driver = Driver(seed, executor, config, keep=seed % 3 != 2)
    if seed % 2:  # admit whatever comes, so that pages run out in every way they can
        driver.engine._scheduler._has_room = lambda *_: True  # type: ignore[method-assign]
    for _ in range(150):
        action = chance.random()
        if action < 0.4:
            driver.submit()
        elif action < 0.47 and driver.open:
            name, choice = chance.choice(sorted(driver.open))
            driver.engine.cancel(name, chance.choice((None, choice)))
        else:
            driver.step(fail=action > 0.98)
    driver.drain()
    driver.check_answers()
    assert not driver.open
    cache_stats = driver.engine._cache.stats
    return Counter(
        preemptions=driver.engine.stats().preemptions,
        evictions=cache_stats.evictions,
        copies=cache_stats.copies,
        ahead=executor.ahead,
    )


@pytest.mark.parametrize(("groups", "pages_per_slab", "slabs"), SHAPES)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("overlap", [False, True])
def test_random_driving(
    groups: tuple[LayerGroup, ...],
    pages_per_slab: tuple[int, ...],
    slabs: int,
    seed: int,
    overlap: bool,
) -> None:
    assert overlap or drive(groups, pages_per_slab, slabs, seed, overlap)["ahead"] == 0
    drive(groups, pages_per_slab, slabs, seed, overlap)


@pytest.mark.parametrize(("groups", "pages_per_slab", "slabs"), SHAPES)
@pytest.mark.parametrize("overlap", [False, True])
def test_the_drives_press_every_pool(
    groups: tuple[LayerGroup, ...], pages_per_slab: tuple[int, ...], slabs: int, overlap: bool
) -> None:
    """Else the drives would prove nothing about preemption, eviction and copies on write."""
    total: Counter[str] = Counter()
    for seed in SEEDS:
        total.update(drive(groups, pages_per_slab, slabs, seed, overlap))
    assert all(total[what] > 0 for what in ("preemptions", "evictions", "copies")), total
    assert not overlap or total["ahead"] > 50
