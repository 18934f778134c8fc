"""Judge and writer in one engine on the GPU, in Qwen3-8B's shape: neither moves the other by a bit.

As `tests/engine/test_branch_promise.py`, with 512 answers among up to 4,096 decisions.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.random_model import random_model
from bench.shapes import QWEN3_8B
from lockstep.kernels.contract import Backend, Weight
from lockstep.kernels.cuda import make_backend
from lockstep.types import Request
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

LAYERS = {"suffix": (32, 36), "context": (20, 24), "suffix-low": (20, 24)}
VOCAB = QWEN3_8B["vocab_size"]
WRITERS, LONGEST = 512, 90
RATIOS = (1, 8)
CHECKED = 60  # decisions that are computed alone


def place(backend: Backend, folder: Path) -> Mixed:
    model = random_model(QWEN3_8B, backend)
    return mixed(model, backend, folder, LAYERS, context=256, pool=12 << 30, page_tokens=64)


@pytest.fixture(scope="module")
def world(gpu: Backend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixed]:
    yield place(gpu, tmp_path_factory.mktemp("branches"))
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def writers() -> list[Request]:
    return generation(WRITERS, VOCAB, LONGEST, new=8)


@pytest.fixture(scope="module")
def judged(writers: list[Request]) -> list[Request]:
    return decisions(max(RATIOS) * WRITERS, list(LAYERS), writers, VOCAB)


@pytest.fixture(scope="module")
def written(world: Mixed, writers: list[Request]) -> dict[str, Bits]:
    """Answers of an engine that knows no branches."""
    return run(world.engine(branches=False), [writers])


def test_loaded_but_idle_moves_no_bit(
    world: Mixed, writers: list[Request], written: dict[str, Bits]
) -> None:
    assert run(world.engine(), interleaved(writers, [])) == written


@pytest.mark.parametrize("ratio", RATIOS)
def test_traffic_of_decisions_moves_no_bit(
    world: Mixed,
    writers: list[Request],
    judged: list[Request],
    written: dict[str, Bits],
    ratio: int,
) -> None:
    """Of the answers; and decisions are those of an engine that does nothing else."""
    found = run(world.engine(), interleaved(writers, judged[: ratio * WRITERS]))
    assert writes(found) == written
    others = decides(found)
    assert len(others) == ratio * WRITERS
    assert differ(others)
    engine = world.engine()
    for one in judged[:CHECKED]:
        engine.flush_cache()
        ((name, alone),) = run(engine, [[one]]).items()
        assert others[name] == alone, name


def test_a_gated_answer_is_the_ungated_one(world: Mixed, writers: list[Request]) -> None:
    opened, gates = check_gates(world, writers[:64])
    assert 0 < opened < gates


def test_the_control_moves(gpu: Backend, writers: list[Request], tmp_path: Path) -> None:
    """With cuBLAS for two of the products, traffic moves answers."""

    class Swapped(type(make_backend("cuda"))):  # type: ignore[misc]
        def linear(
            self,
            x: Tensor,
            weight: Weight,
            bias: Tensor | None = None,
            residual: Tensor | None = None,
        ) -> Tensor:
            out = torch.nn.functional.linear(x, weight.data, bias)
            return out if residual is None else residual + out

    control = place(Swapped(gpu.device), tmp_path)
    few = writers[:64]
    expected = run(control.engine(branches=False), [[one] for one in few[:16]])
    judged = decisions(256, list(LAYERS), few, VOCAB)
    found = run(control.engine(), interleaved(few, judged))
    assert {name: found[name] for name in expected} != expected
