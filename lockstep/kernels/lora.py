"""What every form of the LoRA operations shares: checks, the folded scale, and a form in torch.

The tree is stated at `Backend.adapted_linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from lockstep.kernels.contract import (
    LoraPair,
    LoraRows,
    LoraSet,
    LoraWeight,
    PackedLoraPair,
    Weight,
)


def check_pairs(pairs: Sequence[LoraPair], n: int, gated: bool) -> None:
    """Refuse pairs that cannot act on one linear with n outputs.

    Raises:
        ValueError: shapes, dtypes or ranges do not fit, naming the pair.
    """
    if not pairs:
        raise ValueError("a LoRA weight needs at least one pair")
    k, dtype = pairs[0].a.shape[-1], pairs[0].a.dtype
    free = 0
    for pair in sorted(pairs, key=lambda pair: pair.begin):
        shapes = f"a {tuple(pair.a.shape)} {pair.a.dtype}, b {tuple(pair.b.shape)} {pair.b.dtype}"
        if pair.a.shape[1:] != (k,) or pair.a.dtype != dtype or pair.b.dtype != dtype:
            raise ValueError(f"LoRA pairs of one linear must share K ({k}) and {dtype}: {shapes}")
        if pair.b.dim() != 2 or pair.a.shape[0] != pair.b.shape[1] or not pair.b.numel():
            raise ValueError(f"LoRA needs a [rank, {k}] and b [outputs, rank]: {shapes}")
        end = pair.begin + pair.b.shape[0]
        if pair.begin < free or end > n or (gated and pair.begin < n // 2 < end):
            raise ValueError(
                f"LoRA pair on outputs {pair.begin} .. {end} overlaps another, or leaves the "
                f"{n} outputs{' or their gate and up halves' if gated else ''}"
            )
        free = end


def folded(pair: LoraPair) -> Tensor:
    """b times scale, rounded once to b's dtype."""
    b = pair.b.detach()
    return b if pair.scale == 1.0 else (b.float() * pair.scale).to(b.dtype)


def packed(
    pairs: Sequence[LoraPair],
    n: int,
    gated: bool,
    lay_out: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]],
) -> LoraWeight:
    """`Backend.pack_lora`; `lay_out` takes a, the folded b and the pair's first output."""
    check_pairs(pairs, n, gated)
    done = []
    for pair in sorted(pairs, key=lambda pair: pair.begin):
        a, b = lay_out(pair.a.detach(), folded(pair), pair.begin)
        done.append(PackedLoraPair(a, b, pair.begin, pair.b.shape[0], pair.a.shape[0]))
    first = pairs[0].a
    return LoraWeight(tuple(done), n, first.shape[1], first.dtype, gated)


def make_set(weights: Sequence[LoraWeight | None], table: Tensor) -> LoraSet:
    """`Backend.lora_set` with the backend's table.

    Raises:
        ValueError: adapters of different linears, naming them.
    """
    present = [w for w in weights if w is not None]
    shapes = {(w.n, w.k, w.dtype, w.gated) for w in present}
    if len(shapes) > 1:
        raise ValueError(f"LoRA weights of one set must be for one linear, got {shapes}")
    padded = [[padded_rank(pair.rank) for pair in w.pairs] for w in present]
    return LoraSet(
        tuple(weights),
        table,
        pairs=max(map(len, padded), default=0),
        rank=max(map(max, padded), default=0),
        ranks=max(map(sum, padded), default=0),
    )


def padded_rank(rank: int) -> int:
    """The next multiple of 16, in which tensor cores multiply."""
    return -(-rank // 16) * 16


def check_rows(lora: LoraRows, weight: Weight, rows: int) -> None:
    """Refuse adapters of another linear, or an index of another number of rows.

    Raises:
        ValueError: naming both.
    """
    if lora.index.shape[0] != rows:
        raise ValueError(f"LoRA index is for {lora.index.shape[0]} rows, x has {rows}")
    for part in lora.adapters.weights:
        if part is not None:
            found = (part.n, part.k, part.dtype, part.gated)
            wanted = (weight.n, weight.k, weight.dtype, weight.gated)
            if found != wanted:
                raise ValueError(f"LoRA is for a linear {found}, the weight is {wanted}")
            return  # a set's weights are alike


def add_deltas(
    acc: Tensor, x: Tensor, lora: LoraRows, product: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Float32 acc [R, N] with the deltas of x [R, K], in torch.

    Args:
        product: rows [M, K] times a packed a or b: float32 [M, ...]. It must treat every
            row alike, whichever rows come with it.
    """
    for adapter, weight in enumerate(lora.adapters.weights):
        rows = (lora.index == adapter).nonzero()[:, 0]
        if weight is None or not len(rows):
            continue
        mine = x[rows]
        for pair in weight.pairs:
            t = product(mine, pair.a)[:, : pair.rank].to(x.dtype)
            delta = product(t, pair.b)[:, : pair.n]
            acc[rows, pair.begin : pair.begin + pair.n] += delta
    return acc
