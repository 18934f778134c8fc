"""The next step planned while the device works: the same answers as the plain loop, and no
request, page or token lost between two steps."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from lockstep.config import CacheConfig, ConfigError, SchedulerConfig
from lockstep.engine.loop import Engine
from lockstep.kernels.cpu import make_backend
from lockstep.model import load_model
from lockstep.runner.runner import Runner
from lockstep.types import FinishReason, Request, SequenceOutput
from tests.engine.harness import drain, engine, request, tokens
from tests.fakes import FakeExecutor, expected_tokens
from tests.model.tiny import build_oracle, save

Story = dict[tuple[str, int], list[SequenceOutput]]


def some_requests(seed: int, vocab: int) -> list[Request]:
    """Greedy and drawn, with and without stop ids; some with logprobs, which nobody follows."""
    chance = random.Random(seed)
    return [
        request(
            f"r{index}",
            [chance.randrange(vocab) for _ in range(chance.randint(1, 40))],
            chance.choice((1, 2, 17, 40)),
            temperature=chance.choice((0.0, 1.0)),
            seed=index,
            n=chance.choice((1, 1, 2)),
            logprobs=chance.choice((None,) * 9 + (1,)),
            stop_ids=chance.choice(((), tuple(range(0, vocab, 9)))),
        )
        for index in range(24)
    ]


def untimed(story: Story) -> dict[tuple[str, int], list[tuple[object, ...]]]:
    return {
        key: [(out.tokens, out.logprobs, out.finish, out.error) for out in outputs]
        for key, outputs in story.items()
    }


@pytest.mark.parametrize("sequences", [3, 64])
@pytest.mark.parametrize("seed", range(4))
def test_the_plain_loop_tells_the_same_story(seed: int, sequences: int) -> None:
    stories = []
    for overlap in (False, True):
        executor = FakeExecutor(vocab_size=50, page_tokens=4)
        target = engine(executor, overlap=overlap, max_sequences=sequences)
        for one in some_requests(seed, 50):
            target.submit(one)
        stories.append(untimed(drain(target)))
        assert (executor.ahead > 5) == overlap
    assert stories[0] == stories[1]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_ids_that_the_host_has_not_seen(name: str, tmp_path: Path) -> None:
    """A real model: what a step draws is what the next one reads, in any order of runs."""
    backend = make_backend("torch", 1)
    model = load_model(save(build_oracle(name), tmp_path), backend, torch.float32)
    runner = Runner(model, backend, memory_bytes=8 << 20, page_tokens=4, max_sequences=8)
    found = []
    for overlap in (False, True):
        target = Engine(runner, SchedulerConfig(max_sequences=8, overlap=overlap), CacheConfig())
        for one in some_requests(1, 131)[:12]:
            target.submit(one)
        found.append(untimed(drain(target)))
    assert found[0] == found[1]


def test_nobody_who_waits_is_forgotten() -> None:
    executor = FakeExecutor()
    target = engine(executor, overlap=True, max_sequences=2)
    for name in "ab":
        target.submit(request(name, range(10), 200))
    for _ in range(5):
        target.step()
    assert executor.ahead >= 3
    target.submit(request("c", range(5), 3))
    target.submit(request("urgent", range(5), 3, priority=-1))
    heard = [out.request for _ in range(12) for out in target.step()]
    assert heard.count("urgent") == 3
    assert executor.ahead >= 10  # a full house is no reason to wait for the host
    found = drain(target)
    assert tokens(found[("c", 0)]) == expected_tokens(range(5), 3, 1000)


def test_a_cancelled_sequence_tells_what_was_under_way_first() -> None:
    target = engine(overlap=True)
    target.submit(request("gone", range(10), 100))
    target.submit(request("stays", range(20), 8))
    told = [out for _ in range(4) for out in target.step() if out.request == "gone"]
    target.cancel("gone")
    told += drain(target)[("gone", 0)]
    assert told[-1].finish is FinishReason.CANCELLED
    assert tokens(told) == expected_tokens(range(10), 5, 1000)


def test_what_was_generated_ahead_is_a_prefix_for_the_next_turn() -> None:
    cached = []
    for overlap in (False, True):
        target = engine(overlap=overlap)
        target.submit(request("first", range(20), 60))
        answer = tokens(drain(target)[("first", 0)])
        target.submit(request("second", [*range(20), *answer, 7], 4))
        (output, *_) = drain(target)[("second", 0)]
        cached.append(output.cached_tokens)
    assert cached == [79, 79]


def test_a_failed_step_ends_the_one_behind_it() -> None:
    failing = {4}
    executor = FakeExecutor(fails=lambda plan: plan.step in failing)
    target = engine(executor, overlap=True)
    target.submit(request("r", range(10), 50))
    outputs = drain(target)[("r", 0)]
    assert outputs[-1].finish is FinishReason.ERROR
    assert tokens(outputs) == expected_tokens(range(10), 3, 1000)
    target.submit(request("next", range(10), 50))
    assert tokens(drain(target)[("next", 0)]) == expected_tokens(range(10), 50, 1000)


def test_the_setting_is_checked() -> None:
    with pytest.raises(ConfigError, match="overlap"):
        SchedulerConfig(overlap=1)  # type: ignore[arg-type]
