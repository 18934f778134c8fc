"""Judge and writer in one engine on the GPU, in Qwen3-8B's shape: neither moves the other by a bit.

As `tests/engine/test_branch_promise.py`, with 512 answers among up to 4,096 decisions.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.random_model import random_model
from bench.shapes import QWEN3_8B
from lockstep.kernels.contract import Backend, Weight
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
CHECKED = 40  # decisions that are computed alone
POOL = 6 << 30

pytestmark = pytest.mark.timeout(600)  # the first steps of every shape compile


def place(backend: Backend, folder: Path) -> Mixed:
    model = random_model(QWEN3_8B, backend)
    return mixed(model, backend, folder, LAYERS, context=256, pool=POOL, page_tokens=64)


def answers(
    world: Mixed, arrivals: Sequence[Sequence[Request]], *, branches: bool = True
) -> dict[str, Bits]:
    """Those of an engine of their own, whose memory is given back: engines and their graphs
    refer to each other."""
    found = run(world.engine(branches=branches), arrivals)
    gc.collect()
    torch.cuda.empty_cache()
    return found


def test_neither_moves_the_other(gpu: Backend, tmp_path: Path) -> None:
    """One test, so that one process holds one model, however many run the tests."""
    world = place(gpu, tmp_path)
    writers = generation(WRITERS, VOCAB, LONGEST, new=8)
    judged = decisions(max(RATIOS) * WRITERS, list(LAYERS), writers, VOCAB)
    written = answers(world, [writers], branches=False)
    assert differ(written)
    assert answers(world, interleaved(writers, [])) == written, "branches loaded but idle"

    alone: dict[str, Bits] = {}
    engine = world.engine()
    for one in judged[:CHECKED]:
        engine.flush_cache()
        alone |= run(engine, [[one]])
    for ratio in RATIOS:
        found = answers(world, interleaved(writers, judged[: ratio * WRITERS]))
        assert writes(found) == written, f"answers among {ratio} decisions each"
        others = decides(found)
        assert len(others) == ratio * WRITERS
        assert differ(others)
        assert {name: others[name] for name in alone} == alone, "decisions among answers"

    opened, gates = check_gates(world, writers[:48])
    assert 0 < opened < gates


def test_the_control_moves(gpu: Backend, tmp_path: Path) -> None:
    """With cuBLAS for two of the products, traffic moves answers."""

    class Swapped(type(gpu)):  # type: ignore[misc]
        def linear(
            self,
            x: Tensor,
            weight: Weight,
            bias: Tensor | None = None,
            residual: Tensor | None = None,
        ) -> Tensor:
            out = torch.nn.functional.linear(x, weight.data, bias)
            return out if residual is None else residual + out

    world = place(Swapped(gpu.device), tmp_path)
    writers = generation(64, VOCAB, LONGEST, new=8)
    judged = decisions(256, list(LAYERS), writers, VOCAB)
    expected = answers(world, [[one] for one in writers[:16]], branches=False)
    found = answers(world, interleaved(writers, judged))
    assert {name: found[name] for name in expected} != expected
