"""Paged causal attention: prefill, chunks, decode and verification in one launch.

A row's tree: segments of `tree.SEGMENT` positions at absolute multiples, each a fresh
online softmax (Milakov & Gimelshein 2018) over blocks of `tree.BLOCK` positions
ascending, in base 2; P is rounded to the cache's dtype, its row sum is a product with
ones; segment partials merge ascending. A program holds the query heads of one
key/value head for some rows of one run, and walks all segments or, split, one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels import tree
from lockstep.kernels.contract import AttentionBatch, KVLayer
from lockstep.kernels.cuda.common import LAUNCH, multiprocessors, power_of_two, product

_LOG2E = 1.4426950408889634


@triton.jit
def _run_of(tile, query_start, runs, ROWS: tl.constexpr, ONE_TILE: tl.constexpr):
    """The run that a tile belongs to and the tile's first row within it.

    With ONE_TILE tile b is run b. Else run b's tiles start at query_start[b] // ROWS + b,
    which leaves room for every run's last, partly filled tile.
    """
    if ONE_TILE:
        run = tile
        first = tile * 0
    else:
        low = tile * 0
        high = low + runs
        while low < high:
            middle = (low + high) // 2
            if tl.load(query_start + middle) // ROWS + middle <= tile:
                low = middle + 1
            else:
                high = middle
        run = low - 1
        first = (tile - tl.load(query_start + run) // ROWS - run) * ROWS
    return run, first


@triton.jit
def _key_range(context, length, first, ROWS: tl.constexpr, WINDOW: tl.constexpr):
    """First and last key position that any row of the tile sees."""
    start = context - length + first
    last = min(start + ROWS, context) - 1
    begin = 0
    if WINDOW > 0:
        begin = max(0, start + 1 - WINDOW)
    return begin, last


@triton.jit
def _merge(total_m, total_l, total, m, l, acc):
    """Add a segment's partial to the running one; an empty partial is an exact identity."""
    top = tl.maximum(total_m, m)
    base = tl.where(top == float("-inf"), 0.0, top)
    old = tl.exp2(total_m - base)
    new = tl.exp2(m - base)
    total_l = total_l * old + l * new
    total = total * old[:, None] + acc * new[:, None]
    return top, total_l, total


@triton.jit
def _walk(
    m, l, acc,
    queries, ones, position, k_cache, v_cache, pages, low, high, begin, last, page_stride, scale,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, SIZE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Online softmax over the blocks of positions from `low` below `high` of one segment.

    Without MASKED every row of the tile sees every position of them.
    """
    DTYPE: tl.constexpr = k_cache.dtype.element_ty
    key = tl.arange(0, BLOCK)
    size = tl.arange(0, SIZE)
    for start in range(low, high, BLOCK):
        at = start + key
        if MASKED:
            known = (at >= begin) & (at <= last)
            page = tl.load(pages + at // PAGE_TOKENS, mask=known, other=-1)
            known = known & (page >= 0)
        else:
            page = tl.load(pages + at // PAGE_TOKENS)
        cell = page.to(tl.int64) * page_stride + (at % PAGE_TOKENS) * SIZE
        offset = cell[:, None] + size[None, :]
        if MASKED:
            keys = tl.load(k_cache + offset, mask=known[:, None], other=0.0)
            values = tl.load(v_cache + offset, mask=known[:, None], other=0.0)
        else:
            keys = tl.load(k_cache + offset)
            values = tl.load(v_cache + offset)
        scores = product(queries, keys.T, tl.zeros((BM, BLOCK), dtype=tl.float32)) * scale
        if MASKED:
            visible = known[None, :] & (at[None, :] <= position[:, None])
            if WINDOW > 0:
                visible = visible & (at[None, :] > position[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        top = tl.maximum(m, tl.max(scores, axis=1))
        base = tl.where(top == float("-inf"), 0.0, top)
        keep = tl.exp2(m - base)
        p = tl.exp2(scores - base[:, None]).to(DTYPE)
        m = top
        row_sum = product(p, ones, tl.zeros((BM, 16), dtype=tl.float32))
        acc = product(p, values, acc * keep[:, None])
        l = l * keep + tl.max(row_sum, axis=1)  # sixteen equal columns
    return m, l, acc


@triton.jit(
    do_not_specialize=["runs", "table_width", "total_rows"],
    do_not_specialize_on_alignment=["query_start", "context_len", "page_table"],
)
def _attention_kernel(
    q, k_cache, v_cache, out, part_acc, part_m, part_l,
    query_start, context_len, page_table, runs, table_width, page_stride, total_rows, scale,
    WINDOW: tl.constexpr, SEGMENT: tl.constexpr, BLOCK: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, SIZE: tl.constexpr, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, BM: tl.constexpr, ROWS: tl.constexpr,
    ONE_TILE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(1)
    run, first = _run_of(tl.program_id(0), query_start, runs, ROWS, ONE_TILE)
    row_start = tl.load(query_start + run)
    length = tl.load(query_start + run + 1) - row_start
    if first >= length:
        return
    context = tl.load(context_len + run)
    begin, last = _key_range(context, length, first, ROWS, WINDOW)
    low_segment = begin // SEGMENT
    high_segment = last // SEGMENT
    if SPLIT:
        low_segment += tl.program_id(2)
        if low_segment > high_segment:
            return
        high_segment = low_segment

    line = tl.arange(0, BM)
    row = first + line // GROUP
    row_ok = (line // GROUP < ROWS) & (row < length)
    position = context - length + row
    head = kv_head * GROUP + line % GROUP
    size = tl.arange(0, SIZE)
    flat = (row_start + row).to(tl.int64) * (KV_HEADS * GROUP) + head
    queries = tl.load(q + flat[:, None] * SIZE + size[None, :], mask=row_ok[:, None], other=0.0)
    ones = tl.full((BLOCK, 16), 1.0, dtype=tl.float32).to(k_cache.dtype.element_ty)
    total_m = tl.full((BM,), float("-inf"), dtype=tl.float32)
    total_l = tl.zeros((BM,), dtype=tl.float32)
    total = tl.zeros((BM, SIZE), dtype=tl.float32)
    head_base = kv_head.to(tl.int64) * (PAGE_TOKENS * SIZE)
    k_head = k_cache + head_base
    v_head = v_cache + head_base
    pages = page_table + run.to(tl.int64) * table_width

    # Blocks that every row of the tile sees whole need no masks: [whole_begin, whole_end).
    # The loop over blocks is free of branches, so that its products stay asynchronous.
    block_end = last + 1
    whole_end = (context - length + first + 1) // BLOCK * BLOCK
    whole_begin = 0
    if WINDOW > 0:
        whole_begin = tl.cdiv(max(0, last + 1 - WINDOW), BLOCK) * BLOCK
        whole_end = max(whole_end, whole_begin)
    for segment in range(low_segment, high_segment + 1):
        m = tl.full((BM,), float("-inf"), dtype=tl.float32)
        l = tl.zeros((BM,), dtype=tl.float32)
        acc = tl.zeros((BM, SIZE), dtype=tl.float32)
        low = segment * SEGMENT
        high = min(low + SEGMENT, block_end)
        middle = min(max(whole_end, low), high)
        if WINDOW > 0:
            edge = min(max(whole_begin, low), high)
            m, l, acc = _walk(
                m, l, acc, queries, ones, position, k_head, v_head, pages,
                max(low, begin // BLOCK * BLOCK), edge, begin, last, page_stride, scale,
                True, WINDOW, BLOCK, PAGE_TOKENS, SIZE, BM,
            )  # fmt: skip
            low = edge
        m, l, acc = _walk(
            m, l, acc, queries, ones, position, k_head, v_head, pages,
            low, middle, begin, last, page_stride, scale,
            False, WINDOW, BLOCK, PAGE_TOKENS, SIZE, BM,
        )  # fmt: skip
        m, l, acc = _walk(
            m, l, acc, queries, ones, position, k_head, v_head, pages,
            middle, high, begin, last, page_stride, scale,
            True, WINDOW, BLOCK, PAGE_TOKENS, SIZE, BM,
        )  # fmt: skip
        if SPLIT:
            total_m, total_l, total = m, l, acc
        else:
            total_m, total_l, total = _merge(total_m, total_l, total, m, l, acc)

    if SPLIT:
        line_at = tl.program_id(2).to(tl.int64) * total_rows * (KV_HEADS * GROUP) + flat
        tl.store(part_m + line_at, total_m, mask=row_ok)
        tl.store(part_l + line_at, total_l, mask=row_ok)
        tl.store(part_acc + line_at[:, None] * SIZE + size[None, :], total, mask=row_ok[:, None])
    else:
        # + 0: a zero has one sign, whether wholly masked blocks were walked or not.
        value = tl.div_rn(total, tl.broadcast_to(total_l[:, None], (BM, SIZE))) + 0.0
        tl.store(
            out + flat[:, None] * SIZE + size[None, :],
            value.to(out.dtype.element_ty),
            mask=row_ok[:, None],
        )


@triton.jit(
    do_not_specialize=["runs", "total_rows"],
    do_not_specialize_on_alignment=["query_start", "context_len"],
)
def _fold_kernel(
    out, part_acc, part_m, part_l, query_start, context_len, runs, total_rows,
    WINDOW: tl.constexpr, SEGMENT: tl.constexpr, SIZE: tl.constexpr, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, BM: tl.constexpr, ROWS: tl.constexpr, ONE_TILE: tl.constexpr,
):  # fmt: skip
    """Merge the partials of a tile's segments ascending and finish its rows."""
    kv_head = tl.program_id(1)
    run, first = _run_of(tl.program_id(0), query_start, runs, ROWS, ONE_TILE)
    row_start = tl.load(query_start + run)
    length = tl.load(query_start + run + 1) - row_start
    if first >= length:
        return
    begin, last = _key_range(tl.load(context_len + run), length, first, ROWS, WINDOW)
    line = tl.arange(0, BM)
    row = first + line // GROUP
    row_ok = (line // GROUP < ROWS) & (row < length)
    size = tl.arange(0, SIZE)
    flat = (row_start + row).to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + line % GROUP
    total_m = tl.full((BM,), float("-inf"), dtype=tl.float32)
    total_l = tl.zeros((BM,), dtype=tl.float32)
    total = tl.zeros((BM, SIZE), dtype=tl.float32)
    for part in range(last // SEGMENT - begin // SEGMENT + 1):
        at = flat + tl.cast(part, tl.int64) * total_rows * (KV_HEADS * GROUP)
        m = tl.load(part_m + at, mask=row_ok, other=float("-inf"))
        l = tl.load(part_l + at, mask=row_ok, other=0.0)
        acc = tl.load(
            part_acc + at[:, None] * SIZE + size[None, :], mask=row_ok[:, None], other=0.0
        )
        total_m, total_l, total = _merge(total_m, total_l, total, m, l, acc)
    value = tl.div_rn(total, tl.broadcast_to(total_l[:, None], (BM, SIZE))) + 0.0
    tl.store(
        out + flat[:, None] * SIZE + size[None, :],
        value.to(out.dtype.element_ty),
        mask=row_ok[:, None],
    )


def _tile_lines(max_query: int, group: int, size: int, dtype: torch.dtype) -> int:
    """Lines (query rows times heads of a group) of a program's tile."""
    if dtype == torch.float32:
        most = 32 if size <= 64 else 16
    else:
        most = 128 if size <= 64 else 64
    return max(16, power_of_two(group), min(most, power_of_two(max_query * group)))


def attention(
    q: Tensor,
    kv: KVLayer,
    batch: AttentionBatch,
    scale: float,
    window: int | None,
    *,
    lines: int | None = None,
    split: bool | None = None,
    warps: int | None = None,
    stages: int = 2,
) -> Tensor:
    """See `Backend.attention`; `lines`, `split`, `warps`, `stages` are for tests and tuning."""
    rows, q_heads, size = q.shape
    kv_heads = kv.v.shape[1]
    group = q_heads // kv_heads
    if not q.is_contiguous() or q_heads % kv_heads or kv.v.shape[3] != size:
        raise ValueError(f"q {tuple(q.shape)} does not fit keys {tuple(kv.v.shape)}")
    out = torch.empty(rows, q_heads * size, dtype=q.dtype, device=q.device)
    runs = batch.context_len.shape[0]
    if not rows or not runs:
        return out
    lines = lines or _tile_lines(batch.max_query, group, size, q.dtype)
    per_tile = lines // group
    one_tile = batch.max_query <= per_tile
    tiles = runs if one_tile else rows // per_tile + runs
    span = batch.max_context if window is None else min(batch.max_context, window + per_tile)
    segments = triton.cdiv(span, tree.SEGMENT) + (window is not None)
    if split is None:
        split = segments > 1 and one_tile and tiles * kv_heads < 4 * multiprocessors(q.device)
    shape = (segments if split else 0) * rows * q_heads
    scratch = torch.empty(shape * (size + 2), dtype=torch.float32, device=q.device)
    part_acc, part_m, part_l = scratch.split((shape * size, shape, shape))
    if warps is None:
        wide = lines >= 128 or lines * size >= 64 * 256 or q.dtype == torch.float32
        warps = 8 if wide else 4
    common = {
        "WINDOW": window or 0,
        "SEGMENT": tree.SEGMENT,
        "SIZE": size,
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "BM": lines,
        "ROWS": per_tile,
        "ONE_TILE": one_tile,
        "num_warps": warps,
        **LAUNCH,
    }
    _attention_kernel[(tiles, kv_heads, segments if split else 1)](
        q, kv.k, kv.v, out, part_acc, part_m, part_l,
        batch.query_start, batch.context_len, batch.page_table, runs, batch.page_table.shape[1],
        kv.v.stride(0), rows, scale * _LOG2E,
        BLOCK=tree.BLOCK["cuda"][size], PAGE_TOKENS=kv.page_tokens, SPLIT=split,
        num_stages=stages, **common,
    )  # fmt: skip
    if split:
        _fold_kernel[(tiles, kv_heads)](
            out, part_acc, part_m, part_l, batch.query_start, batch.context_len, runs, rows,
            **common,
        )  # fmt: skip
    return out
