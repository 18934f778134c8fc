"""From float32 logits to log-sum-exp, argmax and drawn ids; no value is read on the host.

A row of logits is cut over programs; what crosses programs is either order-free (a
maximum, an integer sum) or added in a fixed tree. Probability mass for top-p is counted
in integer units of 2^-32 of the largest, so its sums have no order either.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels import tree
from lockstep.kernels.contract import SampleBatch
from lockstep.kernels.cuda.common import (
    LAUNCH,
    check_rows,
    exact_exp,
    exact_log,
    pair_sum,
    power_of_two,
)

_BLOCK = 4096  # ids a program takes where no tree depends on it
_SUM_BLOCKS = 4  # blocks of the log-sum-exp tree a program takes


@triton.jit
def _block_sums_kernel(
    logits, maxima, sums, V, blocks,
    BLOCK: tl.constexpr, LEVELS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(logits + row * V + at, mask=at < V, other=float("-inf"))
    top = tl.max(x, axis=1)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = pair_sum(exact_exp(x - base[:, None]), LEVELS)
    tl.store(maxima + row * blocks + block, top, mask=block < blocks)
    tl.store(sums + row * blocks + block, total, mask=block < blocks)


@triton.jit
def _fold_sums_kernel(maxima, sums, out, blocks, LEVELS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, 2**LEVELS)[None, :]
    m = tl.load(maxima + row * blocks + block, mask=block < blocks, other=float("-inf"))
    s = tl.load(sums + row * blocks + block, mask=block < blocks, other=0.0)
    top = tl.max(m, axis=1)
    base = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    total = pair_sum(s * exact_exp(m - base[:, None]), LEVELS)
    value = tl.where(tl.abs(top) == float("inf"), top, base + exact_log(total))
    tl.store(out + row + tl.arange(0, 1), value)


@triton.jit
def _best(value, ids):
    """Largest value (NaN counts as -inf) and the lowest of the ids that have it."""
    value = tl.where(value == value, value, float("-inf"))
    top = tl.max(value, axis=0)
    return top, tl.min(tl.where(value == top, ids, 2147483647), axis=0)


@triton.jit
def _block_best_kernel(logits, values, ids, V, blocks, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * V + at, mask=at < V, other=float("-inf"))
    top, index = _best(x, at)
    tl.store(values + row * blocks + block, top)
    tl.store(ids + row * blocks + block, index)


@triton.jit
def _fold_best_kernel(values, ids, out, blocks, PADDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, PADDED)
    v = tl.load(values + row * blocks + block, mask=block < blocks, other=float("-inf"))
    i = tl.load(ids + row * blocks + block, mask=block < blocks, other=2147483647)
    _, index = _best(v, i)
    tl.store(out + row, index.to(tl.int64))


# --- random numbers -----------------------------------------------------------


@triton.jit
def philox_word(ids, position, choice, key_low, key_high):
    """Word 0 of Philox-4x32-10 (Salmon et al. 2011) at counter (id, position, choice, 0)."""
    c0 = ids.to(tl.uint32)
    c1 = tl.zeros_like(c0) + position.to(tl.uint32)
    c2 = tl.zeros_like(c0) + choice.to(tl.uint32)
    c3 = tl.zeros_like(c0)
    k0 = key_low
    k1 = key_high
    M0: tl.constexpr = 0xD2511F53
    M1: tl.constexpr = 0xCD9E8D57
    for _ in tl.static_range(10):
        a = tl.umulhi(c2, tl.full(c2.shape, M1, tl.uint32)) ^ c1 ^ k0
        b = tl.umulhi(c0, tl.full(c0.shape, M0, tl.uint32)) ^ c3 ^ k1
        c1 = c2 * tl.full(c2.shape, M1, tl.uint32)
        c3 = c0 * tl.full(c0.shape, M0, tl.uint32)
        c0 = a
        c2 = b
        k0 = (k0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    return c0


@triton.jit
def gumbel(ids, position, choice, seed):
    """-log(-log1p(-u)) of each id's uniform number, float32."""
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    x = philox_word(ids, position, choice, low, high)
    u = (x.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    u = tl.minimum(u, 0.9999999403953552)
    # log1p(-u) = log(w) * -u / (w - 1) with w = 1 - u rounded (Kahan).
    w = 1.0 - u
    d = w - 1.0
    rest = tl.where(d == 0.0, -1.0, d)
    e = tl.where(d == 0.0, u, -(exact_log(w) * tl.div_rn(-u, rest)))
    return -exact_log(e)


@triton.jit(do_not_specialize_on_alignment=["seed", "choice", "position"])
def _gumbel_kernel(out, count, seed, choice, position, BLOCK: tl.constexpr):
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    g = gumbel(ids, tl.load(position), tl.load(choice), tl.load(seed))
    tl.store(out + ids, g, mask=ids < count)


# --- selection ----------------------------------------------------------------


@triton.jit
def _scaled(logits, row, at, V, top, temperature):
    """(logit - max) / temperature; -inf where forbidden, NaN or beyond the row."""
    x = tl.load(logits + row * V + at, mask=at < V, other=float("-inf"))
    z = tl.div_rn(x - top, tl.zeros_like(x) + temperature)
    return tl.where(z == z, z, float("-inf"))


@triton.jit
def _order(z):
    """int32 keys in the order of the floats; -0 and +0 are one value."""
    bits = (z + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _mass(z):
    """exp(z) in integer units of 2^-32."""
    return (exact_exp(z) * 4294967296.0).to(tl.int64)


@triton.jit
def _weights(z, at, key_k, id_k, BY_MASS: tl.constexpr):
    """Weight of each id for a selection: a count over all, or mass over what top-k kept."""
    key = _order(z)
    if BY_MASS:
        kept = (z > float("-inf")) & ((key > key_k) | ((key == key_k) & (at <= id_k)))
        weight = tl.where(kept, _mass(z), 0)
    else:
        weight = (z > float("-inf")).to(tl.int64)
    return key, weight


@triton.jit
def _weight_from(
    logits, row, V, top, temperature, threshold, key_k, id_k,
    BLOCK: tl.constexpr, BY_MASS: tl.constexpr,
):  # fmt: skip
    """Weight of the ids whose key is at least `threshold`."""
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        z = _scaled(logits, row, at, V, top, temperature)
        key, weight = _weights(z, at, key_k, id_k, BY_MASS)
        total += tl.where(key >= threshold, weight, 0)
    return tl.sum(total, axis=0)


@triton.jit
def _edge(
    logits, row, V, top, temperature, target, key_k, id_k,
    BLOCK: tl.constexpr, BY_MASS: tl.constexpr,
):  # fmt: skip
    """Key and id at which the descending prefix (ties: lower id first) reaches `target`.

    Largest key whose ids from it on weigh at least `target`, by bisection of the keys
    of [-inf, 0]; then the lowest id among its equals that completes it.
    """
    low = tl.full((), -2139095041, tl.int64)  # the key of -inf
    high = tl.full((), 0, tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        weight = _weight_from(logits, row, V, top, temperature, middle, key_k, id_k, BLOCK, BY_MASS)
        if weight >= target:
            low = middle
        else:
            high = middle - 1
    before = _weight_from(logits, row, V, top, temperature, low + 1, key_k, id_k, BLOCK, BY_MASS)
    index = tl.full((), 2147483647, tl.int64)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        z = _scaled(logits, row, at, V, top, temperature)
        key, weight = _weights(z, at, key_k, id_k, BY_MASS)
        weight = tl.where(key == low, weight, 0)
        reached = (before + tl.cumsum(weight, axis=0) >= target) & (weight > 0)
        index = tl.minimum(index, tl.min(tl.where(reached, at, 2147483647), axis=0).to(tl.int64))
        before += tl.sum(weight, axis=0)
    return low.to(tl.int32), index.to(tl.int32)


@triton.jit(do_not_specialize_on_alignment=["temperatures", "top_ks", "top_ps"])
def _limits_kernel(
    logits, values, limits, maxima, temperatures, top_ks, top_ps, V, blocks,
    BLOCK: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Row maximum, and the (key, id) edges of top-k and top-p; an edge of -inf keeps all."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, PADDED)
    v = tl.load(values + row * blocks + block, mask=block < blocks, other=float("-inf"))
    top = tl.max(v, axis=0)
    tl.store(maxima + row, top)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    key_k = tl.full((), -2147483648, tl.int32)
    id_k = tl.full((), 2147483647, tl.int32)
    key_p = key_k
    id_p = id_k
    if (temperature > 0) & (tl.abs(top) < float("inf")):
        if (top_k > 0) & (top_k < V):
            count = _weight_from(logits, row, V, top, temperature, key_k, key_k, id_k, BLOCK, False)
            if count > top_k:
                key_k, id_k = _edge(
                    logits, row, V, top, temperature, top_k.to(tl.int64), key_k, id_k, BLOCK, False
                )
        if top_p < 1:
            total = _weight_from(logits, row, V, top, temperature, key_p, key_k, id_k, BLOCK, True)
            wanted = tl.ceil(tl.maximum(top_p, 0.0).to(tl.float64) * total.to(tl.float64))
            target = tl.maximum(wanted.to(tl.int64), 1)
            key_p, id_p = _edge(logits, row, V, top, temperature, target, key_k, id_k, BLOCK, True)
    tl.store(limits + row * 4, key_k)
    tl.store(limits + row * 4 + 1, id_k)
    tl.store(limits + row * 4 + 2, key_p)
    tl.store(limits + row * 4 + 3, id_p)


@triton.jit(
    do_not_specialize_on_alignment=["temperatures", "min_ps", "seeds", "choices", "positions"],
)
def _draw_kernel(
    logits, limits, maxima, values, ids, temperatures, min_ps, seeds, choices, positions,
    V, blocks, BLOCK: tl.constexpr,
):  # fmt: skip
    """Best id of a stretch: of z + g where kept, or of the logits for a greedy row."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    top = tl.load(maxima + row)
    temperature = tl.load(temperatures + row)
    min_p = tl.load(min_ps + row)
    # A min_p above 1 keeps nothing, which leaves the most likely id.
    if (temperature > 0) & (tl.abs(top) < float("inf")) & (min_p <= 1):
        z = _scaled(logits, row, at, V, top, temperature)
        key = _order(z)
        key_k = tl.load(limits + row * 4)
        id_k = tl.load(limits + row * 4 + 1)
        key_p = tl.load(limits + row * 4 + 2)
        id_p = tl.load(limits + row * 4 + 3)
        kept = (key > key_k) | ((key == key_k) & (at <= id_k))
        kept = kept & ((key > key_p) | ((key == key_p) & (at <= id_p)))
        kept = kept & (exact_exp(z) >= min_p)
        g = gumbel(at, tl.load(positions + row), tl.load(choices + row), tl.load(seeds + row))
        value = tl.where(kept, z + g, float("-inf"))
    else:
        value = tl.load(logits + row * V + at, mask=at < V, other=float("-inf"))
    best, index = _best(value, at)
    tl.store(values + row * blocks + block, best)
    tl.store(ids + row * blocks + block, index)


def _rows(logits: Tensor) -> tuple[int, int]:
    if logits.dtype != torch.float32:
        raise TypeError(f"logits must be float32, got {logits.dtype}")
    return check_rows(logits, logits.shape[-1], "logits"), logits.shape[1]


def log_sum_exp(logits: Tensor) -> Tensor:
    """See `Backend.log_sum_exp`.

    Tree: in each block of `tree.VOCAB_BLOCK` ids the exponentials over the block's
    maximum, added by neighbours; the blocks, scaled to the row's maximum, likewise.
    """
    rows, vocab = _rows(logits)
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        blocks = triton.cdiv(vocab, tree.VOCAB_BLOCK)
        scratch = torch.empty(2, rows, blocks, dtype=torch.float32, device=logits.device)
        _block_sums_kernel[(rows, triton.cdiv(blocks, _SUM_BLOCKS))](
            logits, scratch[0], scratch[1], vocab, blocks,
            BLOCK=tree.VOCAB_BLOCK, LEVELS=tree.VOCAB_BLOCK.bit_length() - 1,
            COUNT=_SUM_BLOCKS, num_warps=8, **LAUNCH,
        )  # fmt: skip
        _fold_sums_kernel[(rows,)](
            scratch[0], scratch[1], out, blocks,
            LEVELS=power_of_two(blocks).bit_length() - 1, num_warps=1, **LAUNCH,
        )  # fmt: skip
    return out


def _block_best(logits: Tensor, rows: int, vocab: int) -> tuple[Tensor, Tensor]:
    blocks = triton.cdiv(vocab, _BLOCK)
    values = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    _block_best_kernel[(rows, blocks)](
        logits, values, ids, vocab, blocks, BLOCK=_BLOCK, num_warps=8, **LAUNCH
    )
    return values, ids


def _fold_best(values: Tensor, ids: Tensor) -> Tensor:
    rows, blocks = values.shape
    out = torch.empty(rows, dtype=torch.int64, device=values.device)
    _fold_best_kernel[(rows,)](
        values, ids, out, blocks, PADDED=power_of_two(blocks), num_warps=1, **LAUNCH
    )
    return out


def argmax(logits: Tensor) -> Tensor:
    """See `Backend.argmax`; NaN counts as the smallest value."""
    rows, vocab = _rows(logits)
    if not rows:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    return _fold_best(*_block_best(logits, rows, vocab))


def sample(logits: Tensor, batch: SampleBatch) -> Tensor:
    """See `Backend.sample`."""
    rows, vocab = _rows(logits)
    if not rows:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    values, ids = _block_best(logits, rows, vocab)
    blocks = values.shape[1]
    maxima = torch.empty(rows, dtype=torch.float32, device=logits.device)
    limits = torch.empty(rows, 4, dtype=torch.int32, device=logits.device)
    _limits_kernel[(rows,)](
        logits, values, limits, maxima,
        batch.temperature, batch.top_k, batch.top_p, vocab, blocks,
        BLOCK=_BLOCK, PADDED=power_of_two(blocks), num_warps=8, **LAUNCH,
    )  # fmt: skip
    _draw_kernel[(rows, blocks)](
        logits, limits, maxima, values, ids,
        batch.temperature, batch.min_p, batch.seed, batch.choice, batch.position,
        vocab, blocks, BLOCK=_BLOCK, num_warps=8, **LAUNCH,
    )  # fmt: skip
    return _fold_best(values, ids)


def gumbel_noise(
    count: int, seed: int, choice: int, position: int, device: str | torch.device
) -> Tensor:
    """The noise that `sample` adds for ids 0 .. count - 1: float32 [count]."""
    out = torch.empty(count, dtype=torch.float32, device=device)
    key = torch.tensor([seed], dtype=torch.int64, device=device)
    rest = torch.tensor([choice, position], dtype=torch.int32, device=device)
    _gumbel_kernel[(triton.cdiv(count, 256),)](
        out, count, key, rest[:1], rest[1:], BLOCK=256, **LAUNCH
    )
    return out
