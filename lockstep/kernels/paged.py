"""Pages in the plain layout, keys as values: [pages, Hk, page_tokens, E], for torch code."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.kernels import exact
from lockstep.kernels.contract import AttentionBatch, KVLayer, QKNorm, RopeTable


def kv_layer(
    pool: Tensor, page_stride: int, offset: int, kv_heads: int, head_dim: int, page_tokens: int
) -> KVLayer:
    """`Backend.kv_layer` with keys laid out like values."""
    size = kv_heads * page_tokens * head_dim
    shape = (pool.numel() // page_stride, kv_heads, page_tokens, head_dim)
    strides = (page_stride, page_tokens * head_dim, head_dim, 1)
    return KVLayer(
        k=pool.as_strided(shape, strides, offset),
        v=pool.as_strided(shape, strides, offset + size),
        page_tokens=page_tokens,
    )


def copy_pages(pool: Tensor, page_stride: int, pairs: Tensor) -> None:
    """`Backend.copy_pages`, one copy after the other."""
    pages = pool.numel() // page_stride
    for source, target in pairs.tolist():
        if not (0 <= source < pages and 0 <= target < pages):
            raise ValueError(f"page copy {source} -> {target} outside the pool of {pages}")
        begin, end = source * page_stride, target * page_stride
        pool[end : end + page_stride] = pool[begin : begin + page_stride].clone()


def split_heads(qkv: Tensor, q_heads: int, kv: KVLayer) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [R, (Hq + 2 Hk) * E] as queries [R, Hq, E], keys and values [R, Hk, E]."""
    kv_heads, head_dim = kv.v.shape[1], kv.v.shape[3]
    heads = qkv.view(qkv.shape[0], q_heads + 2 * kv_heads, head_dim)
    return heads[:, :q_heads], heads[:, q_heads:-kv_heads], heads[:, -kv_heads:]


def store(kv: KVLayer, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Keys and values [R, Hk, E] into their slots; negative slots are left out."""
    rows = (slots >= 0).nonzero()[:, 0]
    places = slots[rows].long()
    page, token = places // kv.page_tokens, places % kv.page_tokens
    kv.k[page, :, token] = k[rows]
    kv.v[page, :, token] = v[rows]


def write_kv(
    qkv: Tensor,
    positions: Tensor,
    rope: RopeTable,
    kv: KVLayer,
    batch: AttentionBatch,
    q_heads: int,
    norm: QKNorm | None,
    rms_norm: Callable[[Tensor, Tensor, float, bool], Tensor],
) -> Tensor:
    """`Backend.write_kv` over this layout; `rms_norm` is the backend's own."""
    q, k, v = split_heads(qkv, q_heads, kv)
    if norm is not None:
        q = rms_norm(q, norm.q, norm.eps, norm.unit_offset)
        k = rms_norm(k, norm.k, norm.eps, norm.unit_offset)
    cos, sin = rope.cos[positions.long()], rope.sin[positions.long()]
    store(kv, batch.slots, exact.rotate(k, cos, sin), v)
    return exact.rotate(q, cos, sin)


def gather(kv: KVLayer, table: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
    """Keys and values [end - begin, Hk, E] of positions [begin, end) of one run.

    Positions on absent pages (-1) read as zero.
    """
    positions = torch.arange(begin, end, device=table.device)
    pages = table[positions // kv.page_tokens].long()
    present = (pages >= 0)[:, None, None]
    page, token = pages.clamp(min=0), positions % kv.page_tokens
    k, v = kv.k[page, :, token], kv.v[page, :, token]
    zero = torch.zeros((), dtype=k.dtype, device=k.device)
    return torch.where(present, k, zero), torch.where(present, v, zero)
