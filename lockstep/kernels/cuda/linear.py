"""Products of rows with a weight [N, K], and what follows them in the same launch.

Tree: K ascending into one float32 accumulator a slice (`tree.k_slices`), slices added
ascending. The tile, the pipeline, the instruction (`mma.sync` or `wgmma`), plain loads
or bulk copies, and slices in sequence or in parallel do not enter it.

A gated pair is stored with gate and up rows in turn, so that one accumulator of twice
the tile's output columns holds both, and a column's two values lie in one thread.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lockstep.kernels import tree
from lockstep.kernels.contract import Activation, Weight
from lockstep.kernels.cuda import stream
from lockstep.kernels.cuda.common import (
    chain,
    chained,
    check_rows,
    finish,
    gate,
    multiprocessors,
    product,
)
from lockstep.kernels.cuda.tuning import Tile, choose

_ACTIVATIONS: dict[Activation, int] = {"silu": 1, "gelu_tanh": 2}
# Programs that fill the device: below it, slices run in parallel.
_SPLIT_BELOW = 264
# Elements of a tile that is stored in float32 from a bfloat16 product: it goes through
# shared memory beside the pipeline's stages.
_WIDEST_FLOAT32 = 128 * 128


@triton.jit
def _tile_at(index, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Row and column of a tile; GROUP row tiles share a column's weights while they are hot."""
    per_group = GROUP * column_tiles
    first = (index // per_group) * GROUP
    height = min(row_tiles - first, GROUP)
    within = index % per_group
    return first + within % height, within // height


@triton.jit
def _finish(
    acc, bias, residual, out, rows, columns, M, N: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """`finish`, after the gate: with ACTIVATION acc has the gate and up values of each of
    `columns` in turn."""
    value = acc
    if ACTIVATION:
        pairs = tl.reshape(acc, [acc.shape[0], acc.shape[1] // 2, 2])
        gates, ups = tl.split(pairs)
        value = gate(gates, ups, ACTIVATION, out.dtype.element_ty)
    finish(value, bias, residual, out, rows, columns, M, N, HAS_BIAS, HAS_RESIDUAL)


@triton.jit(do_not_specialize=["M"])
def _plain_kernel(
    x, w, bias, residual, out, partials, M,
    N: tl.constexpr, K: tl.constexpr, SLICE: tl.constexpr, SPLIT: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """One program a tile (and a slice, with SPLIT). N counts output columns."""
    WIDTH: tl.constexpr = 2 if ACTIVATION else 1  # stored rows of an output column
    row_tile, column_tile = _tile_at(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    part = tl.program_id(1)
    rows = row_tile * BM + tl.arange(0, BM)
    stored = column_tile * (BN * WIDTH) + tl.arange(0, BN * WIDTH)
    inner = tl.arange(0, BK)
    # Rows beyond the end read row 0 and are never stored: no mask in the loop.
    x_rows = tl.where(rows < M, rows, 0).to(tl.int64)
    w_rows = tl.where(stored < N * WIDTH, stored, 0).to(tl.int64)
    begin = 0
    end = K
    if SPLIT:
        begin = part * SLICE
        end = min(begin + SLICE, K)
    x_at = x + x_rows[:, None] * K + (begin + inner)[None, :]
    w_at = w + w_rows[None, :] * K + (begin + inner)[:, None]
    chain(CHAINED)
    acc = tl.zeros((BM, BN * WIDTH), dtype=tl.float32)
    # -0 + v is v for every v, so the first slice enters unchanged.
    total = tl.full((BM, BN * WIDTH), -0.0, dtype=tl.float32)
    for k in range(begin, end, BK):
        if K % BK == 0:
            a = tl.load(x_at)
            b = tl.load(w_at)
        else:
            a = tl.load(x_at, mask=(k + inner < K)[None, :], other=0.0)
            b = tl.load(w_at, mask=(k + inner < K)[:, None], other=0.0)
        acc = product(a, b, acc)
        if SLICE < K and not SPLIT:
            if (k + BK) % SLICE == 0 or k + BK >= K:
                total = total + acc
                acc = tl.zeros((BM, BN * WIDTH), dtype=tl.float32)
        x_at += BK
        w_at += BK
    if SLICE < K and not SPLIT:
        acc = total
    if SPLIT:
        inside = (rows < M)[:, None] & (stored < N * WIDTH)[None, :]
        line = part.to(tl.int64) * M + rows
        tl.store(partials + line[:, None] * (N * WIDTH) + stored[None, :], acc, mask=inside)
    else:
        columns = column_tile * BN + tl.arange(0, BN)
        _finish(
            acc, bias, residual, out, rows, columns, M, N,
            ACTIVATION, HAS_BIAS, HAS_RESIDUAL,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _fold_kernel(
    partials, bias, residual, out, M, N: tl.constexpr,
    SLICES: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, BN: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Add the slices of one row's stretch ascending, then finish it."""
    chain(CHAINED)
    WIDTH: tl.constexpr = 2 if ACTIVATION else 1
    rows = tl.program_id(0) + tl.arange(0, 1)
    stored = tl.program_id(1) * (BN * WIDTH) + tl.arange(0, BN * WIDTH)
    inside = (rows < M)[:, None] & (stored < N * WIDTH)[None, :]
    acc = tl.full((1, BN * WIDTH), -0.0, dtype=tl.float32)
    for part in tl.static_range(SLICES):
        line = part * M.to(tl.int64) + rows
        at = line[:, None] * (N * WIDTH) + stored[None, :]
        acc = acc + tl.load(partials + at, mask=inside, other=0.0)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    _finish(
        acc, bias, residual, out, rows, columns, M, N,
        ACTIVATION, HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _bulk_kernel(
    x, w, bias, residual, out, M,
    N: tl.constexpr, K: tl.constexpr, SLICE: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    CHAINED: tl.constexpr, PROGRAMS: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """A program walks tiles with a stride; x and w are descriptors for the bulk copy engine."""
    WIDTH: tl.constexpr = 2 if ACTIVATION else 1
    row_tiles = tl.cdiv(M, BM)
    column_tiles = tl.cdiv(N, BN)
    chain(CHAINED)
    for index in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS, flatten=FLAT):
        row_tile, column_tile = _tile_at(index, row_tiles, column_tiles, GROUP)
        acc = tl.zeros((BM, BN * WIDTH), dtype=tl.float32)
        total = tl.full((BM, BN * WIDTH), -0.0, dtype=tl.float32)
        for block in range(tl.cdiv(K, BK)):
            a = x.load([row_tile * BM, block * BK])
            b = w.load([column_tile * (BN * WIDTH), block * BK])
            acc = product(a, b.T, acc)
            if SLICE < K:
                if ((block + 1) * BK) % SLICE == 0 or (block + 1) * BK >= K:
                    total = total + acc
                    acc = tl.zeros((BM, BN * WIDTH), dtype=tl.float32)
        if SLICE < K:
            acc = total
        rows = row_tile * BM + tl.arange(0, BM)
        columns = column_tile * BN + tl.arange(0, BN)
        _finish(
            acc, bias, residual, out, rows, columns, M, N,
            ACTIVATION, HAS_BIAS, HAS_RESIDUAL,
        )  # fmt: skip


def _bulk_allowed(x: Tensor, weight: Tensor) -> bool:
    """The bulk copy engine wants 16-byte rows and addresses."""
    row_bytes = x.shape[1] * x.element_size()
    return not (row_bytes % 16 or x.data_ptr() % 16 or weight.data_ptr() % 16)


def _launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    slices: int,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: int = 0,
    tile: Tile | None = None,
    split: bool | None = None,
) -> Tensor:
    """out [M, N] from x [M, K] and the stored weight; `tile` and `split` override the choice."""
    m, k = x.shape
    n = out.shape[1]
    if not m:
        return out
    if tile is None and slices == 1 and not split:
        shape = stream.suits(x, weight)
        if shape is not None:
            stream.launch(
                x, weight, out, shape, bias=bias, residual=residual, activation=activation
            )
            return out
    if tile is None:
        tile = choose(m, n, k, x.dtype, bool(activation))
        if out.dtype != x.dtype and tile.m * tile.n > _WIDEST_FLOAT32:
            tile = replace(tile, n=_WIDEST_FLOAT32 // tile.m)
    length = tree.slice_length(k, slices)
    width = 2 if activation else 1
    launch = chained(x.device)
    options = {
        "N": n,
        "K": k,
        "SLICE": length,
        "ACTIVATION": activation,
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "BM": tile.m,
        "BN": tile.n,
        "BK": tile.k,
        "GROUP": tile.group,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **launch,
    }
    bias = x if bias is None else bias
    residual = x if residual is None else residual
    tiles = triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n)
    if tile.bulk and _bulk_allowed(x, weight):
        programs = min(tiles, multiprocessors(x.device))
        _bulk_kernel[(programs,)](
            TensorDescriptor.from_tensor(x, [tile.m, tile.k]),
            TensorDescriptor.from_tensor(weight, [tile.n * width, tile.k]),
            bias, residual, out, m,
            PROGRAMS=programs, FLAT=slices == 1, **options,
        )  # fmt: skip
        return out
    parts = triton.cdiv(k, length)
    split = parts > 1 and (tiles < _SPLIT_BELOW if split is None else split)
    if not split:
        _plain_kernel[(tiles, 1)](x, weight, bias, residual, out, x, m, SPLIT=False, **options)
        return out
    partials = torch.empty(parts * m * n * width, dtype=torch.float32, device=x.device)
    _plain_kernel[(tiles, parts)](
        x, weight, bias, residual, out, partials, m, SPLIT=True, **options
    )
    _fold_kernel[(m, triton.cdiv(n, 512))](
        partials, bias, residual, out, m, n,
        SLICES=parts, ACTIVATION=activation, HAS_BIAS=options["HAS_BIAS"],
        HAS_RESIDUAL=options["HAS_RESIDUAL"], BN=512, num_warps=4, **launch,
    )  # fmt: skip
    return out


def _check(x: Tensor, weight: Weight, gated: bool) -> int:
    if weight.dtype != x.dtype or weight.gated != gated:
        raise ValueError(f"x is {x.dtype}, weight {weight.dtype}{' gated' if weight.gated else ''}")
    return check_rows(x, weight.k, "x")


def linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    tile: Tile | None = None,
    split: bool | None = None,
) -> Tensor:
    """See `Backend.linear`; `tile` and `split` are for tests and tuning."""
    rows = _check(x, weight, gated=False)
    if residual is not None and check_rows(residual, weight.n, "residual") != rows:
        raise ValueError(f"residual must be {(rows, weight.n)}, got {tuple(residual.shape)}")
    out = torch.empty(rows, weight.n, dtype=x.dtype, device=x.device)
    slices = tree.k_slices("cuda", weight.n, weight.k)
    return _launch(
        x, weight.data, out, slices=slices, bias=bias, residual=residual, tile=tile, split=split
    )


def logits(x: Tensor, weight: Weight, *, tile: Tile | None = None) -> Tensor:
    """See `Backend.logits`."""
    rows = _check(x, weight, gated=False)
    out = torch.empty(rows, weight.n, dtype=torch.float32, device=x.device)
    slices = tree.k_slices("cuda", weight.n, weight.k)
    return _launch(x, weight.data, out, slices=slices, tile=tile)


def gated_linear(
    x: Tensor, weight: Weight, activation: Activation, *, tile: Tile | None = None
) -> Tensor:
    """See `Backend.gated_linear`."""
    rows = _check(x, weight, gated=True)
    out = torch.empty(rows, weight.n // 2, dtype=x.dtype, device=x.device)
    slices = tree.k_slices("cuda", weight.n, weight.k)
    return _launch(
        x, weight.data, out, slices=slices, activation=_ACTIVATIONS[activation], tile=tile
    )
