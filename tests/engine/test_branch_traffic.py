"""512 answers beside up to 4,096 decisions on the CPU: no answer and no decision moves by a bit.

A small model of random weights with the parts of a real one: six layers, grouped queries,
branches that fork and exit inside it. Prompts share beginnings, are read in chunks, and meet a
pool so small that answers make way and begin again. `test_branch_promise.py` has the same on
SmolLM2's weights with fewer answers, and tests/gpu on the GPU.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from lockstep.kernels.contract import Backend
from lockstep.kernels.cpu import make_backend
from lockstep.model import load_model
from lockstep.types import EngineStats, Request
from lockstep.weights import open_checkpoint
from tests.control import RowSplitBackend
from tests.engine.mixing import (
    Bits,
    Mixed,
    decides,
    decisions,
    differ,
    generation,
    ids,
    interleaved,
    mixed,
    run,
    writes,
)
from tests.model.tiny import build_oracle, save

VOCAB, LAYERS = 131, 6
BRANCHES = {"suffix": (1, 3), "context": (2, 4)}
WRITERS, RATIOS = 512, (1, 8)
ALONE = 32  # answers, and decisions, that are computed one at a time on a cold cache
STEMS, STEM, OWN = 4, 40, 20  # shared beginnings, their tokens, and tokens behind them
POOL = 320 << 10  # bytes


class Traffic(NamedTuple):
    """What came of one kind of traffic."""

    answers: dict[str, Bits]
    stats: EngineStats


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("small")
    save(build_oracle("qwen3", num_hidden_layers=LAYERS), found)
    return found


def place(folder: Path, backend: Backend, branches: Path) -> Mixed:
    model = load_model(open_checkpoint(str(folder)), backend, torch.bfloat16)
    return mixed(model, backend, branches, BRANCHES, context=96, pool=POOL)


@pytest.fixture(scope="module")
def world(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Mixed:
    return place(folder, make_backend("native", 2), tmp_path_factory.mktemp("branches"))


@pytest.fixture(scope="module")
def writers() -> list[Request]:
    """Greedy and drawn, some of two choices; three of four begin as others do."""
    source = random.Random(17)
    stems = [ids(source, STEM, VOCAB) for _ in range(STEMS)]
    found = []
    for i, one in enumerate(generation(WRITERS, VOCAB, OWN, new=3)):
        stem = stems[source.randrange(STEMS)][: source.randint(8, STEM)] if i % 4 else ()
        new = replace(one.sampling, max_tokens=source.choice((1, 2, 3, 9)))
        urgent = -1 if i % 2 else 0  # makes others make way
        made = replace(one, prompt=(*stem, *one.prompt), sampling=new, priority=urgent)
        found.append(made)
    return found


@pytest.fixture(scope="module")
def judged(writers: list[Request]) -> list[Request]:
    return decisions(max(RATIOS) * WRITERS, list(BRANCHES), writers, VOCAB)


def traffic(world: Mixed, arrivals: Sequence[Sequence[Request]], **settings: Any) -> Traffic:
    engine = world.engine(max_step_tokens=384, max_chunk_tokens=24, max_sequences=48, **settings)
    return Traffic(run(engine, arrivals), engine.stats())


@pytest.fixture(scope="module")
def written(world: Mixed, writers: list[Request]) -> Traffic:
    """Answers of an engine that knows no branches."""
    return traffic(world, interleaved(writers, []), branches=False)


@pytest.fixture(scope="module")
def lonely(world: Mixed, writers: list[Request], judged: list[Request]) -> dict[str, Bits]:
    """Some of both, each alone on a cold cache in an engine of default chunks."""
    engine = world.engine()
    found: dict[str, Bits] = {}
    for one in (*writers[:ALONE], *judged[:ALONE]):
        engine.flush_cache()
        found |= run(engine, [[one]])
    return found


def test_the_traffic_is_what_it_is_meant_to_be(written: Traffic, writers: list[Request]) -> None:
    """Prefix hits, chunks and preemptions all take place; answers are unlike each other."""
    stats = written.stats
    assert len(written.answers) == WRITERS + WRITERS // 4
    assert differ(written.answers)
    assert stats.cached_tokens > 0
    assert stats.preemptions > 0
    assert max(len(one.prompt) for one in writers) > 24


def test_answers_are_those_of_requests_alone(written: Traffic, lonely: dict[str, Bits]) -> None:
    expected = writes(lonely)
    assert len(expected) == ALONE + ALONE // 4
    assert {name: written.answers[name] for name in expected} == expected


def test_loaded_but_idle_moves_no_bit(
    world: Mixed, writers: list[Request], written: Traffic
) -> None:
    found = traffic(world, interleaved(writers, []))
    assert found.answers == written.answers


@pytest.mark.parametrize("ratio", RATIOS)
def test_traffic_of_decisions_moves_no_bit(
    world: Mixed,
    writers: list[Request],
    judged: list[Request],
    written: Traffic,
    lonely: dict[str, Bits],
    ratio: int,
) -> None:
    found = traffic(world, interleaved(writers, judged[: ratio * WRITERS]))
    assert writes(found.answers) == written.answers
    others = decides(found.answers)
    assert len(others) == ratio * WRITERS
    assert differ(others)
    expected = decides(lonely)
    assert {name: others[name] for name in expected} == expected
    assert found.stats.preemptions > 0


def test_sums_that_follow_the_batch_are_caught(
    folder: Path, writers: list[Request], judged: list[Request], tmp_path: Path
) -> None:
    """The control: torch's products, cut by how many rows share them. Idle branches move
    nothing there either, traffic does, and it moves decisions too."""
    world = place(folder, RowSplitBackend(), tmp_path)
    few, asked = writers[:32], judged[:32]
    expected = traffic(world, interleaved(few, []), branches=False).answers
    found = traffic(world, interleaved(few, asked)).answers
    assert writes(found) != expected
    assert decides(found) != traffic(world, [asked]).answers
