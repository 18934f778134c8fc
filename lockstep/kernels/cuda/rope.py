"""Queries, keys and values between their projection and the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.contract import AttentionBatch, KVLayer, QKNorm, RopeTable
from lockstep.kernels.cuda.common import (
    ahead,
    begin,
    chain,
    chained,
    check_rows,
    inverse_rms,
    pair_sum,
    power_of_two,
    scale_normed,
)


@triton.jit(do_not_specialize=["early"], do_not_specialize_on_alignment=["positions", "slots"])
def _write_kv_kernel(
    qkv,
    positions,
    cosine,
    sine,
    slots,
    q_norm,
    k_norm,
    eps,
    q_out,
    k_cache,
    v_cache,
    page_stride,
    early,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    LEVELS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    NORM: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    HEADS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    begin(CHAINED, early)
    DTYPE: tl.constexpr = q_out.dtype.element_ty
    SIZE: tl.constexpr = 2 * HALF
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_q = heads < Q_HEADS
    is_k = (heads >= Q_HEADS) & (heads < Q_HEADS + KV_HEADS)
    is_v = (heads >= Q_HEADS + KV_HEADS) & (heads < Q_HEADS + 2 * KV_HEADS)
    inside = (is_q | is_k | is_v)[:, None]
    half = tl.arange(0, HALF)
    position = tl.load(positions + row).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    c = tl.load(cosine + position * HALF + half)[None, :]
    s = tl.load(sine + position * HALF + half)[None, :]
    if NORM:
        q_low = tl.load(q_norm + half).to(tl.float32)[None, :]
        q_high = tl.load(q_norm + HALF + half).to(tl.float32)[None, :]
        k_low = tl.load(k_norm + half).to(tl.float32)[None, :]
        k_high = tl.load(k_norm + HALF + half).to(tl.float32)[None, :]
    chain(CHAINED)

    source = qkv + row * ((Q_HEADS + 2 * KV_HEADS) * SIZE) + heads[:, None] * SIZE + half[None, :]
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    a = low
    b = high
    if NORM:
        # The tree of `rms_norm` over SIZE elements: its last level adds the two halves.
        squares = pair_sum(low * low, LEVELS) + pair_sum(high * high, LEVELS)
        inverse = inverse_rms(squares, SIZE, eps)[:, None]
        a = scale_normed(low, inverse, tl.where(is_q[:, None], q_low, k_low), UNIT_OFFSET, DTYPE)
        b = scale_normed(high, inverse, tl.where(is_q[:, None], q_high, k_high), UNIT_OFFSET, DTYPE)
    turned_low = (a * c - b * s).to(DTYPE)
    turned_high = (b * c + a * s).to(DTYPE)

    target = q_out + row * (Q_HEADS * SIZE) + heads[:, None] * SIZE + half[None, :]
    tl.store(target, turned_low, mask=is_q[:, None])
    tl.store(target + HALF, turned_high, mask=is_q[:, None])

    stored = slot >= 0  # a padding row of a captured graph has no slot
    base = (slot // PAGE_TOKENS) * page_stride + (slot % PAGE_TOKENS) * SIZE
    k_head = (heads - Q_HEADS)[:, None] * (PAGE_TOKENS * SIZE)
    k_target = k_cache + base + k_head + half[None, :]
    tl.store(k_target, turned_low, mask=is_k[:, None] & stored)
    tl.store(k_target + HALF, turned_high, mask=is_k[:, None] & stored)
    v_head = (heads - Q_HEADS - KV_HEADS)[:, None] * (PAGE_TOKENS * SIZE)
    v_target = v_cache + base + v_head + half[None, :]
    tl.store(v_target, low.to(DTYPE), mask=is_v[:, None] & stored)
    tl.store(v_target + HALF, high.to(DTYPE), mask=is_v[:, None] & stored)


def write_kv(
    qkv: Tensor,
    positions: Tensor,
    rope: RopeTable,
    kv: KVLayer,
    batch: AttentionBatch,
    q_heads: int,
    norm: QKNorm | None,
) -> Tensor:
    """See `Backend.write_kv`. A negative slot stores nothing."""
    kv_heads, size = kv.v.shape[1], kv.v.shape[3]
    rows = check_rows(qkv, (q_heads + 2 * kv_heads) * size, "qkv")
    check_rows(rope.cos, size // 2, "rope.cos")
    check_rows(rope.sin, size // 2, "rope.sin")
    out = torch.empty(rows, q_heads, size, dtype=qkv.dtype, device=qkv.device)
    if rows:
        heads = q_heads + 2 * kv_heads
        tile = min(power_of_two(heads), max(1, 2048 // size))
        _write_kv_kernel[(rows, triton.cdiv(heads, tile))](
            qkv,
            positions,
            rope.cos,
            rope.sin,
            batch.slots,
            qkv if norm is None else norm.q,
            qkv if norm is None else norm.k,
            0.0 if norm is None else norm.eps,
            out,
            kv.k,
            kv.v,
            kv.v.stride(0),
            ahead(qkv.device),
            Q_HEADS=q_heads,
            KV_HEADS=kv_heads,
            HALF=size // 2,
            LEVELS=(size // 2).bit_length() - 1,
            PAGE_TOKENS=kv.page_tokens,
            NORM=norm is not None,
            UNIT_OFFSET=norm is not None and norm.unit_offset,
            HEADS=tile,
            num_warps=4,
            **chained(qkv.device, qkv.shape[0]),
        )
    return out
