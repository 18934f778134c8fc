"""Products with low-rank deltas on the rows that have an adapter: three launches.

The float32 sums of the weight's own product are stored; `_shrink_kernel` computes
t = cast(x a^T) and `_expand_kernel` adds t b^T to the sums and ends the row as a plain
product does. Adapters are found by address in a table on the device, so one launch, and
one captured graph, serves any mixture of them; a tile without rows of an adapter skips it.

Ranks are padded with zeros to multiples of 16, which adds exact zeros to a sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels import tree
from lockstep.kernels.contract import (
    Activation,
    LoraPair,
    LoraRows,
    LoraSet,
    LoraWeight,
    Weight,
)
from lockstep.kernels.cuda import linear as linear_ops
from lockstep.kernels.cuda.common import chain, chained, check_rows, product
from lockstep.kernels.lora import check_rows as check_adapters
from lockstep.kernels.lora import make_set, packed, padded_rank

_RANKS = 16  # of a pair, in one program of the first product
_COLUMNS = 64  # outputs of one program of the second
_MOST_SUMS = 1 << 26  # float32 sums at once: 256 MiB
_FEWEST_ROWS = 128
_FIELDS = 6  # begin, n, padded rank, first column of t, address of a, address of b


def pack_lora(pairs: Sequence[LoraPair], n: int, gated: bool, device: torch.device) -> LoraWeight:
    """See `Backend.pack_lora`: a [padded rank, K] and b [n, padded rank] on the device."""

    def lay_out(a: Tensor, b: Tensor, begin: int) -> tuple[Tensor, Tensor]:
        more = padded_rank(a.shape[0]) - a.shape[0]
        a = torch.nn.functional.pad(a.to(device), (0, 0, 0, more))
        return a.contiguous(), torch.nn.functional.pad(b.to(device), (0, more)).contiguous()

    return packed(pairs, n, gated, lay_out)


def lora_set(weights: Sequence[LoraWeight | None], device: torch.device) -> LoraSet:
    """See `Backend.lora_set`; the table is int64 [adapters, pairs, fields]."""
    pairs = max((len(w.pairs) for w in weights if w is not None), default=0)
    table = torch.zeros(len(weights), pairs, _FIELDS, dtype=torch.int64)
    for adapter, weight in enumerate(weights):
        column = 0
        for place, pair in enumerate(weight.pairs if weight is not None else ()):
            rank = padded_rank(pair.rank)
            addresses = pair.a.data_ptr(), pair.b.data_ptr()
            table[adapter, place] = torch.tensor([pair.begin, pair.n, rank, column, *addresses])
            column += rank
    return make_set(weights, table.to(device))


@triton.jit
def _some(mask):
    """Whether any element of a one-dimensional mask is set."""
    return tl.max(mask.to(tl.int32), axis=0) > 0


@triton.jit
def _operand(field, DTYPE: tl.constexpr):
    """The matrix whose address a table's field holds."""
    return tl.multiple_of(tl.load(field).to(tl.pointer_type(DTYPE)), 16)


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["index"])
def _shrink_kernel(
    x, index, table, t, M, K: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, FIELDS: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """BR ranks of one pair, of one tile of rows: t [M, WIDTH]."""
    place = tl.program_id(1)
    entry = table + place * FIELDS
    rank = tl.load(entry + 2)
    first = tl.program_id(2) * BR
    chain(CHAINED)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    mine = tl.load(index + rows, mask=rows < M, other=-1) == place // PAIRS
    if (first < rank) & _some(mine):
        ranks = first + tl.arange(0, BR)
        inner = tl.arange(0, BK)
        x_at = x + tl.where(mine, rows, 0).to(tl.int64)[:, None] * K + inner[None, :]
        a = _operand(entry + 4, x.dtype.element_ty)
        a_at = a + ranks[None, :] * K + inner[:, None]
        acc = tl.zeros((BM, BR), dtype=tl.float32)
        for k in range(0, K, BK):
            if K % BK == 0:
                acc = product(tl.load(x_at), tl.load(a_at), acc)
            else:
                within = k + inner < K
                acc = product(
                    tl.load(x_at, mask=within[None, :], other=0.0),
                    tl.load(a_at, mask=within[:, None], other=0.0),
                    acc,
                )
            x_at += BK
            a_at += BK
        column = tl.load(entry + 3)
        at = t + rows.to(tl.int64)[:, None] * WIDTH + (column + ranks)[None, :]
        tl.store(at, acc.to(t.dtype.element_ty), mask=mine[:, None])


@triton.jit(do_not_specialize=["M", "places"], do_not_specialize_on_alignment=["index"])
def _expand_kernel(
    sums, t, index, table, bias, residual, out, M, places,
    N: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BR: tl.constexpr, FIELDS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Deltas, bias, cast, gate and residual of one tile. N counts output columns."""
    STORED: tl.constexpr = BN * 2 if ACTIVATION else BN
    ALL: tl.constexpr = N * 2 if ACTIVATION else N
    chain(CHAINED)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    stored = tl.program_id(1) * STORED + tl.arange(0, STORED)
    # A gated pair's sums have gate and up in turn; adapters name gate outputs first.
    outputs = (stored % 2) * N + stored // 2 if ACTIVATION else stored
    inside = (rows < M)[:, None] & (stored < ALL)[None, :]
    at = rows.to(tl.int64)[:, None] * ALL + stored[None, :]
    acc = tl.load(sums + at, mask=inside, other=0.0)
    adapters = tl.load(index + rows, mask=rows < M, other=-1)
    # Rows of one adapter stand together, so few adapters meet in a tile.
    last = tl.max(adapters, axis=0)
    first = tl.min(tl.where(adapters < 0, last + 1, adapters), axis=0)
    for place in range(first * PAIRS, min((last + 1) * PAIRS, places)):
        entry = table + place * FIELDS
        begin = tl.load(entry)
        mine = adapters == place // PAIRS
        touched = (outputs >= begin) & (outputs < begin + tl.load(entry + 1)) & (stored < ALL)
        if _some(mine) & _some(touched):
            b = _operand(entry + 5, t.dtype.element_ty)
            rank = tl.load(entry + 2)
            column = tl.load(entry + 3)
            ranks = tl.arange(0, BR)
            t_at = t + rows.to(tl.int64)[:, None] * WIDTH + (column + ranks)[None, :]
            b_at = b + tl.where(touched, outputs - begin, 0)[None, :] * rank + ranks[:, None]
            delta = tl.zeros((BM, STORED), dtype=tl.float32)
            for _ in range(0, rank, BR):
                delta = product(tl.load(t_at, mask=mine[:, None], other=0.0), tl.load(b_at), delta)
                t_at += BR
                b_at += BR
            acc = tl.where(mine[:, None] & touched[None, :], acc + delta, acc)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    linear_ops._finish(
        acc, bias, residual, out, rows, columns, M, N, ACTIVATION, HAS_BIAS, HAS_RESIDUAL
    )


def _adapted(
    x: Tensor,
    weight: Weight,
    lora: LoraRows,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: int = 0,
    rows_per_tile: int | None = None,
) -> Tensor:
    """out [M, N] of x [M, K]; `rows_per_tile` overrides the choice."""
    m, adapters = x.shape[0], lora.adapters
    check_adapters(lora, weight, m)
    # Many rows go by parts, which move no bit: their sums would take as much as a layer's weights.
    part = min(m, max(_FEWEST_ROWS, _MOST_SUMS // weight.n // _FEWEST_ROWS * _FEWEST_ROWS))
    sums = torch.empty(part, weight.n, dtype=torch.float32, device=x.device)
    t = torch.empty(part, max(1, adapters.ranks), dtype=x.dtype, device=x.device)
    for begin in range(0, m, max(1, part)):
        rows = slice(begin, min(begin + part, m))
        count = rows.stop - begin
        _part(
            x[rows], weight, LoraRows(lora.index[rows], adapters), sums[:count], t[:count],
            out[rows], bias, None if residual is None else residual[rows], activation,
            rows_per_tile or (16 if count <= 256 else 64),
        )  # fmt: skip
    return out


def _part(
    x: Tensor,
    weight: Weight,
    lora: LoraRows,
    sums: Tensor,
    t: Tensor,
    out: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: int,
    bm: int,
) -> None:
    """`_adapted` of so many rows as `sums` and `t` have room for."""
    (m, k), n, adapters = x.shape, out.shape[1], lora.adapters
    slices = tree.k_slices("cuda", weight.n, weight.k)
    linear_ops._launch(x, weight.data, sums, slices=slices)
    places = len(adapters.weights) * adapters.pairs
    common = {
        "WIDTH": t.shape[1],
        "PAIRS": max(1, adapters.pairs),
        "BR": _RANKS,
        "FIELDS": _FIELDS,
        "num_warps": 4,
        **chained(x.device),
    }
    if places:
        grid = (triton.cdiv(m, bm), places, adapters.rank // _RANKS)
        bk = 128 if x.dtype == torch.bfloat16 else 32
        _shrink_kernel[grid](
            x, lora.index, adapters.table, t, m, K=k, BM=bm, BK=bk, num_stages=4, **common
        )
    _expand_kernel[(triton.cdiv(m, bm), triton.cdiv(n, _COLUMNS))](
        sums, t, lora.index, adapters.table,
        x if bias is None else bias, x if residual is None else residual, out, m, places,
        N=n, ACTIVATION=activation, HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None, BM=bm, BN=_COLUMNS, **common,
    )  # fmt: skip


def adapted_linear(
    x: Tensor,
    weight: Weight,
    lora: LoraRows,
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    rows_per_tile: int | None = None,
) -> Tensor:
    """See `Backend.adapted_linear`; `rows_per_tile` is for tests and tuning."""
    rows = linear_ops._check(x, weight, gated=False)
    if residual is not None and check_rows(residual, weight.n, "residual") != rows:
        raise ValueError(f"residual must be {(rows, weight.n)}, got {tuple(residual.shape)}")
    out = torch.empty(rows, weight.n, dtype=x.dtype, device=x.device)
    return _adapted(x, weight, lora, out, bias=bias, residual=residual, rows_per_tile=rows_per_tile)


def adapted_gated_linear(
    x: Tensor,
    weight: Weight,
    lora: LoraRows,
    activation: Activation,
    *,
    rows_per_tile: int | None = None,
) -> Tensor:
    """See `Backend.adapted_gated_linear`."""
    rows = linear_ops._check(x, weight, gated=True)
    out = torch.empty(rows, weight.n // 2, dtype=x.dtype, device=x.device)
    code = linear_ops._ACTIVATIONS[activation]
    return _adapted(x, weight, lora, out, activation=code, rows_per_tile=rows_per_tile)
