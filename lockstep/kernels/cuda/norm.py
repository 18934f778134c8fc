"""RMS norm and embedding: one program a row.

Norm tree: squares of the row, padded with zeros to a power of two, added by
neighbours (`pair_sum`); blocks of `tree.NORM_BLOCK` are subtrees of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.cuda.common import (
    chain,
    chained,
    check_rows,
    inverse_rms,
    pair_sum,
    power_of_two,
    scale_normed,
)


@triton.jit
def _rms_norm_kernel(
    x,
    weight,
    residual,
    out,
    eps,
    D: tl.constexpr,
    LEVELS: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    CHAINED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, 2**LEVELS)
    inside = columns < D
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    chain(CHAINED)
    v = tl.load(x + row * D + columns, mask=inside, other=0.0).to(tl.float32)
    total = pair_sum(tl.reshape(v * v, [1, 2**LEVELS]), LEVELS)
    inverse = tl.reshape(
        tl.broadcast_to(inverse_rms(total, D, eps)[:, None], [1, 2**LEVELS]), [2**LEVELS]
    )
    y = scale_normed(v, inverse, w, UNIT_OFFSET, out.dtype.element_ty)
    if HAS_RESIDUAL:
        y = tl.load(residual + row * D + columns, mask=inside, other=0.0).to(tl.float32) + y
    tl.store(out + row * D + columns, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["ids"])
def _embedding_kernel(
    ids, table, out, scale, K: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr
):  # fmt: skip
    chain(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < K
    index = tl.load(ids + row).to(tl.int64)
    v = tl.load(table + index * K + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * K + columns, (v * scale).to(out.dtype.element_ty), mask=inside)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, unit_offset: bool, residual: Tensor | None
) -> Tensor:
    """See `Backend.rms_norm`."""
    size = x.shape[-1]
    rows = check_rows(x, size, "x")
    check_rows(weight.view(1, -1), size, "norm weight")
    if residual is not None and check_rows(residual, size, "residual") != rows:
        raise ValueError(f"residual must be {tuple(x.shape)}, got {tuple(residual.shape)}")
    out = torch.empty_like(x)
    if rows:
        padded = power_of_two(size)
        _rms_norm_kernel[(rows,)](
            x,
            weight,
            x if residual is None else residual,
            out,
            eps,
            D=size,
            LEVELS=padded.bit_length() - 1,
            UNIT_OFFSET=unit_offset,
            HAS_RESIDUAL=residual is not None,
            num_warps=max(1, min(8, padded // 512)),
            **chained(x.device, rows),
        )
    return out


def embedding(ids: Tensor, table: Tensor, scale: float) -> Tensor:
    """Rows of table [N, K] times the scale (already rounded to the table's dtype)."""
    k = table.shape[1]
    out = torch.empty(ids.shape[0], k, dtype=table.dtype, device=table.device)
    if ids.shape[0]:
        block = min(1024, power_of_two(k))
        grid = (ids.shape[0], triton.cdiv(k, block))
        options = chained(table.device, ids.shape[0])
        _embedding_kernel[grid](ids, table, out, scale, K=k, BLOCK=block, **options)
    return out
