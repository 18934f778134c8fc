"""LoRA on single rows: bits that no neighbour, grouping, split or thread moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.kernels import reference
from lockstep.kernels.contract import Backend, LoraPair, LoraRows, LoraSet, Weight
from tests.control import RowSplitBackend
from tests.kernels.support import DTYPES, FORMS, backend, isa, randn, same_bits


@dataclass(frozen=True)
class Adapted:
    """A linear with a fused part or a gated pair, and some adapters for it."""

    weight: Tensor
    pairs: tuple[tuple[LoraPair, ...], ...]
    gated: bool

    @property
    def width(self) -> int:
        return self.weight.shape[0] // (2 if self.gated else 1)

    def packed(self, ops: Backend) -> tuple[Weight, LoraSet]:
        n = self.weight.shape[0]
        weights = [ops.pack_lora(p, n, gated=self.gated) if p else None for p in self.pairs]
        packed = ops.pack_gated(*self.weight.chunk(2)) if self.gated else ops.pack(self.weight)
        return packed, ops.lora_set(weights)


def adapted(
    n: int, k: int, ranks: Sequence[Sequence[int]], dtype: torch.dtype, gated: bool = False
) -> Adapted:
    """Adapters of the given ranks, one pair for each of as many parts of the n outputs."""
    pairs = []
    for i, of_adapter in enumerate(ranks):
        step = n // max(1, len(of_adapter))
        pairs.append(
            tuple(
                LoraPair(
                    a=randn(rank, k, dtype=dtype, seed=10 * i + p) * k**-0.5,
                    b=randn(step if p < 2 else n - 2 * step, rank, dtype=dtype, seed=50 + i + p)
                    * max(rank, 1) ** -0.5,
                    scale=(1.0, 2.0, 0.75)[i % 3],
                    begin=p * step,
                )
                for p, rank in enumerate(of_adapter)
                if rank
            )
        )
    return Adapted(randn(n, k, dtype=dtype, seed=1) * k**-0.5, tuple(pairs), gated)


def rows_of(index: Sequence[int], adapters: LoraSet) -> LoraRows:
    return LoraRows(torch.tensor(index, dtype=torch.int32), adapters)


def everything(
    ops: Backend, it: Adapted, x: Tensor, residual: Tensor, index: Sequence[int]
) -> list[Tensor]:
    """All forms of the operations on one linear."""
    weight, adapters = it.packed(ops)
    lora = rows_of(index, adapters)
    if it.gated:
        return [ops.adapted_gated_linear(x, weight, lora, kind) for kind in ("silu", "gelu_tanh")]
    bias = randn(it.width, seed=7)
    return [
        ops.adapted_linear(x, weight, lora),
        ops.adapted_linear(x, weight, lora, bias=bias),
        ops.adapted_linear(x, weight, lora, residual=residual),
        ops.adapted_linear(x, weight, lora, bias=bias.to(x.dtype), residual=residual),
    ]


def without(ops: Backend, it: Adapted, x: Tensor, residual: Tensor) -> list[Tensor]:
    """The same without adapters."""
    weight, _ = it.packed(ops)
    if it.gated:
        return [ops.gated_linear(x, weight, kind) for kind in ("silu", "gelu_tanh")]
    bias = randn(it.width, seed=7)
    return [
        ops.linear(x, weight),
        ops.linear(x, weight, bias=bias),
        ops.linear(x, weight, residual=residual),
        ops.linear(x, weight, bias=bias.to(x.dtype), residual=residual),
    ]


CASES = [
    (7, 5, ((1,), (3,)), False),
    (40, 64, ((8,), (), (16,), (5,)), False),
    (96, 33, ((4, 0, 2), (0, 12, 0), (64, 1, 9)), False),
    (130, 128, ((20, 16), (0, 7)), True),
    (64, 48, ((16, 16),), True),
]


@given(data=st.data())
@settings(max_examples=40)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMS)
def test_mixed_adapters_permuted_split_and_among_strangers(
    name: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    ops = backend(name)
    n, k, ranks, gated = data.draw(st.sampled_from(CASES))
    it = adapted(n, k, ranks, dtype, gated)
    rows = data.draw(st.integers(1, 40))
    index = data.draw(st.lists(st.integers(-1, len(ranks) - 1), min_size=rows, max_size=rows))
    if data.draw(st.booleans()):
        index.sort()  # long stretches, as the engine sends them
    order = data.draw(st.permutations(range(rows)))
    cut = data.draw(st.integers(0, rows))
    strangers = data.draw(st.lists(st.integers(-1, len(ranks) - 1), max_size=20))
    seed = data.draw(st.integers(0, 100))
    x = randn(rows, k, dtype=dtype, seed=seed)
    residual = randn(rows, it.width, dtype=dtype, seed=seed + 2)

    whole = everything(ops, it, x, residual, index)
    moved = everything(ops, it, x[order], residual[order], [index[i] for i in order])
    others = torch.full((len(strangers), k), float("nan"), dtype=dtype)
    beside = residual.new_zeros(len(strangers), it.width)
    among = everything(
        ops,
        it,
        torch.cat([others, x, others]),
        torch.cat([beside, residual, beside]),
        [*strangers, *index, *strangers],
    )
    for expected, other, crowded in zip(whole, moved, among, strict=True):
        assert same_bits(other, expected[order])
        assert same_bits(crowded[len(strangers) : len(strangers) + rows], expected)
    first = everything(ops, it, x[:cut].contiguous(), residual[:cut], index[:cut])
    second = everything(ops, it, x[cut:].contiguous(), residual[cut:], index[cut:])
    for expected, one, two in zip(whole, first, second, strict=True):
        assert same_bits(torch.cat([one, two]), expected)
    bare = [row for row, adapter in enumerate(index) if adapter < 0 or not it.pairs[adapter]]
    for expected, plain in zip(whole, without(ops, it, x, residual), strict=True):
        assert same_bits(expected[bare], plain[bare])


@given(rank=st.integers(1, 64), rows=st.integers(1, 20), seed=st.integers(0, 1000))
@settings(max_examples=12)
@pytest.mark.parametrize("dtype", DTYPES)
def test_native_equals_the_spelled_out_tree(
    dtype: torch.dtype, rank: int, rows: int, seed: int
) -> None:
    for n, k, ranks, gated in (
        (70, 31, ((rank,), (1, 0, rank)), False),
        (90, 16, ((0, rank),), True),
    ):
        it = adapted(n, k, ranks, dtype, gated)
        x = randn(rows, k, dtype=dtype, seed=seed)
        residual = randn(rows, it.width, dtype=dtype, seed=seed + 1)
        index = [(seed + row // 3) % (len(ranks) + 1) - 1 for row in range(rows)]
        found = everything(backend("native"), it, x, residual, index)
        pairs = it.pairs
        if gated:
            gate, up = it.weight.chunk(2)
            expected = [
                reference.adapted_gated_linear(x, gate, up, index, pairs, kind, isa())
                for kind in ("silu", "gelu_tanh")
            ]
        else:
            bias = randn(it.width, seed=7)
            expected = [
                reference.adapted_linear(x, it.weight, index, pairs, isa(), *rest)
                for rest in (
                    (None, None),
                    (bias, None),
                    (None, residual),
                    (bias.to(dtype), residual),
                )
            ]
        for mine, wanted in zip(found, expected, strict=True):
            assert same_bits(mine, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_native_bits_do_not_depend_on_threads(dtype: torch.dtype) -> None:
    it = adapted(576, 576, ((16, 0, 16), (8, 8, 8)), dtype)
    x, residual = randn(60, 576, dtype=dtype), randn(60, 576, dtype=dtype, seed=2)
    index = [-1] * 20 + [0] * 25 + [1] * 15
    one, *more = (everything(backend("native", t), it, x, residual, index) for t in (1, 2, 3))
    for other in more:
        assert all(same_bits(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", FORMS)
def test_a_row_without_adapter_keeps_its_negative_zero(name: str) -> None:
    """A sum that underflows to -0 stays -0: nothing is added to it, not even zero."""
    ops, tiny = backend(name), 2.0**-140
    weight = ops.pack(torch.full((4, 1), -tiny))
    pair = LoraPair(torch.zeros(2, 1), torch.zeros(2, 2), begin=1)
    adapters = ops.lora_set([ops.pack_lora([pair], 4)])
    x = torch.full((2, 1), tiny)
    plain = ops.linear(x, weight, residual=torch.full((2, 4), -0.0))
    out = ops.adapted_linear(
        x, weight, rows_of([-1, 0], adapters), residual=torch.full((2, 4), -0.0)
    )
    assert same_bits(out[0], plain[0])
    assert same_bits(out[1, [0, 3]], plain[1, [0, 3]])  # outputs outside the adapter's pair


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*FORMS, "plain"])
def test_values_against_merged_weights(name: str, dtype: torch.dtype) -> None:
    """Ranks 8, 32 and 4 side by side, each as with its own merged weight, in float64."""
    ops = backend(name)
    it = adapted(120, 96, ((8, 8, 8), (32,), (0, 4, 0)), dtype)
    index = [i % 4 - 1 for i in range(30)]
    x = randn(30, 96, dtype=dtype)
    weight, adapters = it.packed(ops)
    out = ops.adapted_linear(x, weight, rows_of(index, adapters))
    step = 2.0**-7 if dtype == torch.bfloat16 else 1e-5
    for row, adapter in enumerate(index):
        merged = it.weight.double()
        for pair in it.pairs[adapter] if adapter >= 0 else ():
            end = pair.begin + pair.b.shape[0]
            merged[pair.begin : end] += pair.scale * (pair.b.double() @ pair.a.double())
        torch.testing.assert_close(
            out[row].double(), x[row].double() @ merged.T, rtol=step, atol=4 * step
        )


def moved_rows(ops: Backend, dtype: torch.dtype) -> bool:
    """Whether some row's bits change when fewer rows share the launch."""
    it = adapted(576, 576, ((16, 16, 16), (8,)), dtype)
    x, residual = randn(100, 576, dtype=dtype), randn(100, 576, dtype=dtype, seed=2)
    index = [row % 3 - 1 for row in range(100)]
    whole = everything(ops, it, x, residual, index)
    for count in (1, 2, 3, 8, 33):
        part = everything(ops, it, x[:count].contiguous(), residual[:count], index[:count])
        if not all(same_bits(a, b[:count]) for a, b in zip(part, whole, strict=True)):
            return True
    return False


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_split_that_follows_the_rows_fails_here(dtype: torch.dtype) -> None:
    assert moved_rows(RowSplitBackend(), dtype)
    assert not moved_rows(backend("native"), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_control_without_trees_fails_here(dtype: torch.dtype) -> None:
    if not moved_rows(backend("plain"), dtype):
        pytest.skip(f"torch {torch.__version__} moves no bit of these {dtype} products here")


@pytest.mark.parametrize("name", [*FORMS, "plain"])
def test_what_does_not_fit_is_refused(name: str) -> None:
    ops = backend(name)

    def pair(rank: int = 2, n: int = 4, k: int = 6, begin: int = 0) -> LoraPair:
        return LoraPair(torch.zeros(rank, k), torch.zeros(n, rank), begin=begin)

    with pytest.raises(ValueError, match="at least one pair"):
        ops.pack_lora([], 8)
    with pytest.raises(ValueError, match=r"outputs 3 \.\. 7 overlaps"):
        ops.pack_lora([pair(), pair(begin=3)], 8)
    with pytest.raises(ValueError, match=r"outputs 6 \.\. 10"):
        ops.pack_lora([pair(begin=6)], 8)
    with pytest.raises(ValueError, match="halves"):
        ops.pack_lora([pair(begin=2)], 8, gated=True)
    with pytest.raises(ValueError, match="share K"):
        ops.pack_lora([pair(), pair(k=5, begin=4)], 8)
    with pytest.raises(ValueError, match="needs a"):
        ops.pack_lora([LoraPair(torch.zeros(2, 6), torch.zeros(4, 3))], 8)
    one, other = ops.pack_lora([pair()], 8), ops.pack_lora([pair()], 9)
    with pytest.raises(ValueError, match="one linear"):
        ops.lora_set([one, None, other])
    adapters = ops.lora_set([one])
    x, weight = torch.zeros(2, 6), ops.pack(torch.zeros(9, 6))
    with pytest.raises(ValueError, match="LoRA is for a linear"):
        ops.adapted_linear(x, weight, rows_of([0, 0], adapters))
    weight = ops.pack(torch.zeros(8, 6))
    with pytest.raises(ValueError, match="index is for 3 rows"):
        ops.adapted_linear(x, weight, rows_of([0, 0, 0], adapters))
    with pytest.raises(ValueError, match="LoRA index"):
        LoraRows(torch.zeros(2), adapters)
    assert ops.adapted_linear(x[:0], weight, rows_of([], adapters)).shape == (0, 8)


def test_native_refuses_an_adapter_that_is_not_there() -> None:
    ops = backend("native")
    it = adapted(8, 6, ((2,),), torch.float32)
    weight, adapters = it.packed(ops)
    for index in ([0, 1], [-2, 0]):
        with pytest.raises(ValueError, match="outside its 1 adapters"):
            ops.adapted_linear(torch.zeros(2, 6), weight, rows_of(index, adapters))
