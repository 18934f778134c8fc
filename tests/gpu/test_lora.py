"""LoRA on the GPU: a row's bits know nothing of the batch, the grouping or the tile."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lockstep.kernels.contract import Backend, LoraPair, LoraRows
from tests.kernels.support import DTYPES, randn, same_bits
from tests.kernels.test_lora import Adapted, adapted

ROWS = 300
COUNTS = (1, 2, 7, 8, 15, 16, 17, 33, 64, 65, 128, 129, 200, 255, 256, 257, 300)
# Outputs, inputs, ranks of each adapter's parts, gated: SmolLM2's and Qwen3-8B's layers.
SHAPES = [
    (960, 576, ((16, 0, 16), (5,), ()), False),
    (576, 1536, ((8,), (64,), (1,)), False),
    (3072, 576, ((16, 16), (0, 7)), True),
    (6144, 4096, ((16, 16, 16), (8, 0, 8)), False),
    (24576, 4096, ((16, 16), (32, 32)), True),
]
INDEX = [-1] * 100 + [0] * 90 + [1] * 60 + [row % 4 - 1 for row in range(50)]


class Operation:
    """One adapted linear on the device, as a function of rows and their adapters."""

    def __init__(self, ops: Backend, it: Adapted) -> None:
        self.ops, self.gated = ops, it.gated
        halves = [half.to(ops.device) for half in it.weight.chunk(2)]
        self.weight = ops.pack_gated(*halves) if it.gated else ops.pack(torch.cat(halves))
        n = it.weight.shape[0]
        self.adapters = ops.lora_set(
            [ops.pack_lora(pairs, n, gated=it.gated) if pairs else None for pairs in it.pairs]
        )
        self.bias = randn(it.width, seed=7).to(ops.device)

    def __call__(self, x: Tensor, index: Tensor, residual: Tensor) -> Tensor:
        lora = LoraRows(index.contiguous(), self.adapters)
        if self.gated:
            return self.ops.adapted_gated_linear(x, self.weight, lora, "silu")
        return self.ops.adapted_linear(x, self.weight, lora, self.bias, residual)

    def plain(self, x: Tensor, residual: Tensor) -> Tensor:
        if self.gated:
            return self.ops.gated_linear(x, self.weight, "silu")
        return self.ops.linear(x, self.weight, self.bias, residual)


def inputs(it: Adapted, adapters: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    index = torch.tensor([min(i, adapters - 1) for i in INDEX], dtype=torch.int32)
    x, residual = randn(ROWS, it.weight.shape[1], dtype=dtype), randn(ROWS, it.width, seed=2)
    return x.cuda(), index.cuda(), residual.to(dtype).cuda()


def places_that_move(run: Operation, *whole: Tensor) -> list[str]:
    """Where some row's bits differ from those it has in the whole batch."""
    expected, found = run(*whole), []
    for count in COUNTS:
        if not same_bits(run(*(t[:count] for t in whole)), expected[:count]):
            found.append(f"first {count}")
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1)).cuda()
    if not same_bits(run(*(t[order].contiguous() for t in whole)), expected[order]):
        found.append("permuted")
    for row in (0, 100, 189, 190, 251, 299):
        if not same_bits(run(*(t[row : row + 1] for t in whole)), expected[row : row + 1]):
            found.append(f"row {row} alone")
    if not same_bits(run(*(torch.cat([t] * 4) for t in whole))[-ROWS:], expected):
        found.append("last of 1200")
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k", "ranks", "gated"), SHAPES)
def test_rows_do_not_move(
    gpu: Backend, n: int, k: int, ranks: Sequence[Sequence[int]], gated: bool, dtype: torch.dtype
) -> None:
    it = adapted(n, k, ranks, dtype, gated)
    run, whole = Operation(gpu, it), inputs(it, len(ranks), dtype)
    assert not places_that_move(run, *whole)
    x, index, residual = whole
    bare = index < 0
    out, plain = run(*whole), run.plain(x, residual)
    assert same_bits(out[bare], plain[bare])
    changed = torch.tensor([i >= 0 and bool(it.pairs[i]) for i in index.tolist()]).cuda()
    assert bool((out[changed] != plain[changed]).any(1).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_and_parts_of_rows_do_not_move_bits(
    gpu: Backend, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lockstep.kernels.cuda import lora

    for n, k, ranks, gated in SHAPES[:3]:
        it = adapted(n, k, ranks, dtype, gated)
        run, (x, index, _) = Operation(gpu, it), inputs(it, len(ranks), dtype)
        rows = LoraRows(index, run.adapters)
        forms = []
        for tile, sums in ((16, 1 << 26), (32, 1 << 26), (64, 1 << 26), (16, 1)):
            monkeypatch.setattr(lora, "_MOST_SUMS", sums)
            if gated:
                form = lora.adapted_gated_linear(x, run.weight, rows, "silu", rows_per_tile=tile)
            else:
                form = lora.adapted_linear(x, run.weight, rows, None, None, rows_per_tile=tile)
            forms.append(form)
        assert all(same_bits(form, forms[0]) for form in forms[1:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_against_float64(gpu: Backend, dtype: torch.dtype) -> None:
    """Sums against the base product's own, so that only the delta's error is seen."""
    for n, k, ranks, gated in SHAPES[:2]:
        it = adapted(n, k, ranks, dtype, gated)
        run, (x, index, _) = Operation(gpu, it), inputs(it, len(ranks), dtype)
        lora = LoraRows(index, run.adapters)
        out = gpu.adapted_linear(x, run.weight, lora).double().cpu()
        wanted = x.double().cpu() @ it.weight.double().T
        for row, adapter in enumerate(index.tolist()):
            for pair in it.pairs[adapter] if adapter >= 0 else ():
                end = pair.begin + pair.b.shape[0]
                t = x[row].double().cpu() @ pair.a.double().T
                wanted[row, pair.begin : end] += pair.scale * (t @ pair.b.double().T)
        step = 2.0**-7 if dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(out, wanted, rtol=step, atol=4 * step)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_of_a_pair_is_the_tree_of_a_linear(gpu: Backend, dtype: torch.dtype) -> None:
    """t is `linear` by a, delta is `logits` by b: the same tree as anywhere else."""
    k, n, rank = 640, 96, 24
    weight = randn(n, k, dtype=dtype, seed=1)
    a, b = randn(rank, k, dtype=dtype, seed=3) * k**-0.5, randn(n, rank, dtype=dtype, seed=4)
    x = randn(70, k, dtype=dtype).cuda()
    packed = gpu.pack(weight)
    adapters = gpu.lora_set([gpu.pack_lora([LoraPair(a, b)], n)])
    index = torch.zeros(70, dtype=torch.int32, device="cuda")
    t = gpu.linear(x, gpu.pack(a))
    wanted = (gpu.logits(x, packed) + gpu.logits(t, gpu.pack(b))).to(dtype)
    assert same_bits(gpu.adapted_linear(x, packed, LoraRows(index, adapters)), wanted)


def test_a_captured_graph_follows_its_index(gpu: Backend) -> None:
    """Launch sizes depend on the adapters, not on which rows have one."""
    n, k, ranks, gated = SHAPES[0]
    it = adapted(n, k, ranks, torch.bfloat16, gated)
    run, (x, index, residual) = Operation(gpu, it), inputs(it, len(ranks), torch.bfloat16)
    static = torch.full_like(index, -1)
    for _ in range(2):
        run(x, static, residual)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x, static, residual)
    for chosen in (index, index.flip(0), torch.full_like(index, -1)):
        static.copy_(chosen)
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(out, run(x, chosen, residual))


def test_the_control_moves(control: Backend) -> None:
    moved: list[str] = []
    for dtype in DTYPES:
        for n, k, ranks, gated in SHAPES[:4]:
            it = adapted(n, k, ranks, dtype, gated)
            moved += places_that_move(Operation(control, it), *inputs(it, len(ranks), dtype))
    assert moved, "cuBLAS passed: this test cannot fail"
