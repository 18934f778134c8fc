"""Products: bits that no neighbour, split, tile or thread moves; exact and float64 values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.kernels import reference
from tests.kernels.support import DTYPES, FORMS, backend, isa, moving_rows, randn, same_bits

SMOLLM2 = ((960, 576), (576, 576), (3072, 576), (576, 1536))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (100, 37), (33, 64), (576, 576), (64, 1536)])
def test_pack_keeps_every_value(name: str, n: int, k: int, dtype: torch.dtype) -> None:
    ops, weight = backend(name), randn(n, k, dtype=dtype)
    packed = ops.pack(weight)
    assert (packed.n, packed.k, packed.dtype) == (n, k, dtype)
    assert torch.equal(ops.unpack(packed), weight)
    pair = ops.pack_gated(weight, -weight)
    assert pair.n == 2 * n
    assert pair.gated
    assert torch.equal(ops.unpack(pair), torch.cat([weight, -weight]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("n", "k"), SMOLLM2)
def test_rows_of_a_model_shape_never_move(name: str, n: int, k: int, dtype: torch.dtype) -> None:
    ops = backend(name)
    packed = ops.pack(randn(n, k, dtype=dtype, seed=1))
    x = randn(64, k, dtype=dtype, seed=2)
    assert moving_rows(lambda rows: ops.linear(rows, packed), x, (2, 3, 5, 12, 13, 31, 64)) == set()


@given(data=st.data())
@settings(max_examples=40)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMS)
def test_batch_permutation_split_and_strangers(
    name: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    ops = backend(name)
    n, k = data.draw(st.sampled_from([(7, 5), (40, 64), (96, 33), (65, 128)]))
    rows = data.draw(st.integers(1, 40))
    order = data.draw(st.permutations(range(rows)))
    cut = data.draw(st.integers(0, rows))
    strangers = data.draw(st.integers(0, 20))
    seed = data.draw(st.integers(0, 100))
    x, weight = randn(rows, k, dtype=dtype, seed=seed), randn(n, k, dtype=dtype, seed=seed + 1)
    residual, bias = randn(rows, n, dtype=dtype, seed=seed + 2), randn(n, dtype=dtype, seed=seed)
    packed, pair = ops.pack(weight), ops.pack_gated(weight, weight.flip(0))
    others = torch.full((strangers, k), float("nan"), dtype=dtype)

    def everything(x: torch.Tensor, residual: torch.Tensor) -> list[torch.Tensor]:
        return [
            ops.linear(x, packed),
            ops.linear(x, packed, bias=bias),
            ops.linear(x, packed, residual=residual),
            ops.linear(x, packed, bias=bias.float(), residual=residual),
            ops.logits(x, packed),
            ops.gated_linear(x, pair, "silu"),
            ops.gated_linear(x, pair, "gelu_tanh"),
        ]

    expected = everything(x, residual)
    moved = everything(x[order].contiguous(), residual[order].contiguous())
    crowd = torch.cat([others, x, others]), torch.cat([residual.new_zeros(strangers, n), residual])
    padded = everything(crowd[0], torch.cat([crowd[1], residual.new_zeros(strangers, n)]))
    for whole, other, among in zip(expected, moved, padded, strict=True):
        assert same_bits(other, whole[order])
        assert same_bits(among[strangers : strangers + rows], whole)
    if 0 < cut < rows:
        halves = zip(
            everything(x[:cut].contiguous(), residual[:cut].contiguous()),
            everything(x[cut:].contiguous(), residual[cut:].contiguous()),
            strict=True,
        )
        for whole, (first, second) in zip(expected, halves, strict=True):
            assert same_bits(torch.cat([first, second]), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_native_bits_do_not_depend_on_threads(dtype: torch.dtype) -> None:
    x, residual = randn(37, 576, dtype=dtype), randn(37, 576, dtype=dtype, seed=3)
    weight = randn(576, 576, dtype=dtype, seed=1)
    results = []
    for threads in (1, 2, 3):
        ops = backend("native", threads)
        packed = ops.pack(weight)
        results.append(
            (
                ops.linear(x, packed, residual=residual),
                ops.logits(x, packed),
                ops.gated_linear(x, ops.pack_gated(weight, weight), "silu"),
            )
        )
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (19, 7), (48, 96), (65, 130)])
def test_native_equals_the_spelled_out_tree(n: int, k: int, dtype: torch.dtype) -> None:
    ops = backend("native")
    x, weight = randn(14, k, dtype=dtype), randn(n, k, dtype=dtype, seed=1)
    bias, residual = randn(n, seed=2), randn(14, n, dtype=dtype, seed=3)
    packed = ops.pack(weight)
    assert same_bits(ops.logits(x, packed), reference.product(x, weight, isa()))
    assert same_bits(
        ops.linear(x, packed, bias, residual),
        reference.linear(x, weight, isa(), bias, residual),
    )
    up = randn(n, k, dtype=dtype, seed=4)
    pair = ops.pack_gated(weight, up)
    for activation in ("silu", "gelu_tanh"):
        assert same_bits(
            ops.gated_linear(x, pair, activation),
            reference.gated_linear(x, weight, up, activation, isa()),
        )


def test_native_bfloat16_keeps_its_tree_at_the_edges_of_the_range() -> None:
    # Subnormals, overflow to infinity and cancellations: where the order within a
    # pair and the flushing of subnormals show.
    scales = torch.tensor([1e-38, 1e-20, 1e-3, 1.0, 1e18, 3e38]).repeat(8)
    x = (randn(9, 48) * scales).bfloat16()
    weight = (randn(33, 48, seed=1) * scales.flip(0)).bfloat16()
    ops = backend("native")
    assert same_bits(ops.logits(x, ops.pack(weight)), reference.product(x, weight, isa()))


def test_native_rounds_to_bfloat16_to_nearest_even_at_every_edge() -> None:
    # Subnormals, halves between neighbours, overflow, infinities and NaNs, by way of a bias
    # that is added to an exact zero; among ordinary values, and alone in their vector.
    edges = [0, 1, 0x8000, 0x7FFFFF, 0x800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x7F7F8000]
    edges += [0x7F7F7FFF, 0x7F800000, 0x7F800001, 0x7FC12345, 0x80000001, 0xFF7FFFFF, 0xFFC00000]
    bits = torch.tensor(edges).repeat_interleave(16)
    bits[1::16] = 0x3F800000
    edges_then_noise = torch.cat([bits, torch.randint(0, 2**32, (4096,))])
    wrapped = torch.where(edges_then_noise < 2**31, edges_then_noise, edges_then_noise - 2**32)
    bias = wrapped.to(torch.int32).view(torch.float32)
    ops, n = backend("native"), bias.shape[0]
    packed = ops.pack(torch.zeros(n, 2, dtype=torch.bfloat16))
    found = ops.linear(torch.zeros(1, 2, dtype=torch.bfloat16), packed, bias=bias)[0]
    expected = (bias + 0.0).to(torch.bfloat16)
    nan = bias.isnan()
    assert torch.equal(found[~nan].view(torch.int16), expected[~nan].view(torch.int16))
    assert torch.all(found[nan].view(torch.int16) == 0x7FC0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*FORMS, "plain"])
def test_values_against_float64(name: str, dtype: torch.dtype) -> None:
    ops = backend(name)
    x, weight = randn(23, 576, dtype=dtype), randn(130, 576, dtype=dtype, seed=1) * 0.05
    up = randn(130, 576, dtype=dtype, seed=2) * 0.05
    exact, other = reference.product64(x, weight), reference.product64(x, up)
    step = 2.0**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(
        ops.linear(x, ops.pack(weight)).double(), exact, rtol=step, atol=step
    )
    if name != "plain":  # the control rounds its logits
        torch.testing.assert_close(
            ops.logits(x, ops.pack(weight)).double(), exact, rtol=1e-4, atol=1e-4
        )
    for activation, function in (
        ("silu", torch.nn.functional.silu),
        ("gelu_tanh", lambda t: torch.nn.functional.gelu(t, approximate="tanh")),
    ):
        torch.testing.assert_close(
            ops.gated_linear(x, ops.pack_gated(weight, up), activation).double(),
            function(exact) * other,
            rtol=4 * step,
            atol=4 * step,
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMS)
def test_embedding_reads_rows_out_of_the_packed_table(name: str, dtype: torch.dtype) -> None:
    ops, table = backend(name), randn(77, 50, dtype=dtype)
    packed = ops.pack(table)
    ids = torch.tensor([0, 76, 3, 3, 33], dtype=torch.int32)
    assert torch.equal(ops.embedding(ids, packed), table[ids])
    scale = 50**0.5
    rounded = torch.tensor(scale, dtype=dtype)
    assert torch.equal(ops.embedding(ids, packed, scale), table[ids] * rounded)


@pytest.mark.parametrize("name", FORMS)
def test_extreme_inputs_stay_in_their_rows(name: str) -> None:
    ops = backend(name)
    packed = ops.pack(randn(40, 32))
    x = randn(6, 32, seed=1)
    clean = ops.linear(x, packed)
    x[1], x[3], x[4, 0] = float("nan"), float("inf"), 3e38
    dirty = ops.linear(x, packed)
    assert same_bits(dirty[[0, 2, 5]], clean[[0, 2, 5]])
    assert torch.isnan(dirty[1]).all()


@pytest.mark.parametrize("name", FORMS)
def test_operands_that_do_not_fit_are_refused(name: str) -> None:
    """The native form would read out of bounds, torch's would broadcast."""
    ops, x = backend(name), randn(2, 16)
    packed, pair = ops.pack(randn(8, 16)), ops.pack_gated(randn(8, 16), randn(8, 16))
    with pytest.raises(ValueError, match="x must be contiguous"):
        ops.linear(randn(2, 15), packed)
    with pytest.raises(ValueError, match="x must be contiguous"):
        ops.logits(randn(16, 2).T, packed)
    with pytest.raises(ValueError, match=r"x is torch.bfloat16, the weight no gated pair of torch"):
        ops.linear(x.bfloat16(), packed)
    with pytest.raises(ValueError, match="the weight a gated pair"):
        ops.linear(x, pair)
    with pytest.raises(ValueError, match="the weight no gated pair"):
        ops.gated_linear(x, packed, "silu")
    for wrong in (randn(3, 8), randn(1, 8), randn(2, 8).bfloat16()):
        with pytest.raises(ValueError, match="residual"):
            ops.linear(x, packed, residual=wrong)
    with pytest.raises(ValueError, match="bias"):
        ops.linear(x, packed, bias=randn(1))
    with pytest.raises(TypeError, match="float32 or bfloat16"):
        ops.pack(torch.zeros(4, 4, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"gate \(4, 4\).* and up \(5, 4\).* must match"):
        ops.pack_gated(randn(4, 4), randn(5, 4))
    with pytest.raises(ValueError, match="not a table of embeddings"):
        ops.embedding(torch.zeros(1, dtype=torch.int32), pair)
    for ids in ([-1], [0, 8]):
        with pytest.raises(ValueError, match="outside the table of 8 rows"):
            ops.embedding(torch.tensor(ids, dtype=torch.int32), packed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*FORMS, "plain"])
def test_a_launch_may_have_no_rows(name: str, dtype: torch.dtype) -> None:
    ops, none = backend(name), torch.zeros(0, 16, dtype=dtype)
    packed, pair = (p.to(dtype) for p in (randn(8, 16), randn(8, 16)))
    assert ops.linear(none, ops.pack(packed)).shape == (0, 8)
    assert ops.logits(none, ops.pack(packed)).shape == (0, 8)
    assert ops.gated_linear(none, ops.pack_gated(packed, pair), "silu").shape == (0, 8)
    assert ops.embedding(torch.zeros(0, dtype=torch.int32), ops.pack(packed)).shape == (0, 16)
    assert ops.rms_norm(none, torch.ones(16), 1e-5).shape == (0, 16)
    assert ops.log_sum_exp(torch.zeros(0, 40)).shape == (0,)
    assert ops.argmax(torch.zeros(0, 40)).shape == (0,)
