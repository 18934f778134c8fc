"""What both CPU forms ask of their operands, and of the constants in `tree.py`.

The native form reads by address, where a mismatch would read out of bounds; the torch form
broadcasts, where it would compute something else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.config import ConfigError
from lockstep.kernels import tree
from lockstep.kernels.contract import AttentionBatch, KVLayer, RopeTable, Weight

BLOCK = 32  # keys of a block of attention
LANES = 16  # of a norm: the block of its tree
DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def check_tree() -> None:
    """Refuse constants that these forms were not written for.

    Raises:
        ConfigError: naming both.
    """
    if set(tree.BLOCK["cpu"].values()) != {BLOCK} or tree.NORM_BLOCK["cpu"] != LANES:
        raise ConfigError(
            f"kernels/tree.py asks for CPU blocks {tree.BLOCK['cpu']} and norm block "
            f"{tree.NORM_BLOCK['cpu']}; the CPU kernels have {BLOCK} and {LANES}"
        )


def check_page(page_tokens: int) -> None:
    """Refuse pages of which no whole number fits a block.

    Raises:
        ConfigError: naming both.
    """
    if BLOCK % page_tokens:
        raise ConfigError(f"page_tokens must divide the attention block {BLOCK}, got {page_tokens}")


def code(tensor: Tensor) -> int:
    """The number by which the native form knows a tensor's dtype.

    Raises:
        TypeError: another dtype than float32 or bfloat16.
    """
    try:
        return DTYPES[tensor.dtype]
    except KeyError:
        raise TypeError(f"expected float32 or bfloat16, got {tensor.dtype}") from None


def rows_of(x: Tensor, width: int, what: str) -> int:
    """Rows of a contiguous [R, width] tensor.

    Raises:
        ValueError: another shape or stride.
    """
    shape = x.shape
    if len(shape) != 2 or shape[1] != width or not x.is_contiguous():
        raise ValueError(f"{what} must be contiguous [R, {width}], got {tuple(shape)}")
    return shape[0]


def like(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, what: str) -> Tensor:
    """The operand, which has that shape and dtype.

    Raises:
        ValueError: it has not.
    """
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{what} must be contiguous {shape} {dtype}, got {tuple(tensor.shape)} {tensor.dtype}"
        )
    return tensor


def check_pair(gate: Tensor, up: Tensor) -> None:
    """Refuse matrices that are no gated pair.

    Raises:
        ValueError: naming both shapes and dtypes.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gate {tuple(gate.shape)} {gate.dtype} and up {tuple(up.shape)} {up.dtype} must match"
        )


def check_weight(x: Tensor, weight: Weight, *, gated: bool) -> int:
    """Rows of x [R, K], which go with a weight packed by `pack`, or if gated by `pack_gated`.

    Raises:
        ValueError: dtypes, kind or shape do not go together.
    """
    if weight.dtype != x.dtype or weight.gated != gated:
        kind = "a gated pair" if weight.gated else "no gated pair"
        raise ValueError(f"x is {x.dtype}, the weight {kind} of {weight.dtype}")
    return rows_of(x, weight.k, "x")


def check_ids(ids: Tensor, weight: Weight) -> None:
    """Refuse ids that a packed table has no rows for.

    Raises:
        ValueError: naming the lowest and the highest; or the weight is a gated pair.
    """
    if weight.gated:
        raise ValueError("a gated pair is not a table of embeddings")
    if ids.shape[0]:
        low, high = (int(edge) for edge in ids.aminmax())
        if low < 0 or high >= weight.n:
            raise ValueError(f"ids {low} .. {high} are outside the table of {weight.n} rows")


def check_qkv(
    qkv: Tensor, positions: Tensor, rope: RopeTable, kv: KVLayer, batch: AttentionBatch, heads: int
) -> int:
    """Rows of qkv [R, (Hq + 2 Hk) * E], which goes with a layer's cache and rotation.

    Raises:
        ValueError: naming what does not fit.
    """
    _, kv_heads, _, head_dim = kv.v.shape
    rows = rows_of(qkv, (heads + 2 * kv_heads) * head_dim, "qkv")
    half = rope.cos.shape[1]
    if half != head_dim // 2 or kv.v.dtype != qkv.dtype:
        raise ValueError(
            f"qkv is {qkv.dtype} with heads of {head_dim}, the cache {kv.v.dtype} and the "
            f"rotation's half {half}"
        )
    like(positions, (rows,), torch.int32, "positions")
    like(batch.slots, (rows,), torch.int32, "slots")
    return rows


def check_queries(q: Tensor, kv: KVLayer) -> None:
    """Refuse queries [R, Hq, E] that do not go with a layer's keys.

    Raises:
        ValueError: naming both.
    """
    _, kv_heads, _, head_dim = kv.v.shape
    like(q, (q.shape[0], q.shape[1], head_dim), kv.v.dtype, "q")
    if q.shape[1] % kv_heads:
        raise ValueError(f"q has {q.shape[1]} heads, no multiple of the {kv_heads} key heads")


def logit_rows(logits: Tensor) -> int:
    """Rows of contiguous float32 [R, V].

    Raises:
        TypeError: another dtype.
        ValueError: another shape or stride.
    """
    if logits.dtype != torch.float32:
        raise TypeError(f"logits must be float32, got {logits.dtype}")
    return rows_of(logits, logits.shape[-1], "logits")


def check_columns(rows: int, *columns: Tensor) -> None:
    """Refuse sampling parameters of another number of rows.

    Raises:
        ValueError: naming it.
    """
    for column in columns:
        if column.shape != (rows,):
            raise ValueError(f"sampling parameters must be [{rows}], got {tuple(column.shape)}")
