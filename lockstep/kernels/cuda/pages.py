"""Whole pages of the pool: views of a layer, copy-on-write."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lockstep.config import ConfigError
from lockstep.kernels import tree
from lockstep.kernels.contract import KVLayer
from lockstep.kernels.cuda.common import LAUNCH

_COPY_BLOCK = 1024


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["pairs"])
def _copy_pages_kernel(pool, pairs, count, page_stride, BLOCK: tl.constexpr):
    # One program owns the same stretch of every page, so the pairs' order holds.
    columns = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < page_stride
    for i in range(count):
        source = tl.load(pairs + 2 * i)
        target = tl.load(pairs + 2 * i + 1)
        v = tl.load(pool + source * page_stride + columns, mask=inside)
        tl.store(pool + target * page_stride + columns, v, mask=inside)


def copy_pages(pool: Tensor, page_stride: int, pairs: Tensor) -> None:
    """See `Backend.copy_pages`; page numbers are the caller's to check."""
    if pairs.shape[0]:
        grid = (triton.cdiv(page_stride, _COPY_BLOCK),)
        _copy_pages_kernel[grid](pool, pairs, pairs.shape[0], page_stride, _COPY_BLOCK, **LAUNCH)


def kv_layer(
    pool: Tensor, page_stride: int, offset: int, kv_heads: int, head_dim: int, page_tokens: int
) -> KVLayer:
    """See `Backend.kv_layer`; keys and values are both [pages, Hk, page_tokens, E].

    Raises:
        ConfigError: a head size or page length that the kernels cannot take.
    """
    block = tree.BLOCK["cuda"].get(head_dim)
    if block is None:
        known = ", ".join(str(size) for size in sorted(tree.BLOCK["cuda"]))
        raise ConfigError(f"head_dim must be one of {known} on CUDA, got {head_dim}")
    if block % page_tokens and page_tokens % block:
        raise ConfigError(f"page_tokens must divide the block of {block} keys, got {page_tokens}")
    size = kv_heads * page_tokens * head_dim
    pages = pool.numel() // page_stride
    shape = (pages, kv_heads, page_tokens, head_dim)
    stride = (page_stride, page_tokens * head_dim, head_dim, 1)
    return KVLayer(
        k=pool.as_strided(shape, stride, offset),
        v=pool.as_strided(shape, stride, offset + size),
        page_tokens=page_tokens,
    )
