"""Paged attention: a row's bits do not know of chunks, neighbours, pages or threads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config import ConfigError
from lockstep.kernels import exact, reference
from lockstep.kernels.contract import AttentionBatch
from tests.kernels.support import DTYPES, FORMS, Sequences, backend, isa, same_bits

SMALL: dict[str, Any] = {"q_heads": 6, "kv_heads": 2, "head_dim": 64}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("name", FORMS)
def test_chunks_of_one_seven_sixty_four_and_whole(
    name: str, window: int | None, dtype: torch.dtype
) -> None:
    length = 530 if name == "native" else 150
    group = Sequences(backend(name), (length,), dtype=dtype, window=window, **SMALL)
    whole = group.whole(0)
    assert torch.isfinite(whole).all()
    for size in (1, 7, 64) if name == "native" else (7, 64):
        assert same_bits(group.in_chunks(0, size), whole), f"chunks of {size}"


LAST_ROWS = ((0, 1, 0, 3, 1, 0), (1, 1, 1, 1, 1, 1), (0, 0, 0, 0, 70, 0), (2, 50, 1, 0, 33, 17))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("name", FORMS)
def test_the_last_rows_of_runs_attend_alone(
    name: str, window: int | None, dtype: torch.dtype
) -> None:
    """Also where a run has none, at the launch's begin, middle and end."""
    lengths = (37, 90, 1, 40, 70, 17)
    group = Sequences(backend(name), lengths, dtype=dtype, window=window, **SMALL)
    for counts in LAST_ROWS:
        for expected, found in zip(*group.last_rows(counts), strict=True):
            assert same_bits(found, expected), counts


@given(data=st.data())
@settings(max_examples=25)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMS)
def test_mixed_launches(name: str, dtype: torch.dtype, data: st.DataObject) -> None:
    longest = 700 if name == "native" else 80
    lengths = data.draw(st.lists(st.integers(1, longest), min_size=1, max_size=4))
    shape = data.draw(st.sampled_from([(9, 3, 64), (4, 4, 16), (4, 1, 48), (2, 1, 128)]))
    options: dict[str, Any] = {
        "dtype": dtype,
        "q_heads": shape[0],
        "kv_heads": shape[1],
        "head_dim": shape[2],
        "window": data.draw(st.sampled_from([None, 1, 20, 100])),
    }
    pages = data.draw(st.sampled_from([1, 4, 8, 16, 32]))
    threads = data.draw(st.sampled_from([1, 2, 3]))
    alone = Sequences(backend(name, 1), lengths, page_tokens=16, **options)
    expected = [alone.whole(i) for i in range(len(lengths))]

    crowd = Sequences(
        backend(name, threads), lengths, page_tokens=pages, page_seed=threads, **options
    )
    done = [0] * len(lengths)
    pieces: list[list[torch.Tensor]] = [[] for _ in lengths]
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        runs = []
        for i, length in enumerate(lengths):
            if done[i] < length:
                size = data.draw(st.sampled_from([1, 5, 33, length]))
                runs.append((i, done[i], min(done[i] + max(size, length // 5), length)))
        runs = data.draw(st.permutations(runs))
        for (i, _, end), out in zip(runs, crowd.launch(*runs), strict=True):
            pieces[i].append(out)
            done[i] = end
    for parts, whole in zip(pieces, expected, strict=True):
        assert same_bits(torch.cat(parts), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 31, 32, 33, 511, 512, 513, 1025, 2000])
def test_decode_after_prefill_at_block_and_segment_borders(length: int, dtype: torch.dtype) -> None:
    group = Sequences(backend("native"), (length, 40), dtype=dtype, **SMALL)
    last = group.whole(0)[-1:]
    if length > 1:
        group.launch((0, 0, length - 1))
    alone = group.launch((0, length - 1, length))[0]
    crowd = group.launch((1, 0, 40), (0, length - 1, length))[1]
    assert same_bits(alone, last)
    assert same_bits(crowd, last)


@pytest.mark.parametrize("name", FORMS)
def test_stale_and_foreign_values_never_enter(name: str) -> None:
    group = Sequences(backend(name), (37, 20), dtype=torch.float32, **SMALL)
    expected = [group.whole(0), group.whole(1)]
    for filler in (0.0, float("inf"), -1e30):
        other = Sequences(
            backend(name), (37, 20), dtype=torch.float32, page_seed=5, filler=filler, **SMALL
        )
        for want, got in zip(expected, other.launch((0, 0, 37), (1, 0, 20)), strict=True):
            assert same_bits(got, want)


@pytest.mark.parametrize("name", FORMS)
def test_a_later_row_with_nan_does_not_touch_earlier_rows(name: str) -> None:
    group = Sequences(backend(name), (50,), dtype=torch.float32, **SMALL)
    clean = group.whole(0)
    group.inputs[0][45] = float("nan")
    dirty = group.whole(0)
    assert same_bits(dirty[:45], clean[:45])
    assert torch.isnan(dirty[45:]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("length", "window", "shape"),
    [(40, None, (4, 2, 32)), (70, 20, (2, 1, 16)), (530, 515, (1, 1, 16)), (515, None, (1, 1, 16))],
)
def test_native_equals_the_spelled_out_tree(
    length: int, window: int | None, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    q_heads, kv_heads, head_dim = shape
    group = Sequences(
        backend("native"),
        (length,),
        dtype=dtype,
        window=window,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )
    out = group.whole(0)
    heads = group.inputs[0].view(length, q_heads + 2 * kv_heads, head_dim)
    q, k, v = heads.split([q_heads, kv_heads, kv_heads], dim=1)
    q, k = (exact.rotate(t, group.rope.cos, group.rope.sin) for t in (q, k))
    first = max(0, length - 12)
    expected = reference.attention(q[first:], k, v, first, group.scale, isa(), window)
    assert same_bits(out[first:], expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("shape", [(9, 3, 64), (4, 4, 128), (4, 1, 256), (4, 2, 80)])
@pytest.mark.parametrize("name", [*FORMS, "plain"])
def test_values_against_float64(
    name: str, shape: tuple[int, int, int], window: int | None, dtype: torch.dtype
) -> None:
    q_heads, kv_heads, head_dim = shape
    length = 600 if name == "native" else 100
    group = Sequences(
        backend(name),
        (length,),
        dtype=dtype,
        window=window,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )
    out = group.whole(0)
    heads = group.inputs[0].view(length, q_heads + 2 * kv_heads, head_dim)
    q, k, v = heads.split([q_heads, kv_heads, kv_heads], dim=1)
    q, k = (exact.rotate(t, group.rope.cos, group.rope.sin) for t in (q, k))
    expected = reference.attention64(q, k, v, 0, group.scale, window)
    step = 2.0**-7 if dtype == torch.bfloat16 else 5e-6
    torch.testing.assert_close(out.double(), expected, rtol=step, atol=step)


def test_refuses_pages_and_heads_that_the_tree_cannot_take() -> None:
    pool = torch.zeros(4096)
    shape: dict[str, int] = {"page_stride": 1024, "offset": 0, "kv_heads": 1}
    for name in FORMS:
        with pytest.raises(ConfigError, match="page_tokens must divide"):
            backend(name).kv_layer(pool, head_dim=16, page_tokens=24, **shape)
    with pytest.raises(ConfigError, match="multiple of 16"):
        backend("native").kv_layer(pool, head_dim=24, page_tokens=16, **shape)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"query_start": torch.zeros(2, dtype=torch.int32)}, "query_start"),
        ({"context_len": torch.zeros(2)}, "context_len"),
        ({"page_table": torch.zeros(9, 2, dtype=torch.int32).T}, "page_table"),
        ({"slots": torch.zeros(50, dtype=torch.int64)}, "slots"),
    ],
)
def test_a_batch_that_kernels_would_misread_is_refused(change: dict[str, Any], named: str) -> None:
    good = Sequences(backend("native"), (30, 20), dtype=torch.float32, **SMALL).batch(
        [(0, 0, 30), (1, 0, 20)]
    )
    with pytest.raises(ValueError, match=named):
        replace(good, **change)


@pytest.mark.parametrize("name", [*FORMS, "plain"])
def test_a_launch_may_have_no_rows(name: str) -> None:
    """No run, or one of which no row attends."""
    group = Sequences(backend(name), (5,), dtype=torch.float32, filler=0.0, **SMALL)
    for contexts in ((), (3,)):
        runs = len(contexts)
        batch = AttentionBatch(
            query_start=torch.zeros(runs + 1, dtype=torch.int32),
            context_len=torch.tensor(contexts, dtype=torch.int32),
            page_table=torch.zeros(runs, 1, dtype=torch.int32),
            slots=torch.zeros(0, dtype=torch.int32),
            max_query=0,
            max_context=max(contexts, default=0),
        )
        qkv, at = group.inputs[0][:0], torch.zeros(0, dtype=torch.int32)
        q = group.ops.write_kv(qkv, at, group.rope, group.kv, batch, 6)
        assert q.shape == (0, 6, 64)
        assert group.ops.attention(q, group.kv, batch, 1.0).shape == (0, 6 * 64)


@pytest.mark.parametrize("name", FORMS)
def test_operands_that_do_not_go_together_are_refused(name: str) -> None:
    """One check each of what is read by address, or would be broadcast."""
    ops = backend(name)
    group = Sequences(ops, (30,), dtype=torch.float32, **SMALL)
    batch, at = group.batch([(0, 0, 30)]), torch.arange(30).int()
    with pytest.raises(ValueError, match="cos"):
        replace(group.rope, cos=group.rope.cos.half())
    with pytest.raises(ValueError, match="sin"):
        replace(group.rope, sin=group.rope.sin[:5])

    def write(qkv: torch.Tensor, positions: torch.Tensor, rope: Any) -> None:
        ops.write_kv(qkv, positions, rope, group.kv, batch, 6)

    narrow = replace(
        group.rope, cos=group.rope.cos[:, :8].clone(), sin=group.rope.sin[:, :8].clone()
    )
    with pytest.raises(ValueError, match="half 8"):
        write(group.inputs[0], at, narrow)
    with pytest.raises(ValueError, match="bfloat16"):
        write(group.inputs[0].bfloat16(), at, group.rope)
    with pytest.raises(ValueError, match="positions"):
        write(group.inputs[0], at[:9], group.rope)
    with pytest.raises(ValueError, match="slots"):
        write(group.inputs[0][:9], at[:9], group.rope)
    with pytest.raises(ValueError, match="q must"):
        ops.attention(torch.zeros(30, 6, 32), group.kv, batch, 1.0)
    with pytest.raises(ValueError, match="q has 5 heads, no multiple of the 2 key heads"):
        ops.attention(torch.zeros(30, 5, 64), group.kv, batch, 1.0)
    x = torch.zeros(3, 64)
    with pytest.raises(ValueError, match="x must"):
        ops.rms_norm(x, torch.ones(65), 1e-5)
    with pytest.raises(ValueError, match="residual"):
        ops.rms_norm(x, torch.ones(64), 1e-5, False, torch.zeros(4, 64))
