"""Norms and what is written to the cache: bits and values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.kernels import exact, reference
from lockstep.kernels.contract import QKNorm
from tests.kernels.support import DTYPES, FORMS, Sequences, backend, randn, rope_table, same_bits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("rows", [255, 256, 257, 4096])
def test_c01_row_counts_around_256_in_one_launch(name: str, rows: int, dtype: torch.dtype) -> None:
    ops = backend(name)
    width = 96 if name == "torch" else 576
    x, residual = randn(rows, width, dtype=dtype), randn(rows, width, dtype=dtype, seed=1)
    weight = randn(width, dtype=dtype, seed=2)
    whole = ops.rms_norm(x, weight, 1e-5, residual=residual)
    for size in (1, 100, 255):
        for begin in range(0, min(rows, 600), size):
            chunk = slice(begin, min(begin + size, rows))
            part = ops.rms_norm(x[chunk], weight, 1e-5, residual=residual[chunk])
            assert same_bits(part, whole[chunk])
            if size == 1 and begin > 20:
                break


@given(
    rows=st.integers(1, 30),
    width=st.integers(1, 100),
    unit_offset=st.booleans(),
    seed=st.integers(0, 50),
)
@settings(max_examples=40)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_native_norm_equals_the_spelled_out_tree(
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    rows: int,
    width: int,
    unit_offset: bool,
    seed: int,
) -> None:
    x, residual = randn(rows, width, dtype=dtype, seed=seed), randn(rows, width, dtype=dtype)
    weight = randn(width, dtype=weight_dtype, seed=seed + 1)
    expected = reference.rms_norm(x, weight, 1e-6, unit_offset)
    for threads in (1, 3):
        ops = backend("native", threads)
        assert same_bits(ops.rms_norm(x, weight, 1e-6, unit_offset), expected)
        added = (residual.float() + expected.float()).to(dtype)
        assert same_bits(ops.rms_norm(x, weight, 1e-6, unit_offset, residual), added)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("name", [*FORMS, "plain"])
def test_norm_values_against_float64(name: str, unit_offset: bool, dtype: torch.dtype) -> None:
    x, weight = randn(9, 577, dtype=dtype) * 3, randn(577, dtype=dtype, seed=1)
    out = backend(name).rms_norm(x, weight, 1e-5, unit_offset)
    step = 2.0**-7 if dtype == torch.bfloat16 else 1e-6
    exact64 = reference.rms_norm64(x, weight, 1e-5, unit_offset)
    torch.testing.assert_close(out.double(), exact64, rtol=step, atol=step)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_write_kv_norms_rotates_and_stores(
    name: str, head_dim: int, with_norm: bool, dtype: torch.dtype
) -> None:
    ops = backend(name)
    norm = None
    if with_norm:
        norm = QKNorm(
            q=randn(head_dim, seed=8), k=randn(head_dim, seed=9), eps=1e-6, unit_offset=True
        )
    group = Sequences(
        ops, (21, 5), dtype=dtype, q_heads=4, kv_heads=2, head_dim=head_dim, norm=norm
    )
    runs = [(0, 3, 21), (1, 0, 5)]
    batch = group.batch(runs)
    qkv = torch.cat([group.inputs[0][3:21], group.inputs[1]])
    positions = torch.cat([torch.arange(3, 21), torch.arange(5)]).int()
    q = ops.write_kv(qkv, positions, group.rope, group.kv, batch, 4, norm)

    heads = qkv.view(len(qkv), 8, head_dim)
    queries, keys, values = heads[:, :4], heads[:, 4:6], heads[:, 6:]
    if norm is not None:
        madd = exact.fused if name == "native" else exact.separate
        queries = exact.rms_norm(queries, norm.q, norm.eps, True, madd)
        keys = exact.rms_norm(keys, norm.k, norm.eps, True, madd)
    table = rope_table(21, head_dim)
    cos, sin = table.cos[positions.long()], table.sin[positions.long()]
    assert same_bits(q, exact.rotate(queries, cos, sin))
    keys = exact.rotate(keys, cos, sin)
    for row, slot in enumerate(batch.slots.tolist()):
        page, token = divmod(slot, group.page_tokens)
        assert same_bits(group.kv.v[page, :, token], values[row])
        for head in range(2):
            stored = group.kv.k[page, head]
            if name == "native" and dtype == torch.bfloat16:
                stored = stored.reshape(head_dim // 2, group.page_tokens, 2)[:, token].flatten()
            else:
                stored = stored[:, token] if name == "native" else stored[token]
            assert same_bits(stored, keys[row, head])


@pytest.mark.parametrize("name", [*FORMS, "plain"])
def test_copy_pages_in_the_given_order(name: str) -> None:
    pool = torch.arange(60.0)
    pairs = torch.tensor([[0, 3], [3, 4], [1, 0]])
    backend(name).copy_pages(pool, 10, pairs)
    assert pool[30:50].tolist() == [*range(10), *range(10)]
    assert pool[:10].tolist() == [*range(10, 20)]
    with pytest.raises(ValueError, match="outside the pool"):
        backend(name).copy_pages(pool, 10, torch.tensor([[0, 6]]))
