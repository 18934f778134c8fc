"""Attention of few rows, one segment a program: all of its keys and values under way at once.

The tree is that of `attention.py`. There a program walks a segment's blocks one after the
other, and at few rows that walk is all waiting. Here each warp scores one block, so that the
maxima, exponentials and row sums of a whole segment come side by side; what the tree wants
in order, the sums over values, follows from shared memory, every warp for its columns. The
partials of a segment, and who merges them, are those of `attention.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, mma_v2, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lockstep.kernels import tree
from lockstep.kernels.contract import AttentionBatch, KVLayer
from lockstep.kernels.cuda.common import (
    ahead,
    arrivals,
    begin,
    can_chain,
    chain,
    chained,
    lines_of,
    multiprocessors,
)

BLOCK = 64
SIZE = 128
LINES = 16
_AHEAD = 4  # blocks of values with room of their own; the others take that of keys


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b)


@gluon.jit
def _line(
    pages, low, index: gl.constexpr, blocks, kv_head, page_stride,
    PAGE: gl.constexpr, SIZE: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """First line of a block in the cache's lines of SIZE."""
    start = low + index * BLOCK
    page = gl.load(pages + start // PAGE, mask=index < blocks, other=0)
    return page * (page_stride // SIZE) + kv_head * PAGE + start % PAGE


@gluon.jit
def _lines(
    pages, segment, last, kv_head, page_stride,
    SEGMENT: gl.constexpr, PAGE: gl.constexpr, SIZE: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """First position of a segment, its number of blocks up to key `last`, and the lines of all
    eight: their loads are under way together."""
    low = segment * SEGMENT
    blocks = gl.minimum(SEGMENT // BLOCK, (last - low) // BLOCK + 1)
    line0 = _line(pages, low, 0, blocks, kv_head, page_stride, PAGE, SIZE, BLOCK)
    line1 = _line(pages, low, 1, blocks, kv_head, page_stride, PAGE, SIZE, BLOCK)
    line2 = _line(pages, low, 2, blocks, kv_head, page_stride, PAGE, SIZE, BLOCK)
    line3 = _line(pages, low, 3, blocks, kv_head, page_stride, PAGE, SIZE, BLOCK)
    line4 = _line(pages, low, 4, blocks, kv_head, page_stride, PAGE, SIZE, BLOCK)
    line5 = _line(pages, low, 5, blocks, kv_head, page_stride, PAGE, SIZE, BLOCK)
    line6 = _line(pages, low, 6, blocks, kv_head, page_stride, PAGE, SIZE, BLOCK)
    line7 = _line(pages, low, 7, blocks, kv_head, page_stride, PAGE, SIZE, BLOCK)
    return low, blocks, (line0, line1, line2, line3, line4, line5, line6, line7)


@gluon.jit
def _copy(cache, line, ring_low, ring_high, slot, bar, pred, HALF: gl.constexpr):
    """One block of keys or values, in two halves of its heads."""
    mbarrier.expect(bar, 4 * HALF * HALF, pred=pred)
    tma.async_copy_global_to_shared(cache, [line, 0], bar, ring_low.index(slot), pred=pred)
    tma.async_copy_global_to_shared(cache, [line, HALF], bar, ring_high.index(slot), pred=pred)


@gluon.jit
def _values(ring, slot, known, MMA: gl.constexpr):
    """A block of values, rows that are not known as zeros."""
    v = ring.index(slot).load(gl.DotOperandLayout(1, MMA, 2))
    return gl.where(known[:, None], v, 0.0)


@gluon.jit
def _partial(part_m, part_l, part_acc, at, column, row_ok, SIZE: gl.constexpr):
    """Maxima, sums and both halves of the values of a segment's lines `at`."""
    m = gl.load(part_m + at, mask=row_ok, other=float("-inf"), cache_modifier=".cg")
    l = gl.load(part_l + at, mask=row_ok, other=0.0, cache_modifier=".cg")
    place = part_acc + (at * SIZE)[:, None] + column[None, :]
    inside = row_ok[:, None]
    low = gl.load(place, mask=inside, other=0.0, cache_modifier=".cg")
    high = gl.load(place + SIZE // 2, mask=inside, other=0.0, cache_modifier=".cg")
    return m, l, low, high


@gluon.jit(
    do_not_specialize=["table_width", "total_rows", "early"],
    do_not_specialize_on_alignment=["query_start", "context_len", "page_table"],
)
def _decode_kernel(
    q, keys, values, out, part_acc, part_m, part_l, arrived,
    query_start, context_len, page_table,
    table_width, page_stride, total_rows, scale, early,
    SEGMENT: gl.constexpr, BLOCK: gl.constexpr, PAGE: gl.constexpr, SIZE: gl.constexpr,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, BM: gl.constexpr, ROWS: gl.constexpr,
    AHEAD: gl.constexpr, CHAINED: gl.constexpr,
):  # fmt: skip
    """One program a run's key/value head and segment; the last to arrive merges."""
    HALF: gl.constexpr = SIZE // 2
    BLOCKS: gl.constexpr = SEGMENT // BLOCK
    DTYPE: gl.constexpr = q.dtype.element_ty
    EACH: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [8, 1, 1], [1, 16, 8])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 8], [16, 8])
    A3: gl.constexpr = gl.DotOperandLayout(0, EACH, 2)
    B3: gl.constexpr = gl.DotOperandLayout(1, EACH, 2)
    LINE: gl.constexpr = gl.SliceLayout(1, WIDE)
    EVERY: gl.constexpr = gl.BlockedLayout([BLOCKS, 1], [1, 32], [1, 8], [0, 1])
    NVMMA3: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=3)
    SMALL: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    TABLE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])

    begin(CHAINED, early)
    kv_head = gl.program_id(0) % KV_HEADS
    run = gl.program_id(0) // KV_HEADS
    segment = gl.program_id(1)
    row_start = gl.load(query_start + run)
    length = gl.load(query_start + run + 1) - row_start
    context = gl.load(context_len + run)
    highest = (context - 1) // SEGMENT
    if (length <= 0) | (segment > highest):
        chain(CHAINED)
        return
    low, blocks, lines = _lines(
        page_table + run.to(gl.int64) * table_width, segment, context - 1, kv_head, page_stride,
        SEGMENT, PAGE, SIZE, BLOCK,
    )  # fmt: skip

    k_low = gl.allocate_shared_memory(DTYPE, [BLOCKS, BLOCK, HALF], keys.layout)
    k_high = gl.allocate_shared_memory(DTYPE, [BLOCKS, BLOCK, HALF], keys.layout)
    v_low = gl.allocate_shared_memory(DTYPE, [AHEAD, BLOCK, HALF], keys.layout)
    v_high = gl.allocate_shared_memory(DTYPE, [AHEAD, BLOCK, HALF], keys.layout)
    p_ring = gl.allocate_shared_memory(DTYPE, [BLOCKS, BM, BLOCK], keys.layout)
    maxima = gl.allocate_shared_memory(gl.float32, [BLOCKS, BM], SMALL)
    row_sums = gl.allocate_shared_memory(gl.float32, [BLOCKS, BM], SMALL)
    k_full = gl.allocate_shared_memory(gl.int64, [BLOCKS, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [BLOCKS, 1], mbarrier.MBarrierLayout())
    for block in gl.static_range(BLOCKS):
        mbarrier.init(k_full.index(block), count=1)
        mbarrier.init(v_full.index(block), count=1)
    chain(CHAINED)

    # The queries, as every warp's tensor core takes them, in halves of the head.
    line3 = gl.arange(0, BM, layout=gl.SliceLayout(0, gl.SliceLayout(2, A3)))
    size3 = gl.arange(0, HALF, layout=gl.SliceLayout(0, gl.SliceLayout(1, A3)))
    row3 = line3 // GROUP
    flat3 = (row_start + row3).to(gl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + line3 % GROUP
    ok3 = (row3 < ROWS) & (row3 < length)
    at3 = (flat3 * SIZE)[None, :, None] + size3[None, None, :]
    at3, _ = gl.broadcast(at3, gl.zeros([BLOCKS, BM, HALF], gl.int64, A3))
    in3, _ = gl.broadcast(ok3[None, :, None], gl.zeros([BLOCKS, BM, HALF], gl.int1, A3))
    q_low = gl.load(q + at3, mask=in3, other=0.0)
    q_high = gl.load(q + at3 + HALF, mask=in3, other=0.0)

    line = gl.arange(0, BM, layout=LINE)
    column = gl.arange(0, HALF, layout=gl.SliceLayout(0, WIDE))
    row = line // GROUP
    row_ok = (row < ROWS) & (row < length)
    flat = (row_start + row).to(gl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + line % GROUP
    line_of = gl.arange(0, BM, layout=gl.SliceLayout(0, gl.SliceLayout(2, EACH)))
    position3 = context - length + line_of // GROUP
    block3 = gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, gl.SliceLayout(2, EACH)))
    key3 = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(1, EACH)))
    ones = gl.full([BLOCKS, BLOCK, 16], 1.0, DTYPE, B3)
    key_row = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, gl.DotOperandLayout(1, WIDE, 2)))

    for block in gl.static_range(BLOCKS):
        known = block < blocks
        _copy(keys, lines[block], k_low, k_high, block, k_full.index(block), known, HALF)
    for block in gl.static_range(AHEAD):
        known = block < blocks
        _copy(values, lines[block], v_low, v_high, block, v_full.index(block), known, HALF)
    for block in gl.static_range(BLOCKS):
        mbarrier.wait(k_full.index(block), 0, pred=block < blocks)
    scores = gl.zeros([BLOCKS, BM, BLOCK], gl.float32, EACH)
    turned = k_low._reinterpret(DTYPE, [BLOCKS, BLOCK, HALF], NVMMA3).permute((0, 2, 1))
    scores = mma_v2(q_low, turned.load(B3), scores)
    turned = k_high._reinterpret(DTYPE, [BLOCKS, BLOCK, HALF], NVMMA3).permute((0, 2, 1))
    scores = mma_v2(q_high, turned.load(B3), scores) * scale
    tl.debug_barrier()  # the keys are read
    for block in gl.static_range(AHEAD, BLOCKS):
        known = block < blocks
        into = block - AHEAD
        _copy(values, lines[block], k_low, k_high, into, v_full.index(block), known, HALF)

    key_at = low + block3[:, None, None] * BLOCK + key3[None, None, :]
    scores = gl.where(key_at <= position3[None, :, None], scores, float("-inf"))
    own = gl.convert_layout(gl.max(scores, axis=2), EVERY)
    flat_maxima = maxima._reinterpret(gl.float32, [BLOCKS, BM], TABLE)
    flat_maxima.store(gl.associative_scan(own, 0, _larger))
    tl.debug_barrier()
    top3 = flat_maxima.load(gl.SliceLayout(2, EACH))
    base3 = gl.where(top3 == float("-inf"), 0.0, top3)
    p = gl.exp2(scores - base3[:, :, None]).to(DTYPE)
    sums = mma_v2(gl.convert_layout(p, A3), ones, gl.zeros([BLOCKS, BM, 16], gl.float32, EACH))
    row_sums._reinterpret(gl.float32, [BLOCKS, BM], TABLE).store(gl.max(sums, axis=2))
    p_ring._reinterpret(DTYPE, [BLOCKS, BM, BLOCK], NVMMA3).store(p)
    tl.debug_barrier()

    m = gl.full([BM], float("-inf"), gl.float32, LINE)
    l = gl.zeros([BM], gl.float32, LINE)
    acc_low = gl.zeros([BM, HALF], gl.float32, WIDE)
    acc_high = gl.zeros([BM, HALF], gl.float32, WIDE)
    for block in gl.static_range(BLOCKS):
        if block < blocks:
            mbarrier.wait(v_full.index(block), 0)
            top = maxima.index(block).load(LINE)
            keep = gl.exp2(m - gl.where(top == float("-inf"), 0.0, top))
            m = top
            l = l * keep + row_sums.index(block).load(LINE)
            weights = p_ring.index(block).load(gl.DotOperandLayout(0, WIDE, 2))
            seen = low + block * BLOCK + key_row < context
            if block < AHEAD:
                left = _values(v_low, block, seen, WIDE)
                right = _values(v_high, block, seen, WIDE)
            else:
                left = _values(k_low, block - AHEAD, seen, WIDE)
                right = _values(k_high, block - AHEAD, seen, WIDE)
            acc_low = mma_v2(weights, left, acc_low * keep[:, None])
            acc_high = mma_v2(weights, right, acc_high * keep[:, None])

    lines_of_rows = total_rows * (KV_HEADS * GROUP)
    at = flat + segment.to(gl.int64) * lines_of_rows
    gl.store(part_m + at, m, mask=row_ok)
    gl.store(part_l + at, l, mask=row_ok)
    into = part_acc + (at * SIZE)[:, None] + column[None, :]
    gl.store(into, acc_low, mask=row_ok[:, None])
    gl.store(into + HALF, acc_high, mask=row_ok[:, None])
    tl.debug_barrier()  # every thread's partial is stored before this program counts
    counter = arrived + gl.program_id(0)
    if gl.atomic_add(counter, 1, sem="acq_rel") < highest:
        return
    gl.store(counter, 0)  # for the next launch
    m = gl.full([BM], float("-inf"), gl.float32, LINE)
    l = gl.zeros([BM], gl.float32, LINE)
    acc_low = gl.zeros([BM, HALF], gl.float32, WIDE)
    acc_high = gl.zeros([BM, HALF], gl.float32, WIDE)
    new_m, new_l, new_low, new_high = _partial(part_m, part_l, part_acc, flat, column, row_ok, SIZE)
    for index in range(highest + 1):
        at = flat + gl.minimum(index + 1, highest).to(gl.int64) * lines_of_rows
        next_m, next_l, next_low, next_high = _partial(
            part_m, part_l, part_acc, at, column, row_ok, SIZE
        )
        top = gl.maximum(m, new_m)
        base = gl.where(top == float("-inf"), 0.0, top)
        old = gl.exp2(m - base)
        new = gl.exp2(new_m - base)
        m = top
        l = l * old + new_l * new
        acc_low = acc_low * old[:, None] + new_low * new[:, None]
        acc_high = acc_high * old[:, None] + new_high * new[:, None]
        new_m, new_l, new_low, new_high = next_m, next_l, next_low, next_high
    into = out + (flat * SIZE)[:, None] + column[None, :]
    low_half = gl.div_rn(acc_low, l[:, None]) + 0.0
    high_half = gl.div_rn(acc_high, l[:, None]) + 0.0
    gl.store(into, low_half.to(DTYPE), mask=row_ok[:, None])
    gl.store(into + HALF, high_half.to(DTYPE), mask=row_ok[:, None])


def suits(
    q: Tensor, kv: KVLayer, batch: AttentionBatch, tiles: int, segments: int, lines: int
) -> bool:
    """Whether this is for it: one wave of programs, of more segments than one."""
    return (
        q.dtype == torch.bfloat16
        and q.shape[2] == SIZE
        and lines == LINES
        and kv.page_tokens % BLOCK == 0
        and tree.BLOCK["cuda"][SIZE] == BLOCK
        and tree.SEGMENT == 8 * BLOCK
        and batch.shared is None
        and 1 < segments
        and tiles * segments <= multiprocessors(q.device)
        and can_chain(q.device)
    )


def launch(
    q: Tensor,
    kv: KVLayer,
    batch: AttentionBatch,
    out: Tensor,
    partials: Sequence[Tensor],
    scale: float,
    segments: int,
) -> None:
    """Attention of runs of one tile each, into out [R, Hq * E].

    Args:
        partials: float32 scratch for values, maxima and sums of every segment.
        scale: of the scores, for a softmax in base 2. segments: of the longest context.
    """
    kv_heads = kv.v.shape[1]
    group = q.shape[1] // kv_heads
    layout = gl.NVMMASharedLayout.get_default_for([BLOCK, SIZE // 2], gl.bfloat16)
    caches = [
        TensorDescriptor.from_tensor(lines_of(cache), [BLOCK, SIZE // 2], layout)
        for cache in (kv.k, kv.v)
    ]
    _decode_kernel[(batch.context_len.shape[0] * kv_heads, segments)](
        q, *caches, out, *partials, arrivals(q.device),
        batch.query_start, batch.context_len, batch.page_table,
        batch.page_table.shape[1], kv.v.stride(0), q.shape[0], scale, ahead(q.device),
        SEGMENT=tree.SEGMENT, BLOCK=BLOCK, PAGE=kv.page_tokens, SIZE=SIZE, KV_HEADS=kv_heads,
        GROUP=group, BM=LINES, ROWS=LINES // group, AHEAD=_AHEAD, num_warps=8,
        **chained(q.device, q.shape[0]),
    )  # fmt: skip
