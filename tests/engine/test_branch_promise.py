"""Judge and writer in one engine, on SmolLM2's real weights: neither moves the other by a bit.

Generation is compared with no branch loaded, with branches loaded but idle, and among as many
and eight times as many decisions; decisions with engines that do nothing else, one at a time
on a cold cache. A backend whose sums follow the batch must fail both comparisons.

`LOCKSTEP_PROMISE_WRITERS=512` makes it many (some ten minutes on two quiet cores).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.kernels.contract import Backend
from lockstep.kernels.cpu import make_backend
from lockstep.model import load_model
from lockstep.types import Request
from lockstep.weights import open_checkpoint
from tests.control import RowSplitBackend
from tests.engine.mixing import (
    Bits,
    Mixed,
    check_gates,
    decides,
    decisions,
    differ,
    generation,
    interleaved,
    mixed,
    run,
    writes,
)

DTYPES = (torch.float32, torch.bfloat16)
LAYERS = {"suffix": (20, 24), "context": (14, 17), "suffix-deep": (26, 30)}
VOCAB = 49152
WRITERS, LONGEST = int(os.environ.get("LOCKSTEP_PROMISE_WRITERS", "8")), 16
RATIOS = (1, 8)
ALONE = 12  # decisions that are computed one at a time


def place(dtype: torch.dtype, backend: Backend, folder: Path) -> Mixed:
    model = load_model(open_checkpoint("smollm2"), backend, dtype)
    return mixed(model, backend, folder, LAYERS, context=96, pool=96 << 20)


@pytest.fixture(scope="module", params=DTYPES, ids=lambda dtype: str(dtype)[6:])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mixed:
    return place(request.param, make_backend("native", 2), tmp_path_factory.mktemp("branches"))


@pytest.fixture(scope="module")
def writers() -> list[Request]:
    return generation(WRITERS, VOCAB, LONGEST)


@pytest.fixture(scope="module")
def judged(writers: list[Request]) -> list[Request]:
    return decisions(max(RATIOS) * WRITERS, list(LAYERS), writers, VOCAB)


@pytest.fixture(scope="module")
def written(world: Mixed, writers: list[Request]) -> dict[str, Bits]:
    """Answers of an engine that knows no branches."""
    return run(world.engine(branches=False), [writers])


@pytest.fixture(scope="module")
def dedicated(world: Mixed, judged: list[Request]) -> dict[str, Bits]:
    """Each decision alone on a cold cache, in an engine that does nothing else."""
    engine = world.engine()
    found: dict[str, Bits] = {}
    for one in judged[:ALONE]:
        engine.flush_cache()
        found |= run(engine, [[one]])
    return found


def test_loaded_but_idle_moves_no_bit(
    world: Mixed, writers: list[Request], written: dict[str, Bits]
) -> None:
    assert len(written) == WRITERS + WRITERS // 4
    assert run(world.engine(), interleaved(writers, [])) == written


@pytest.mark.parametrize("ratio", RATIOS)
def test_traffic_of_decisions_moves_no_bit_of_an_answer(
    world: Mixed,
    writers: list[Request],
    judged: list[Request],
    written: dict[str, Bits],
    dedicated: dict[str, Bits],
    ratio: int,
) -> None:
    found = run(world.engine(), interleaved(writers, judged[: ratio * WRITERS]))
    assert writes(found) == written
    others = decides(found)
    assert len(others) == ratio * WRITERS
    assert differ(others)
    asked = {name: answer for name, answer in dedicated.items() if name in others}
    assert asked
    assert {name: others[name] for name in asked} == asked


def test_decisions_alone_are_those_of_a_crowd_of_them(
    world: Mixed, judged: list[Request], dedicated: dict[str, Bits]
) -> None:
    """An engine that serves the branches only, all at once; another in small chunks."""
    small: dict[str, Any] = {"max_step_tokens": 16, "max_chunk_tokens": 7}
    for settings in ({}, small):
        found = run(world.engine(**settings), [judged[:ALONE]])
        assert found == dedicated


def test_a_gated_answer_is_the_ungated_one(world: Mixed, writers: list[Request]) -> None:
    """Decision and answer from one prefill are those of two requests."""
    opened, gates = check_gates(world, writers[:4])
    assert 0 < opened < gates == len(LAYERS) * 4


def test_sums_that_follow_the_batch_are_caught(
    writers: list[Request], judged: list[Request], tmp_path: Path
) -> None:
    """The control: traffic moves answers, and company moves decisions."""
    world = place(torch.bfloat16, RowSplitBackend(), tmp_path)
    expected = run(world.engine(branches=False), [[writers[0]], [], [], []])
    found = run(world.engine(), interleaved(writers[:8], judged[:16]))
    assert {name: found[name] for name in expected} != expected
    alone = run(world.engine(), [[judged[0]]])
    assert {name: found[name] for name in alone} != alone
