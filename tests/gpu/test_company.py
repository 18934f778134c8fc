"""Two processes on one card, in turns: products of few rows, eager and captured, keep their bits.

A process that has the card to itself never stops in the middle of a kernel. Two are put aside
and taken up again thousands of times a minute, so what only timing holds together comes apart.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection

import pytest
import torch

from lockstep.kernels.contract import Backend

SECONDS = 25
LAYERS = 4
ROWS = (1, 5, 16, 17, 40)  # on either side of the narrow products' sixteen


def _moved(seconds: float) -> tuple[int, int]:
    """(rounds, rounds of which any bit differs from the first) of a decode step's products."""
    from lockstep.kernels.cuda import make_backend

    backend = make_backend("cuda")
    source = torch.Generator("cuda").manual_seed(3)

    def some(*shape: int) -> torch.Tensor:
        made = torch.randn(*shape, generator=source, device="cuda")
        return made.div_(float(shape[-1]) ** 0.5).to(torch.bfloat16)

    layers = [
        (
            backend.pack(some(6144, 4096)),
            backend.pack(some(4096, 4096)),
            backend.pack_gated(some(12288, 4096), some(12288, 4096)),
            backend.pack(some(4096, 12288)),
        )
        for _ in range(LAYERS)
    ]
    norm = torch.ones(4096, dtype=torch.bfloat16, device="cuda")

    def step(x: torch.Tensor) -> torch.Tensor:
        for qkv, out, up, down in layers:
            wide = backend.linear(backend.rms_norm(x, norm, 1e-6), qkv)
            x = backend.linear(wide[:, :4096].contiguous(), out, None, x)
            inner = backend.gated_linear(backend.rms_norm(x, norm, 1e-6), up, "silu")
            x = backend.linear(inner, down, None, x)
        return x

    inputs = [some(rows, 4096) * 64 for rows in ROWS]
    expected = [step(x) for x in inputs]
    graphs = []
    for x in inputs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = step(x)
        graphs.append((graph, y))
    bad = torch.zeros((), dtype=torch.int64, device="cuda")
    end, rounds = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        for x, (graph, y), wanted in zip(inputs, graphs, expected, strict=True):
            for _ in range(20):
                y.zero_()
                graph.replay()
                bad += (y != wanted).any()
            bad += (step(x) != wanted).any()
            rounds += 21
        torch.cuda.synchronize()  # else the host runs far ahead of the clock
    return rounds, int(bad)


def _beside(pipe: Connection) -> None:
    pipe.send("begun")
    pipe.send(_moved(SECONDS))


def test_products_of_two_processes(gpu: Backend) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("its products of few rows are not streamed")
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    other = spawn.Process(target=_beside, args=(theirs,), daemon=True)
    other.start()
    theirs.close()
    assert pipe.recv() == "begun"
    found = [_moved(SECONDS), pipe.recv()]
    other.join(60)
    assert all(rounds > 100 for rounds, _ in found), found
    assert all(moved == 0 for _, moved in found), found
