"""A real model under the scheduler: sharing, chunks, preemption and choices move no bit.

The models are small and random, with one cache group and with two; the pool is so small
that sequences push each other out.
"""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
import torch

from lockstep.config import CacheConfig, ConfigError, SchedulerConfig
from lockstep.engine.loop import Engine
from lockstep.kernels.contract import Backend
from lockstep.kernels.cpu import make_backend
from lockstep.model import DecoderModel, load_model
from lockstep.runner.runner import Runner
from lockstep.types import EngineStats, Request, TokenLogprob
from lockstep.weights import Checkpoint
from tests.engine.harness import drain, request, tokens
from tests.model.tiny import build_oracle, save

LARGE = 8 * 2**20
Answer = tuple[list[int], list[TokenLogprob]]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    return save(build_oracle(request.param), tmp_path_factory.mktemp(request.param))


def requests() -> list[Request]:
    chance = random.Random(5)
    shared = [chance.randrange(131) for _ in range(50)]
    found = []
    for number in range(8):
        prompt = shared[: chance.randint(5, 50)]
        prompt += [chance.randrange(131) for _ in range(chance.randint(1, 20))]
        found.append(
            request(
                f"r{number}",
                prompt,
                24,
                temperature=(0.0, 1.0)[number % 2],
                seed=number,
                n=1 + number % 3 // 2,
                logprobs=2,
                repetition_penalty=1.2,
            )
        )
    return found


def answers(
    runner: Runner,
    work: list[Request],
    *,
    together: bool,
    careless: bool = False,
    **settings: int,
) -> tuple[dict[tuple[str, int], Answer], EngineStats]:
    target = Engine(runner, SchedulerConfig(**settings), CacheConfig())
    if careless:  # admit whatever comes, so that it is pushed out again
        target._scheduler._has_room = lambda *_: True  # type: ignore[method-assign]
    found: dict[tuple[str, int], Answer] = {}
    for batch in [work] if together else [[one] for one in work]:
        for one in batch:
            target.submit(one)
        for key, outputs in drain(target).items():
            found[key] = (tokens(outputs), [entry for out in outputs for entry in out.logprobs])
        if not together:
            target.flush_cache()
    return found, target.stats()


def smallest(model: DecoderModel, backend: Backend, context: int) -> Runner:
    """A runner with the fewest slabs that hold one sequence of `context` tokens."""
    slabs = 1
    while True:
        slabs += 1
        with suppress(ConfigError):
            runner = Runner(model, backend, num_slabs=slabs, step_tokens=40)
            if runner.max_context >= context:
                return runner


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_crowd_in_a_tiny_pool_equals_each_alone(
    checkpoint: Checkpoint, dtype: torch.dtype
) -> None:
    backend = make_backend("native", 1)
    model = load_model(checkpoint, backend, dtype)
    alone, _ = answers(Runner(model, backend, memory_bytes=LARGE), requests(), together=False)
    crowd, stats = answers(Runner(model, backend, memory_bytes=LARGE), requests(), together=True)
    assert crowd == alone
    assert stats.cached_tokens > 0
    pressed, stats = answers(
        smallest(model, backend, 160),
        requests(),
        together=True,
        careless=True,
        max_step_tokens=40,
        max_chunk_tokens=19,
    )
    assert pressed == alone
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
