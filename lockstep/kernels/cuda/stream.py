"""Products of up to 256 rows: programs of one wave that stream their part of a weight once.

The tree is that of `linear.py`. With few rows a product is a read of its weight, and what it
loses lies at its ends: the first loads' way to memory, and programs that have none left. So a
program holds as many output features as give every multiprocessor one (`choose`); a warp of
its own copies them stages ahead, and may start on the weight before the launch ahead of it has
ended. Written in Gluon, which says where each copy is issued and which warp does what;
Triton's own pipeline cannot split its copies around a wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lockstep.kernels.cuda.common import (
    STREAMED_ROWS,
    ahead,
    can_chain,
    chained,
    finish,
    gate,
    multiprocessors,
)

FEW_ROWS = 16  # of the tensor core's smaller instruction

_SHARED_BYTES = 226 << 10  # of a multiprocessor, less what barriers take
_MOST_STAGES = 12
# Stored rows of a strip, and strips, the narrowest first: where a warp reads its operands
# itself, and where warp groups do, which lose on narrow strips side by side.
_FEW = ((16, 1), (32, 1), (16, 3), (64, 1), (32, 3), (64, 2), (64, 3))
_MANY = ((32, 1), (64, 1), (128, 1), (64, 3))


@gluon.jit
def _copy_weight(
    w, w_ring, full, block, stage, first,
    STRIPS: gl.constexpr, WIDTH: gl.constexpr, BK: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Copy a block of the weight into a stage, which is full when that of the rows is there too."""
    bar = full.index(stage)
    mbarrier.expect(bar, 2 * BK * (STRIPS * WIDTH + ROWS))
    for strip in gl.static_range(STRIPS):
        tma.async_copy_global_to_shared(
            w, [first + strip * WIDTH, block * BK], bar, w_ring.index(stage * STRIPS + strip)
        )


@gluon.jit
def _copy_rows(x, x_ring, full, row, block, stage, BK: gl.constexpr):
    """Copy a block of the rows; those beyond the last are zeros."""
    tma.async_copy_global_to_shared(x, [row, block * BK], full.index(stage), x_ring.index(stage))


@gluon.jit
def _feed(
    x, w, x_ring, w_ring, full, empty, row, first, early,
    STRIPS: gl.constexpr, WIDTH: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    BLOCKS: gl.constexpr, ROWS: gl.constexpr, CHAINED: gl.constexpr,
):  # fmt: skip
    """What the feeding warp does: copies, as stages fall empty; with `early` the first stages'
    weights before the launches ahead have ended."""
    AHEAD: gl.constexpr = min(STAGES, BLOCKS)
    if CHAINED:
        if early == 0:
            gdc_wait()
        else:
            gdc_launch_dependents()
    for stage in gl.static_range(AHEAD):
        _copy_weight(w, w_ring, full, stage, stage, first, STRIPS, WIDTH, BK, ROWS)
    if CHAINED:
        gdc_wait()
    for stage in gl.static_range(AHEAD):
        _copy_rows(x, x_ring, full, row, stage, stage, BK)
    stage = 0
    phase = 0
    for block in range(AHEAD, BLOCKS):
        mbarrier.wait(empty.index(stage), phase)
        _copy_weight(w, w_ring, full, block, stage, first, STRIPS, WIDTH, BK, ROWS)
        _copy_rows(x, x_ring, full, row, block, stage, BK)
        last = stage == STAGES - 1
        stage = gl.where(last, 0, stage + 1)
        phase = gl.where(last, phase ^ 1, phase)


@gluon.jit
def _weights(w_ring, index, MMA: gl.constexpr):
    """One strip's block as the tensor core takes it."""
    return w_ring.index(index).permute((1, 0)).load(gl.DotOperandLayout(1, MMA, 2))


@gluon.jit
def _sums(
    x_ring, w_ring, full, empty,
    STRIPS: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr, BLOCKS: gl.constexpr,
    ROWS: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Sums of up to three strips, K ascending, by warps that read a stage into registers."""
    acc0 = gl.zeros([ROWS, WIDTH], gl.float32, MMA)
    acc1 = acc0
    acc2 = acc0
    stage = 0
    phase = 0
    for _ in range(BLOCKS):
        mbarrier.wait(full.index(stage), phase)
        a = x_ring.index(stage).load(gl.DotOperandLayout(0, MMA, 2))
        b0 = _weights(w_ring, stage * STRIPS, MMA)
        b1 = b0
        b2 = b0
        if STRIPS > 1:
            b1 = _weights(w_ring, stage * STRIPS + 1, MMA)
        if STRIPS > 2:
            b2 = _weights(w_ring, stage * STRIPS + 2, MMA)
        # Copies go past the order of loads: without a fence one may land before a load that is
        # under way. The compiler adds it only where one warp does both.
        fence_async_shared()
        tl.debug_barrier()  # every warp has read the stage
        mbarrier.arrive(empty.index(stage), count=1)
        acc0 = mma_v2(a, b0, acc0, input_precision="ieee")
        if STRIPS > 1:
            acc1 = mma_v2(a, b1, acc1, input_precision="ieee")
        if STRIPS > 2:
            acc2 = mma_v2(a, b2, acc2, input_precision="ieee")
        last = stage == STAGES - 1
        stage = gl.where(last, 0, stage + 1)
        phase = gl.where(last, phase ^ 1, phase)
    return acc0, acc1, acc2


@gluon.jit
def _group_sums(
    x_ring, w_ring, full, empty,
    STRIPS: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr, BLOCKS: gl.constexpr,
    ROWS: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """The same for 64 rows and more: by warp groups, whose instructions read the stages."""
    acc0 = gl.zeros([ROWS, WIDTH], gl.float32, MMA)
    acc1 = gl.zeros([ROWS, WIDTH], gl.float32, MMA)
    acc2 = gl.zeros([ROWS, WIDTH], gl.float32, MMA)
    stage = 0
    phase = 0
    before = 0
    for block in range(BLOCKS):
        mbarrier.wait(full.index(stage), phase)
        a = x_ring.index(stage)
        b = w_ring.index(stage * STRIPS).permute((1, 0))
        acc0 = warpgroup_mma(a, b, acc0, is_async=True)
        if STRIPS > 1:
            b = w_ring.index(stage * STRIPS + 1).permute((1, 0))
            acc1 = warpgroup_mma(a, b, acc1, is_async=True)
        if STRIPS > 2:
            b = w_ring.index(stage * STRIPS + 2).permute((1, 0))
            acc2 = warpgroup_mma(a, b, acc2, is_async=True)
        # All but this block's products are done: the stage before is read.
        if STRIPS == 1:
            acc0 = warpgroup_mma_wait(STRIPS, deps=[acc0])
        elif STRIPS == 2:
            acc0, acc1 = warpgroup_mma_wait(STRIPS, deps=[acc0, acc1])
        else:
            acc0, acc1, acc2 = warpgroup_mma_wait(STRIPS, deps=[acc0, acc1, acc2])
        tl.debug_barrier()
        mbarrier.arrive(empty.index(before), count=1, pred=block > 0)
        before = stage
        last = stage == STAGES - 1
        stage = gl.where(last, 0, stage + 1)
        phase = gl.where(last, phase ^ 1, phase)
    if STRIPS == 1:
        acc0 = warpgroup_mma_wait(0, deps=[acc0])
    elif STRIPS == 2:
        acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
    else:
        acc0, acc1, acc2 = warpgroup_mma_wait(0, deps=[acc0, acc1, acc2])
    return acc0, acc1, acc2


@gluon.jit
def _multiply(
    x_ring, w_ring, full, empty,
    STRIPS: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr, BLOCKS: gl.constexpr,
    ROWS: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """What the other warps do."""
    if ROWS >= 64:
        sums = _group_sums(x_ring, w_ring, full, empty, STRIPS, WIDTH, STAGES, BLOCKS, ROWS, MMA)
    else:
        sums = _sums(x_ring, w_ring, full, empty, STRIPS, WIDTH, STAGES, BLOCKS, ROWS, MMA)
    return sums


@gluon.jit
def _store(
    acc, bias, residual, out, row, first, M, N: gl.constexpr,
    ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    WIDTH: gl.constexpr, ROWS: gl.constexpr, MMA: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """One strip's epilogue; `row` and `first` are its first row of x and of the weight."""
    DTYPE: gl.constexpr = out.dtype.element_ty
    if ACTIVATION:
        HALF: gl.constexpr = WIDTH // 2
        ACROSS: gl.constexpr = min(16, HALF // 2)
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
        gates, ups = gl.split(acc.reshape([ROWS, HALF, 2]))
        value = gl.convert_layout(gate(gates, ups, ACTIVATION, DTYPE), LAYOUT)
        columns = first // 2 + gl.arange(0, HALF, layout=gl.SliceLayout(0, LAYOUT))
        rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
        finish(value, bias, residual, out, rows, columns, M, N, HAS_BIAS, HAS_RESIDUAL)
    else:
        columns = first + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, MMA))
        rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))
        finish(acc, bias, residual, out, rows, columns, M, N, HAS_BIAS, HAS_RESIDUAL)


@gluon.jit(do_not_specialize=["M", "early"])
def _stream_kernel(
    x, w, bias, residual, out, M, early,
    N: gl.constexpr, K: gl.constexpr, ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, WIDTH: gl.constexpr, STRIPS: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr, CHAINED: gl.constexpr,
):  # fmt: skip
    """Up to three strips of WIDTH stored rows of the weight, all of K, for ROWS rows.

    With `early` the weight is read before the launches ahead have ended.
    """
    MMA: gl.constexpr = (
        gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDTH, 16])
        if ROWS >= 64
        else gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    )
    BLOCKS: gl.constexpr = K // BK
    row_tiles = gl.cdiv(M, ROWS)
    row = gl.program_id(0) % row_tiles * ROWS
    first = gl.program_id(0) // row_tiles * (STRIPS * WIDTH)
    w_ring = gl.allocate_shared_memory(w.dtype, [STAGES * STRIPS, WIDTH, BK], w.layout)
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, BK], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    acc0, acc1, acc2 = gl.warp_specialize(
        [
            (_multiply, (x_ring, w_ring, full, empty, STRIPS, WIDTH, STAGES, BLOCKS, ROWS, MMA)),
            (
                _feed,
                (
                    x, w, x_ring, w_ring, full, empty, row, first, early,
                    STRIPS, WIDTH, BK, STAGES, BLOCKS, ROWS, CHAINED,
                ),
            ),
        ],
        [1],
        [48],
    )  # fmt: skip
    if CHAINED:
        gdc_wait()
    _store(
        acc0, bias, residual, out, row, first, M, N, ACTIVATION, HAS_BIAS, HAS_RESIDUAL,
        WIDTH, ROWS, MMA, WARPS,
    )  # fmt: skip
    if STRIPS > 1:
        _store(
            acc1, bias, residual, out, row, first + WIDTH, M, N, ACTIVATION, HAS_BIAS, HAS_RESIDUAL,
            WIDTH, ROWS, MMA, WARPS,
        )  # fmt: skip
    if STRIPS > 2:
        _store(
            acc2, bias, residual, out, row, first + 2 * WIDTH, M, N, ACTIVATION, HAS_BIAS,
            HAS_RESIDUAL, WIDTH, ROWS, MMA, WARPS,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stream:
    """Shape of a program.

    Attributes:
        rows: of x. width, strips: stored rows of the weight in a strip, and strips.
        k: inputs of a stage. warps: that multiply. stages: as many as shared memory holds.
    """

    rows: int
    width: int
    strips: int
    k: int
    warps: int

    @property
    def stages(self) -> int:
        stage = 2 * self.k * (self.width * self.strips + self.rows)
        return min(_MOST_STAGES, _SHARED_BYTES // stage)


@lru_cache(maxsize=4096)
def choose(rows: int, stored: int, k: int, programs: int) -> Stream | None:
    """The narrowest shape with which `programs` cover the product of `rows` rows and a weight
    [stored, k], as measured on one H200; None where `linear.py` is as good."""
    if rows > STREAMED_ROWS or k % 256 or stored * k < 1 << 20:
        return None
    if rows <= FEW_ROWS:
        for width, strips in _FEW:
            if width * strips * programs >= stored:
                return Stream(FEW_ROWS, width, strips, 256 if width * strips <= 64 else 128, 4)
        return None
    high = 64 if rows <= 64 else 128
    columns = programs // -(-rows // high)
    width, strips = next((s for s in _MANY if s[0] * s[1] * columns >= stored), _MANY[-1])
    if high == 64:
        return Stream(64, width, strips, 128, 4)
    if strips > 1 and rows > high:
        high = 256
    return Stream(high, width, strips, 64, 8 if width * strips > 64 else 4)


def suits(x: Tensor, weight: Tensor) -> Stream | None:
    """The shape for rows x [M, K] and a stored weight, or None: it is for `linear.py`."""
    rows, k = x.shape
    if rows > STREAMED_ROWS or x.dtype != torch.bfloat16 or not can_chain(x.device):
        return None
    if x.data_ptr() % 16 or weight.data_ptr() % 16:
        return None
    return choose(rows, weight.shape[0], k, multiprocessors(x.device))


def launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    shape: Stream,
    *,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: int,
) -> None:
    """out [M, N] from x [M, K] and the stored weight.

    While a graph is captured its weight is read ahead (`ahead`).
    """
    rows, k = x.shape
    w_layout, x_layout = (
        gl.NVMMASharedLayout.get_default_for([high, shape.k], gl.bfloat16)
        for high in (shape.width, shape.rows)
    )
    programs = -(-weight.shape[0] // (shape.width * shape.strips)) * -(-rows // shape.rows)
    _stream_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [shape.rows, shape.k], x_layout),
        TensorDescriptor.from_tensor(weight, [shape.width, shape.k], w_layout),
        x if bias is None else bias,
        x if residual is None else residual,
        out, rows, ahead(x.device),
        N=out.shape[1], K=k, ACTIVATION=activation, HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None, WIDTH=shape.width, STRIPS=shape.strips, BK=shape.k,
        STAGES=shape.stages, ROWS=shape.rows, WARPS=shape.warps, num_warps=shape.warps,
        **chained(x.device),
    )  # fmt: skip
