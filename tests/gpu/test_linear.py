"""Products on the GPU: a row's bits know nothing of the batch, the tile or the slices' schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.kernels import exact, reference, tree
from lockstep.kernels.contract import Backend
from tests.kernels.support import DTYPES, randn, same_bits

COUNTS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 128, 129, 200, 255, 256, 257, 300)
SHAPES = [(576, 576), (960, 576), (3072, 576), (576, 1536), (1000, 640), (4096, 4096), (3000, 1024)]


def places_that_move(operation: Callable[..., Tensor], x: Tensor, *others: Tensor) -> list[str]:
    """Where some row's bits differ from those it has in the whole batch."""
    whole = operation(x, *others)
    found = []
    for count in COUNTS:
        if not same_bits(operation(*(t[:count] for t in (x, *others))), whole[:count]):
            found.append(f"first {count}")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1)).to(x.device)
    if not same_bits(operation(*(t[order].contiguous() for t in (x, *others))), whole[order]):
        found.append("permuted")
    for row in (0, 1, 17, 63, 128, 299):
        if not same_bits(
            operation(*(t[row : row + 1] for t in (x, *others))), whole[row : row + 1]
        ):
            found.append(f"row {row} alone")
    big = torch.cat([x] * 4)
    if not same_bits(operation(big, *(torch.cat([t] * 4) for t in others))[-len(x) :], whole):
        found.append("last of 1200")
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_rows_do_not_move(gpu: Backend, n: int, k: int, dtype: torch.dtype) -> None:
    x = randn(300, k, dtype=dtype).cuda()
    residual = randn(300, n, dtype=dtype, seed=2).cuda()
    bias = randn(n, dtype=dtype, seed=3).cuda()
    weight = gpu.pack(randn(n, k, dtype=dtype, seed=1))
    gated = gpu.pack_gated(randn(n, k, dtype=dtype, seed=4), randn(n, k, dtype=dtype, seed=5))
    assert not places_that_move(lambda a: gpu.linear(a, weight), x)
    assert not places_that_move(lambda a, r: gpu.linear(a, weight, bias, r), x, residual)
    assert not places_that_move(lambda a: gpu.logits(a, weight), x)
    assert not places_that_move(lambda a: gpu.gated_linear(a, gated, "silu"), x)
    assert not places_that_move(lambda a: gpu.gated_linear(a, gated, "gelu_tanh"), x)


def test_the_control_moves(control: Backend) -> None:
    moved = []
    for dtype in DTYPES:
        for n, k in SHAPES:
            x, weight = (
                randn(300, k, dtype=dtype).cuda(),
                control.pack(randn(n, k, dtype=dtype, seed=1)),
            )
            moved += places_that_move(lambda a, w=weight: control.linear(a, w), x)
    assert moved, "cuBLAS passed: this test cannot fail"


def tiles(gated: bool) -> list[Any]:
    from lockstep.kernels.cuda.tuning import Tile

    plain = [
        Tile(16, 16, 128, 4, 4), Tile(16, 32, 64, 4, 3), Tile(16, 64, 256, 4, 3),
        Tile(32, 64, 128, 4, 4), Tile(64, 32, 128, 4, 3), Tile(64, 64, 64, 4, 4),
        Tile(64, 128, 64, 8, 3), Tile(128, 64, 64, 4, 4), Tile(128, 128, 32, 8, 3),
    ]  # fmt: skip
    bulk = [
        Tile(16, 32, 128, 4, 4, True), Tile(64, 64, 64, 4, 4, True), Tile(64, 128, 64, 4, 4, True),
        Tile(128, 128, 64, 8, 3, True), Tile(128, 128, 64, 4, 3, True),
    ]  # fmt: skip
    return plain + bulk + ([] if gated else [Tile(128, 256, 64, 8, 3, True)])


@pytest.mark.parametrize(("n", "k"), [(576, 1536), (1000, 640), (4096, 4096)])
@pytest.mark.parametrize("slices", [1, 2, 4])
def test_no_tile_moves_a_bit(
    gpu: Backend, monkeypatch: pytest.MonkeyPatch, n: int, k: int, slices: int
) -> None:
    from lockstep.kernels.cuda import linear as ops

    monkeypatch.setattr(tree, "k_slices", lambda kind, n, k: slices)
    x = randn(300, k, dtype=torch.bfloat16).cuda()
    residual = randn(300, n, dtype=torch.bfloat16, seed=2).cuda()
    weight = gpu.pack(randn(n, k, dtype=torch.bfloat16, seed=1))
    expected = ops.linear(x, weight, None, residual)
    for tile in tiles(gated=False):
        for split in (False, True):
            if slices > 1 and tile.n == 256:
                continue  # two accumulators do not fit
            out = ops.linear(x, weight, None, residual, tile=tile, split=split)
            assert same_bits(out, expected), (tile, split)
    f = n // 2
    gated = gpu.pack_gated(weight.data[:f], weight.data[f:])
    expected = ops.gated_linear(x, gated, "silu")
    for tile in tiles(gated=True):
        if slices > 1 and tile.bulk and tile.warps == 4 and tile.m == 128:
            continue
        assert same_bits(ops.gated_linear(x, gated, "silu", tile=tile), expected), tile


# Rows, stored rows of the weight in a strip, strips, inputs of a stage, warps.
STREAMS = [
    (16, 16, 1, 256, 4), (16, 32, 1, 256, 4), (16, 16, 3, 256, 4), (16, 64, 2, 128, 4),
    (16, 64, 3, 128, 4), (64, 32, 1, 128, 4), (64, 128, 1, 128, 4), (64, 64, 3, 128, 4),
    (128, 32, 1, 64, 4), (128, 64, 1, 64, 4), (128, 128, 1, 64, 8), (128, 64, 3, 64, 8),
    (256, 64, 3, 64, 8),
]  # fmt: skip


@pytest.mark.parametrize("k", [256, 1024, 4096])
@pytest.mark.parametrize("shape", STREAMS)
def test_streams_have_the_bits_of_tiles(
    gpu: Backend, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int, int, int], k: int
) -> None:
    """Every shape of a streaming program, launched and captured behind what it reads."""
    from lockstep.kernels.cuda import linear as ops
    from lockstep.kernels.cuda import stream
    from lockstep.kernels.cuda.tuning import Tile

    n, tile = 1536, Tile(16, 32, 64, 4, 3)
    monkeypatch.setattr(stream, "choose", lambda rows, *weight: stream.Stream(*shape))
    weight = gpu.pack(randn(n, k, dtype=torch.bfloat16))
    gated = gpu.pack_gated(*(randn(n, k, dtype=torch.bfloat16, seed=s) for s in (1, 2)))
    back = gpu.pack(randn(k, n, dtype=torch.bfloat16, seed=6))
    ragged = gpu.pack(randn(1500, k, dtype=torch.bfloat16, seed=7))
    bias = randn(n, seed=3).cuda()
    for rows in (1, shape[0] // 2 + 1, shape[0], 2 * shape[0] + 5):
        x = randn(rows, k, dtype=torch.bfloat16, seed=rows).cuda()
        residual = randn(rows, n, dtype=torch.bfloat16, seed=5).cuda()

        def calls(x: Tensor, tile: Tile | None, residual: Tensor = residual) -> list[Tensor]:
            """The last three read what the first has just written."""
            first = ops.linear(x, weight, bias, residual, tile=tile)
            again = ops.linear(first, back, tile=tile)
            return [
                first,
                again,
                ops.logits(again, ragged, tile=tile),
                ops.gated_linear(again, gated, "silu", tile=tile),
                ops.gated_linear(again, gated, "gelu_tanh", tile=tile),
            ]

        expected = calls(x, tile)
        assert all(same_bits(*pair) for pair in zip(calls(x, None), expected, strict=True)), rows
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = calls(x, None)
        for _ in range(3):
            for out in found:
                out.fill_(float("nan"))
            graph.replay()
            assert all(same_bits(*pair) for pair in zip(found, expected, strict=True)), rows


@pytest.mark.parametrize("slices", [2, 4])
def test_slices_add_ascending(gpu: Backend, monkeypatch: pytest.MonkeyPatch, slices: int) -> None:
    k = 1536
    x = randn(40, k, dtype=torch.bfloat16).cuda()
    w = randn(576, k, dtype=torch.bfloat16, seed=1).cuda()
    length = tree.slice_length(k, slices)
    parts = [
        gpu.logits(x[:, b : b + length].contiguous(), gpu.pack(w[:, b : b + length]))
        for b in range(0, k, length)
    ]
    expected = parts[0]
    for part in parts[1:]:
        expected = expected + part
    monkeypatch.setattr(tree, "k_slices", lambda kind, n, k: slices)
    assert same_bits(gpu.logits(x, gpu.pack(w)), expected)


@pytest.mark.parametrize("rows", [1, 20, 70])
def test_float32_equals_the_spelled_out_tree(gpu: Backend, rows: int) -> None:
    x, w = randn(rows, 576), randn(70, 576, seed=1)
    expected = reference.product(x, w, "")
    weight = gpu.pack(w)
    assert same_bits(gpu.logits(x.cuda(), weight).cpu(), expected)
    assert same_bits(gpu.linear(x.cuda(), weight).cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 33, 300])
def test_values_and_epilogues(gpu: Backend, rows: int, dtype: torch.dtype) -> None:
    x, w = randn(rows, 640, dtype=dtype).cuda(), randn(1000, 640, dtype=dtype, seed=1).cuda()
    weight = gpu.pack(w)
    acc = gpu.logits(x, weight)
    torch.testing.assert_close(acc.double(), x.double() @ w.double().T, rtol=1e-4, atol=1e-3)
    bias, residual = randn(1000, seed=2).cuda(), randn(rows, 1000, dtype=dtype, seed=3).cuda()
    want = (acc + bias).to(dtype)
    want = (residual.float() + want.float()).to(dtype)
    assert same_bits(gpu.linear(x, weight, bias, residual), want)
    g, u = (t.contiguous().cpu() for t in acc.to(dtype).float().chunk(2, dim=1))
    gated = gpu.pack_gated(w[:500], w[500:])
    for activation, function in (("silu", exact.silu), ("gelu_tanh", exact.gelu_tanh)):
        want = function(g, exact.fused).to(dtype).float() * u
        out = gpu.gated_linear(x, gated, activation).cpu()
        step = 2**-7 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(out.float(), want, rtol=step, atol=10 * step)
