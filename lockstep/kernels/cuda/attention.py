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
from triton.tools.tensor_descriptor import TensorDescriptor

from lockstep.kernels import tree
from lockstep.kernels.contract import AttentionBatch, KVLayer
from lockstep.kernels.cuda import decode
from lockstep.kernels.cuda.common import (
    MOST_ARRIVALS,
    ahead,
    arrivals,
    begin,
    chain,
    chained,
    lines_of,
    multiprocessors,
    power_of_two,
    product,
)

_LOG2E = 1.4426950408889634
_SCRATCH_BYTES = 320 << 20  # of partials; beyond it segments run in sequence
_SPLIT_BELOW = 2  # tiles a multiprocessor; more of them fill the device as they are
_PROGRAMS = 8  # a multiprocessor, that splits aim at


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
def _block_of(
    cache, pages, start, begin, last, kv_head, page_stride,
    MASKED: tl.constexpr, ZEROED: tl.constexpr, BULK: tl.constexpr, BLOCK: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Keys or values of the positions start .. start + BLOCK.

    With MASKED only begin .. last are known; with ZEROED the others are zeros, without it
    anything, not-a-numbers too. With BULK the block lies in one page, and `cache` is a
    descriptor over lines of SIZE.
    """
    at = start + tl.arange(0, BLOCK)
    known = (at >= begin) & (at <= last)
    if BULK:
        page = tl.load(pages + start // PAGE_TOKENS)
        if MASKED:
            known = known & (page >= 0)
            page = max(page, 0)
        line = page * (page_stride // SIZE) + kv_head * PAGE_TOKENS + start % PAGE_TOKENS
        block = cache.load([line, 0])
        if MASKED and ZEROED:
            block = tl.where(known[:, None], block, 0.0)
    else:
        if MASKED:
            page = tl.load(pages + at // PAGE_TOKENS, mask=known, other=-1)
            known = known & (page >= 0)
        else:
            page = tl.load(pages + at // PAGE_TOKENS)
        cell = page.to(tl.int64) * page_stride + (at % PAGE_TOKENS) * SIZE
        offset = cell[:, None] + tl.arange(0, SIZE)[None, :]
        head = cache + kv_head.to(tl.int64) * (PAGE_TOKENS * SIZE)
        if MASKED:
            block = tl.load(head + offset, mask=known[:, None], other=0.0)
        else:
            block = tl.load(head + offset)
    return block


@triton.jit
def _walk(
    m, l, acc,
    queries, ones, position, k_cache, v_cache, pages, low, high, begin, last,
    kv_head, page_stride, scale,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, BULK: tl.constexpr, BLOCK: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, SIZE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Online softmax over the blocks of positions from `low` below `high` of one segment.

    Without MASKED every row of the tile sees every position of them.
    """
    for start in range(low, high, BLOCK):
        keys = _block_of(
            k_cache, pages, start, begin, last, kv_head, page_stride,
            MASKED, False, BULK, BLOCK, PAGE_TOKENS, SIZE,
        )  # fmt: skip
        values = _block_of(
            v_cache, pages, start, begin, last, kv_head, page_stride,
            MASKED, True, BULK, BLOCK, PAGE_TOKENS, SIZE,
        )  # fmt: skip
        scores = product(queries, keys.T, tl.zeros((BM, BLOCK), dtype=tl.float32)) * scale
        if MASKED:
            at = start + tl.arange(0, BLOCK)
            visible = (at >= begin)[None, :] & (at[None, :] <= position[:, None])
            if WINDOW > 0:
                visible = visible & (at[None, :] > position[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        top = tl.maximum(m, tl.max(scores, axis=1))
        base = tl.where(top == float("-inf"), 0.0, top)
        keep = tl.exp2(m - base)
        p = tl.exp2(scores - base[:, None]).to(queries.dtype)
        m = top
        row_sum = product(p, ones, tl.zeros((BM, 16), dtype=tl.float32))
        acc = product(p, values, acc * keep[:, None])
        l = l * keep + tl.max(row_sum, axis=1)  # sixteen equal columns
    return m, l, acc


@triton.jit
def _segment(
    segment, queries, ones, position, k_cache, v_cache, pages, begin, last, whole,
    kv_head, page_stride, scale,
    WINDOW: tl.constexpr, SEGMENT: tl.constexpr, BULK: tl.constexpr, BLOCK: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, SIZE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Maximum, sum and weighted values of one segment, for keys `begin` .. `last`.

    Every row of the tile sees the keys below `whole` (and, with a window, from `last`
    less the window on): their blocks need no masks. The loops over blocks are free of
    branches, so that their products stay asynchronous.
    """
    m = tl.full((BM,), float("-inf"), dtype=tl.float32)
    l = tl.zeros((BM,), dtype=tl.float32)
    acc = tl.zeros((BM, SIZE), dtype=tl.float32)
    low = segment * SEGMENT
    high = min(low + SEGMENT, last + 1)
    whole_end = whole // BLOCK * BLOCK
    if WINDOW > 0:
        whole_begin = tl.cdiv(max(0, last + 1 - WINDOW), BLOCK) * BLOCK
        whole_end = max(whole_end, whole_begin)
        edge = min(max(whole_begin, low), high)
        m, l, acc = _walk(
            m, l, acc, queries, ones, position, k_cache, v_cache, pages,
            max(low, begin // BLOCK * BLOCK), edge, begin, last, kv_head,
            page_stride, scale, True, WINDOW, BULK, BLOCK, PAGE_TOKENS, SIZE, BM,
        )  # fmt: skip
        low = edge
    middle = min(max(whole_end, low), high)
    m, l, acc = _walk(
        m, l, acc, queries, ones, position, k_cache, v_cache, pages,
        low, middle, begin, last, kv_head, page_stride, scale,
        False, WINDOW, BULK, BLOCK, PAGE_TOKENS, SIZE, BM,
    )  # fmt: skip
    m, l, acc = _walk(
        m, l, acc, queries, ones, position, k_cache, v_cache, pages,
        middle, high, begin, last, kv_head, page_stride, scale,
        True, WINDOW, BULK, BLOCK, PAGE_TOKENS, SIZE, BM,
    )  # fmt: skip
    return m, l, acc


@triton.jit
def _keep(part_acc, part_m, part_l, at, m, l, acc, row_ok, SIZE: tl.constexpr):
    """Store one segment's partial of the lines `at`."""
    size = tl.arange(0, SIZE)
    tl.store(part_m + at, m, mask=row_ok)
    tl.store(part_l + at, l, mask=row_ok)
    tl.store(part_acc + at[:, None] * SIZE + size[None, :], acc, mask=row_ok[:, None])


@triton.jit
def _finish(out, flat, total_l, total, row_ok, SIZE: tl.constexpr, BM: tl.constexpr):
    """Divide by the sum and store; + 0 gives a zero one sign, whatever blocks were walked."""
    size = tl.arange(0, SIZE)
    value = tl.div_rn(total, tl.broadcast_to(total_l[:, None], (BM, SIZE))) + 0.0
    tl.store(
        out + flat[:, None] * SIZE + size[None, :],
        value.to(out.dtype.element_ty),
        mask=row_ok[:, None],
    )


@triton.jit(
    do_not_specialize=["runs", "table_width", "total_rows", "early"],
    do_not_specialize_on_alignment=["query_start", "context_len", "page_table", "common"],
)
def _attention_kernel(
    q, k_cache, v_cache, out, part_acc, part_m, part_l, arrived,
    query_start, context_len, page_table, common,
    runs, table_width, page_stride, total_rows, scale, early,
    WINDOW: tl.constexpr, SEGMENT: tl.constexpr, BULK: tl.constexpr, BLOCK: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, SIZE: tl.constexpr, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, BM: tl.constexpr, ROWS: tl.constexpr,
    ONE_TILE: tl.constexpr, SPLIT: tl.constexpr, COMMON: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One program a tile and key/value head; with SPLIT several, each with some segments.

    With COMMON the first `common[run]` segments' partials are there already. Of the
    programs of one split tile the last to arrive merges; the order of the merge is
    that of the segments, whoever it is.
    """
    begin(CHAINED, early)
    kv_head = tl.program_id(0) % KV_HEADS
    # The longest tiles of a prompt are its last: they go first.
    tile = tl.num_programs(0) // KV_HEADS - 1 - tl.program_id(0) // KV_HEADS
    run, first = _run_of(tile, query_start, runs, ROWS, ONE_TILE)
    row_start = tl.load(query_start + run)
    length = tl.load(query_start + run + 1) - row_start
    if first >= length:
        chain(CHAINED)
        return
    context = tl.load(context_len + run)
    lowest_key, last = _key_range(context, length, first, ROWS, WINDOW)
    lowest = lowest_key // SEGMENT
    highest = last // SEGMENT
    known = 0
    if COMMON:
        known = tl.load(common + run)
    chain(CHAINED)
    step = 1
    part = 0
    if SPLIT:
        step = tl.num_programs(1)
        part = tl.program_id(1)
        if lowest + known + part > highest:
            return

    line = tl.arange(0, BM)
    row = first + line // GROUP
    row_ok = (line // GROUP < ROWS) & (row < length)
    position = context - length + row
    head = kv_head * GROUP + line % GROUP
    size = tl.arange(0, SIZE)
    flat = (row_start + row).to(tl.int64) * (KV_HEADS * GROUP) + head
    queries = tl.load(q + flat[:, None] * SIZE + size[None, :], mask=row_ok[:, None], other=0.0)
    ones = tl.full((BLOCK, 16), 1.0, dtype=tl.float32).to(q.dtype.element_ty)
    pages = page_table + run.to(tl.int64) * table_width
    whole = context - length + first + 1

    total_m = tl.full((BM,), float("-inf"), dtype=tl.float32)
    total_l = tl.zeros((BM,), dtype=tl.float32)
    total = tl.zeros((BM, SIZE), dtype=tl.float32)
    for segment in range(lowest + known + part, highest + 1, step):
        m, l, acc = _segment(
            segment, queries, ones, position, k_cache, v_cache, pages, lowest_key, last, whole,
            kv_head, page_stride, scale, WINDOW, SEGMENT, BULK, BLOCK, PAGE_TOKENS, SIZE, BM,
        )  # fmt: skip
        if SPLIT:
            at = flat + (segment - lowest).to(tl.int64) * total_rows * (KV_HEADS * GROUP)
            _keep(part_acc, part_m, part_l, at, m, l, acc, row_ok, SIZE)
        else:
            total_m, total_l, total = _merge(total_m, total_l, total, m, l, acc)

    if SPLIT:
        counter = arrived + tile * KV_HEADS + kv_head
        tl.debug_barrier()  # every thread's partial is stored before this program counts
        before = tl.atomic_add(counter, 1, sem="acq_rel")
        if before < min(step, highest - lowest - known + 1) - 1:
            return
        tl.store(counter, 0)  # for the next launch
        for index in range(highest - lowest + 1):
            at = flat + tl.cast(index, tl.int64) * total_rows * (KV_HEADS * GROUP)
            m = tl.load(part_m + at, mask=row_ok, other=float("-inf"), cache_modifier=".cg")
            l = tl.load(part_l + at, mask=row_ok, other=0.0, cache_modifier=".cg")
            acc = tl.load(
                part_acc + at[:, None] * SIZE + size[None, :],
                mask=row_ok[:, None], other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            total_m, total_l, total = _merge(total_m, total_l, total, m, l, acc)
    _finish(out, flat, total_l, total, row_ok, SIZE, BM)


@triton.jit(
    do_not_specialize=["table_width", "total_rows"],
    do_not_specialize_on_alignment=["query_start", "page_table", "members", "segments"],
)
def _common_kernel(
    q, k_cache, v_cache, part_acc, part_m, part_l, query_start, page_table, members, segments,
    table_width, page_stride, total_rows, scale,
    SEGMENT: tl.constexpr, BULK: tl.constexpr, BLOCK: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, SIZE: tl.constexpr, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, BM: tl.constexpr, ROWS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Partials of one whole segment for up to ROWS runs of one row that share its pages."""
    chain(CHAINED)
    kv_head = tl.program_id(0) % KV_HEADS
    bunch = tl.program_id(0) // KV_HEADS
    segment = tl.program_id(1)
    if segment >= tl.load(segments + bunch):
        return
    line = tl.arange(0, BM)
    place = line // GROUP
    run = tl.load(members + bunch * ROWS + place, mask=place < ROWS, other=-1)
    row_ok = run >= 0
    row = tl.load(query_start + run, mask=row_ok, other=0)
    flat = row.to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + line % GROUP
    size = tl.arange(0, SIZE)
    queries = tl.load(q + flat[:, None] * SIZE + size[None, :], mask=row_ok[:, None], other=0.0)
    ones = tl.full((BLOCK, 16), 1.0, dtype=tl.float32).to(q.dtype.element_ty)
    leader = tl.load(members + bunch * ROWS)
    end = (segment + 1) * SEGMENT
    m, l, acc = _segment(
        segment, queries, ones, run, k_cache, v_cache,
        page_table + leader.to(tl.int64) * table_width, 0, end - 1, end, kv_head,
        page_stride, scale, 0, SEGMENT, BULK, BLOCK, PAGE_TOKENS, SIZE, BM,
    )  # fmt: skip
    at = flat + segment.to(tl.int64) * total_rows * (KV_HEADS * GROUP)
    _keep(part_acc, part_m, part_l, at, m, l, acc, row_ok, SIZE)


def _tile_lines(max_query: int, group: int, size: int, dtype: torch.dtype) -> int:
    """Lines (query rows times heads of a group) of a program's tile."""
    if dtype == torch.float32:
        most = 32 if size <= 64 else 16
    else:
        most = 128 if size <= 64 else 64
    return max(16, power_of_two(group), min(most, power_of_two(max_query * group)))


def _bulk_allowed(kv: KVLayer, block: int) -> bool:
    """The bulk copy engine takes a block that lies in one page, in lines of 16-byte rows."""
    size = kv.v.shape[3]
    aligned = kv.k.data_ptr() % 16 == 0 and kv.v.data_ptr() % 16 == 0
    return aligned and kv.page_tokens % block == 0 and kv.v.stride(0) % size == 0


def _parts(tiles: int, segments: int, device: torch.device) -> int:
    """Programs that share a tile's segments: enough to fill the device."""
    return min(segments, -(-_PROGRAMS * multiprocessors(device) // tiles))


def attention(
    q: Tensor,
    kv: KVLayer,
    batch: AttentionBatch,
    scale: float,
    window: int | None,
    *,
    lines: int | None = None,
    split: bool | None = None,
    parts: int | None = None,
    warps: int | None = None,
    stages: int | None = None,
    bulk: bool | None = None,
) -> Tensor:
    """See `Backend.attention`; what follows the star is for tests and tuning."""
    free = (lines, split, parts, warps, stages, bulk) == (None,) * 6
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
    tiles = (runs if one_tile else rows // per_tile + runs) * kv_heads
    span = batch.max_context if window is None else min(batch.max_context, window + per_tile)
    segments = triton.cdiv(span, tree.SEGMENT) + (window is not None)
    scratch_lines = segments * rows * q_heads
    if split is None:
        few = tiles < _SPLIT_BELOW * multiprocessors(q.device) or batch.shared is not None
        small = scratch_lines * (size + 2) * 4 <= _SCRATCH_BYTES
        split = segments > 1 and one_tile and few and small
    split = split and tiles <= MOST_ARRIVALS
    scratch_lines = scratch_lines if split else 0
    scratch = torch.empty(scratch_lines * (size + 2), dtype=torch.float32, device=q.device)
    partials = scratch.split((scratch_lines * size, scratch_lines, scratch_lines))
    block = tree.BLOCK["cuda"][size]
    if bulk is None:
        bulk = _bulk_allowed(kv, block)
    plain = free and split and bulk and window is None
    if plain and decode.suits(q, kv, batch, tiles, segments, lines):
        decode.launch(q, kv, batch, out, partials, scale * _LOG2E, segments)
        return out
    if not split:
        parts = 1
    elif parts is None:
        parts = _parts(tiles, segments, q.device)
    if warps is None:
        warps = _warps(lines, size, q.dtype, parts)
    keys, values = kv.k, kv.v
    if bulk:
        keys, values = (
            TensorDescriptor.from_tensor(lines_of(t), [block, size]) for t in (kv.k, kv.v)
        )
    options = {
        "BULK": bulk,
        "SEGMENT": tree.SEGMENT,
        "BLOCK": block,
        "PAGE_TOKENS": kv.page_tokens,
        "SIZE": size,
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "num_stages": stages or _stages(lines, size, tiles, parts, bulk, q),
        **chained(q.device, rows),
    }
    shared = batch.shared if split else None
    common = batch.context_len
    if shared is not None:
        common = shared.segments
        bunches, wide = shared.members.shape
        wide_lines = max(16, power_of_two(wide * group))
        _common_kernel[(bunches * kv_heads, segments)](
            q, keys, values, *partials, batch.query_start, batch.page_table, shared.members,
            shared.bunch_segments, batch.page_table.shape[1], kv.v.stride(0), rows, scale * _LOG2E,
            BM=wide_lines, ROWS=wide, num_warps=_warps(wide_lines, size, q.dtype, segments),
            **options,
        )  # fmt: skip
    _attention_kernel[(tiles, parts)](
        q, keys, values, out, *partials, arrivals(q.device),
        batch.query_start, batch.context_len, batch.page_table, common,
        runs, batch.page_table.shape[1], kv.v.stride(0), rows, scale * _LOG2E,
        ahead(q.device), WINDOW=window or 0, BM=lines, ROWS=per_tile, ONE_TILE=one_tile,
        SPLIT=split, COMMON=shared is not None, num_warps=warps, **options,
    )  # fmt: skip
    return out


def _stages(lines: int, size: int, tiles: int, parts: int, bulk: bool, q: Tensor) -> int:
    """Blocks under way in a program: many where there is room for one or two programs each."""
    few = 1 < parts and tiles * parts <= 2 * multiprocessors(q.device)
    return 6 if few and bulk and lines * size <= 16 * 128 and q.dtype != torch.float32 else 2


def _warps(lines: int, size: int, dtype: torch.dtype, parts: int) -> int:
    """Warps of a program: few where many programs read at the memory's rate side by side."""
    if lines >= 128 or lines * size >= 64 * 256 or dtype == torch.float32:
        return 8
    return 2 if lines * size <= 16 * 128 and parts == 1 else 4
