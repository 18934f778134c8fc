"""Paged attention on the GPU: chunks, neighbours, pages, tiles and splits move no bit."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.kernels import exact, reference
from lockstep.kernels.contract import AttentionBatch, Backend, SharedSegments
from lockstep.runner.sharing import shared_runs
from tests.kernels.support import DTYPES, Sequences, same_bits

SHAPES = [(9, 3, 64), (32, 8, 128), (4, 1, 256), (2, 2, 64)]


def group_of(
    ops: Backend, lengths: tuple[int, ...], shape: tuple[int, int, int], **options: Any
) -> Sequences:
    q_heads, kv_heads, head_dim = shape
    return Sequences(ops, lengths, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 70, 600])
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks(
    gpu: Backend, shape: tuple[int, int, int], window: int | None, dtype: torch.dtype
) -> None:
    group = group_of(gpu, (1100,), shape, dtype=dtype, window=window)
    whole = group.whole(0)
    assert torch.isfinite(whole).all()
    for size in (3, 64, 100, 512):
        assert same_bits(group.in_chunks(0, size), whole), f"chunks of {size}"
    for at in (0, 1, 62, 63, 64, 65, 511, 512, 513, 1023, 1024, 1099):
        assert same_bits(group.launch((0, at, at + 1))[0], whole[at : at + 1]), f"decode at {at}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_last_rows_of_runs_attend_alone(
    gpu: Backend, shape: tuple[int, int, int], window: int | None, dtype: torch.dtype
) -> None:
    """What the last layer does with rows that nobody reads; runs without rows among them."""
    lengths = (37, 900, 1, 40, 700, 17)
    group = group_of(gpu, lengths, shape, dtype=dtype, window=window)
    for counts in ((0, 1, 0, 3, 1, 0), (1,) * 6, (0, 0, 0, 0, 300, 0), (2, 50, 1, 0, 33, 17)):
        for expected, found in zip(*group.last_rows(counts), strict=True):
            assert same_bits(found, expected), counts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("shape", SHAPES)
def test_mixed_launches_with_strangers(
    gpu: Backend, shape: tuple[int, int, int], window: int | None, dtype: torch.dtype
) -> None:
    source = random.Random(str((shape, window)))
    lengths = tuple(source.choice([1, 5, 64, 130, 513, 700, 1500]) for _ in range(60))
    alone = group_of(gpu, lengths, shape, dtype=dtype, window=window)
    expected = [alone.whole(i) for i in range(len(lengths))]
    for seed in (1, 2):
        crowd = group_of(
            gpu, lengths, shape, dtype=dtype, window=window, page_seed=seed,
            page_tokens=(8, 64)[seed - 1],
        )  # fmt: skip
        done = [0] * len(lengths)
        pieces: list[list[torch.Tensor]] = [[] for _ in lengths]
        while any(a < n for a, n in zip(done, lengths, strict=True)):
            runs = []
            for i, n in enumerate(lengths):
                if done[i] < n and source.random() < 0.8:
                    size = source.choice([1, 1, 5, 33, 300, n])
                    runs.append((i, done[i], min(done[i] + size, n)))
            source.shuffle(runs)
            if not runs:
                continue
            for (i, _, end), out in zip(runs, crowd.launch(*runs), strict=True):
                pieces[i].append(out)
                done[i] = end
            if sum(done) > sum(lengths) - 300:  # the stragglers' ends in one go
                runs = [(i, done[i], n) for i, n in enumerate(lengths) if done[i] < n]
                outs = crowd.launch(*runs) if runs else []
                for (i, _, end), out in zip(runs, outs, strict=True):
                    pieces[i].append(out)
                    done[i] = end
        for i, parts in enumerate(pieces):
            assert same_bits(torch.cat(parts), expected[i]), i


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 300])
def test_tiles_and_splits(
    gpu: Backend, shape: tuple[int, int, int], window: int | None, dtype: torch.dtype
) -> None:
    from lockstep.kernels.cuda.attention import attention

    group = group_of(gpu, (1300, 40, 700), shape, dtype=dtype, window=window, page_tokens=64)
    ends = (1300, 40, 700)
    group.launch(*((i, 0, n) for i, n in enumerate(ends)))
    prefill = [(i, 0, n) for i, n in enumerate(ends)]
    decode = [(i, n - 1, n) for i, n in enumerate(ends)]
    tiles = [(16, 8, 2), (32, 8, 1)]
    if dtype == torch.bfloat16:
        tiles = [(16, 2, 2), (32, 4, 3), (64, 4, 2)]
        tiles += [(128, 8, 2)] if shape[2] < 256 else []
    for runs in (prefill, decode):
        batch = group.batch(runs)
        qkv = torch.cat([group.inputs[s][b:e] for s, b, e in runs])
        at = torch.cat([torch.arange(b, e) for _, b, e in runs]).int().cuda()
        q = gpu.write_kv(qkv, at, group.rope, group.kv, batch, shape[0])
        expected = gpu.attention(q, group.kv, batch, group.scale, window)
        for lines, warps, stages in tiles:
            if dtype == torch.float32 and lines > 16 and shape[2] > 64:
                continue
            # Whole pages by the bulk copy engine, or rows gathered one by one.
            forms = [(False, 1, True), (True, 2, True)]
            forms += [(True, 3, False)] if lines == 16 else []
            for split, parts, bulk in forms:
                for _ in range(2):  # a split tile must leave its counter as it found it
                    out = attention(
                        q, group.kv, batch, group.scale, window, lines=lines,
                        split=split, parts=parts, bulk=bulk, warps=warps, stages=stages,
                    )  # fmt: skip
                    assert same_bits(out, expected), (lines, warps, stages, split, bulk)


@pytest.mark.parametrize("shape", [(32, 8, 128), (6, 2, 128), (16, 1, 128), (1, 1, 128)])
@pytest.mark.parametrize("rows", [1, 3])
def test_few_rows_at_once(gpu: Backend, shape: tuple[int, int, int], rows: int) -> None:
    """A segment's blocks side by side, at every edge; runs of no rows among the others."""
    from lockstep.kernels.cuda import decode
    from lockstep.kernels.cuda.attention import attention

    if rows > 16 // (shape[0] // shape[1]):
        pytest.skip("more rows than a tile holds")
    edges = (1, 2, 63, 64, 65, 500, 511, 512, 513, 577, 1023, 1024, 1025, 1300, 1536, 3000)
    group = group_of(gpu, (3000,) * 4, shape, dtype=torch.bfloat16, page_tokens=64)
    for i in range(4):
        group.whole(i)
    taken = 0
    for begin in range(0, len(edges), 4):
        ends = [max(rows, end) for end in edges[begin : begin + 4]]
        batch = group.batch([(i, end - rows, end) for i, end in enumerate(ends)])
        q = torch.randn(4 * rows, shape[0], shape[2], device="cuda").bfloat16()
        expected = attention(q, group.kv, batch, group.scale, None, split=False)
        segments = -(-max(ends) // 512)
        taken += decode.suits(q, group.kv, batch, 4 * shape[1], segments, 16)
        for _ in range(2):  # counters must be left as they were found
            assert same_bits(gpu.attention(q, group.kv, batch, group.scale), expected), ends
        starts = batch.query_start.clone()
        starts[2:] = starts[1]  # the second run and those behind it have no rows
        some = replace(batch, query_start=starts)
        out = gpu.attention(q[:rows].contiguous(), group.kv, some, group.scale)
        assert same_bits(out, expected[:rows]), ends
    assert taken


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_segments_read_once_for_several_runs(
    gpu: Backend, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Runs on one prefix with its segments computed by bunch: the bits of each by itself."""
    from lockstep.kernels.cuda.attention import attention

    runs, source = 40, random.Random(3)
    ends = [source.randint(1100, 1600) for _ in range(runs)]
    group = group_of(gpu, tuple(ends), shape, dtype=dtype, page_tokens=64)
    for i in range(runs):
        group.whole(i)
    batch = group.batch([(i, n - 1, n) for i, n in enumerate(ends)])
    table = batch.page_table.clone()
    for i in range(runs):  # one prefix, which forks after its first segment
        table[i, :8] = table[0, :8]
        if i % 3:
            table[i, 8:16] = table[1, 8:16]
    batch = replace(batch, page_table=table)
    found = shared_runs([table.cpu().numpy()], np.array(ends, np.int32), 64)
    assert found is not None
    assert set(found.segments.tolist()) == {1, 2}
    shared = SharedSegments(
        *(torch.from_numpy(a).cuda() for a in (found.segments, found.members, found.bunch_segments))
    )
    q = torch.randn(runs, shape[0], shape[2], device="cuda").to(dtype)
    expected = [
        attention(
            q[i : i + 1].contiguous(), group.kv,
            AttentionBatch(
                batch.query_start[:2], batch.context_len[i : i + 1].clone(),
                table[i : i + 1].contiguous(), batch.slots[i : i + 1], 1, 1600,
            ),
            group.scale, None,
        )
        for i in range(runs)
    ]  # fmt: skip
    for parts in (1, 2, 4):
        out = attention(
            q, group.kv, replace(batch, shared=shared), group.scale, None, split=True, parts=parts
        )
        assert same_bits(out, torch.cat(expected)), parts


@pytest.mark.parametrize("page_tokens", [16, 64])
@pytest.mark.parametrize("filler", [0.0, float("inf"), -1e30])
def test_stale_values_never_enter(gpu: Backend, filler: float, page_tokens: int) -> None:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "window": 50, "page_tokens": page_tokens}
    group = group_of(gpu, (137, 20), (9, 3, 64), **options)
    other = group_of(gpu, (137, 20), (9, 3, 64), page_seed=5, filler=filler, **options)
    for i in range(2):
        assert same_bits(other.whole(i), group.whole(i))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("shape", SHAPES)
def test_values(
    gpu: Backend, shape: tuple[int, int, int], window: int | None, dtype: torch.dtype
) -> None:
    group = group_of(gpu, (1100,), shape, dtype=dtype, window=window)
    out = group.whole(0).cpu()
    heads = group.inputs[0].cpu().view(1100, shape[0] + 2 * shape[1], shape[2])
    q, k, v = heads.split([shape[0], shape[1], shape[1]], dim=1)
    q, k = (exact.rotate(t, group.rope.cos.cpu(), group.rope.sin.cpu()) for t in (q, k))
    expected = reference.attention64(q, k, v, 0, group.scale, window)
    step = 2.0**-6 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out.double(), expected, rtol=step, atol=step)
