"""Decode steps from static buffers: same answers as eager steps, and padding stores nothing.

A capture that runs the function again stands in for a CUDA graph, so that buffers,
buckets and padding are tested without a GPU; `tests/gpu/test_graphs.py` has the real one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lockstep.kernels.cpu import make_backend
from lockstep.model import load_model
from lockstep.runner.graphs import Captured
from lockstep.runner.groups import own_groups
from lockstep.runner.runner import Runner
from lockstep.types import Request
from tests.engine.harness import request
from tests.engine.test_bits import answers
from tests.model.branches import describe
from tests.model.tiny import build_oracle, save


class Rerun:
    """Counts captures and replays; the first output tensor is written anew by each replay."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(self, function: Callable[[], Tensor]) -> Captured:
        self.captures += 1
        output = function()

        def replay() -> None:
            self.replays += 1
            output.copy_(function())

        return Captured(replay, output, 1)


def work(count: int) -> list[Request]:
    return [
        request(
            f"r{i}", [(7 * i + j * j) % 131 for j in range(3 + 5 * i)], 6 + i % 3,
            temperature=(0.0, 0.9)[i % 2], seed=i, logprobs=(None, 2)[i % 3 == 0],
        )
        for i in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stops", [(), (1, 2)], ids=["whole", "cut"])
def test_steps_from_static_buffers_have_the_same_bits(
    tmp_path: Path, name: str, dtype: torch.dtype, stops: tuple[int, ...]
) -> None:
    backend = make_backend("native", 1)
    model = load_model(save(build_oracle(name), tmp_path), backend, dtype)
    capture = Rerun()
    branches = [describe(fork=0, exit=stop) for stop in stops]
    runner = Runner(
        model, backend, memory_bytes=4 << 20, max_sequences=16, capture=capture, branches=branches
    )
    assert len(own_groups(runner.groups)) > len(model.groups) or not stops
    eager = Runner(model, backend, memory_bytes=4 << 20)
    expected, _ = answers(eager, work(11), together=True)
    for together in (True, False):
        found, _ = answers(runner, work(11), together=together)
        assert found == expected
    assert capture.replays > 20
    assert capture.captures >= 3


def test_capture_and_padding_touch_no_page(tmp_path: Path) -> None:
    backend = make_backend("native", 1)
    model = load_model(save(build_oracle("llama"), tmp_path), backend, torch.float32)
    runner = Runner(model, backend, memory_bytes=1 << 20, max_sequences=16, capture=Rerun())
    runner._pool.fill_(7.0)
    runner.warm_up()
    assert bool((runner._pool == 7.0).all())
