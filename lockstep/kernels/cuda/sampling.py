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
    arrivals,
    check_rows,
    exact_exp,
    exact_log,
    pair_sum,
    power_of_two,
)

_BLOCK = 4096  # ids a program takes where no tree depends on it
_SUB = 256  # of these at once in a search
_DRAWN = 512  # of these at once in a draw
_WAYS = 16  # parts into which a turn of a search cuts the keys that are left
_TURNS = 9  # after which one key is left: the first parts them by logit, the others by sixteen
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
def _weights(z, key, at, key_k, id_k, BY_MASS: tl.constexpr):
    """Weight of each id for a selection: a count over all, or mass over what top-k kept."""
    if BY_MASS:
        kept = (z > float("-inf")) & ((key > key_k) | ((key == key_k) & (at <= id_k)))
        weight = tl.where(kept, _mass(z), 0)
    else:
        weight = (z > float("-inf")).to(tl.int64)
    return weight


@triton.jit(do_not_specialize_on_alignment=["temperatures", "top_ks", "top_ps"])
def _begin_kernel(
    values, maxima, limits, lows, highs, targets, temperatures, top_ks, top_ps, rows, V, blocks,
    PADDED: tl.constexpr,
):  # fmt: skip
    """Row maximum; limits that keep all; and where the two searches of a row begin.

    A search looks among the keys low .. high of [-inf, 0] for the largest whose ids from it
    on weigh at least the target. A row that does not cut has the target 0, and no keys.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, PADDED)
    v = tl.load(values + row * blocks + block, mask=block < blocks, other=float("-inf"))
    top = tl.max(v, axis=0)
    tl.store(maxima + row, top)
    for edge in tl.static_range(2):
        tl.store(limits + row * 4 + 2 * edge, -2147483648)
        tl.store(limits + row * 4 + 2 * edge + 1, 2147483647)
    drawn = (tl.load(temperatures + row) > 0) & (tl.abs(top) < float("inf"))
    top_k = tl.load(top_ks + row)
    by_count = drawn & (top_k > 0) & (top_k < V)
    tl.store(lows + row, tl.where(by_count, -2139095041, 0))  # the key of -inf
    tl.store(highs + row, 0)
    tl.store(targets + row, tl.where(by_count, top_k, 0).to(tl.int64))
    by_mass = drawn & (tl.load(top_ps + row) < 1)
    tl.store(lows + rows + row, tl.where(by_mass, -2139095041, 0))
    tl.store(highs + rows + row, 0)
    tl.store(targets + rows + row, tl.where(by_mass, 1, 0).to(tl.int64))  # until the sum is known


@triton.jit
def _left(partials, bases, ways, row, stretch, known, WAYS: tl.constexpr):
    """Weight of a stretch's ids above the keys that a search's last turn left, and of those."""
    way = tl.load(ways + row)  # -1 where all ids together weigh too little
    after = way + 1 < WAYS
    above = tl.load(partials + stretch * WAYS + way + 1, mask=known & after, other=0)
    base = tl.where(after, above, tl.load(bases + stretch, mask=known, other=0))
    some = tl.load(partials + stretch * WAYS + way, mask=known & (way >= 0), other=0)
    return base, tl.where(way >= 0, some - base, 0)


@triton.jit(do_not_specialize_on_alignment=["temperatures", "top_ps"])
def _narrow_kernel(
    logits, limits, maxima, lows, highs, targets, partials, bases, ways, arrived,
    temperatures, top_ps, V, blocks,
    BLOCK: tl.constexpr, SUB: tl.constexpr, WAYS: tl.constexpr, PADDED: tl.constexpr,
    BY_MASS: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Cut the keys left to a row's search to one of WAYS parts.

    Every program weighs its stretch of ids from WAYS keys on; the last to arrive adds the
    stretches, integers in any order, and decides. A stretch without ids among the keys that
    are left is not read: what lies above them is known from the turn before.
    """
    row = tl.program_id(0).to(tl.int64)
    low = tl.load(lows + row)
    high = tl.load(highs + row)
    if low >= high:
        return
    way = tl.arange(0, WAYS)
    if FIRST:  # logits 15, 14, ... 1 below the largest: where edges are
        keys = tl.where(way == 0, low.to(tl.int32), _order((way - WAYS).to(tl.float32)))
    else:
        keys = (low + ((high - low) * way.to(tl.int64) + (WAYS - 1)) // WAYS).to(tl.int32)
    stretch = row * blocks + tl.program_id(1)
    base = tl.zeros((1,), dtype=tl.int64)
    some = base + 1
    if not FIRST:
        mine = stretch + tl.arange(0, 1)
        base, some = _left(partials, bases, ways, row, mine, mine >= 0, WAYS)
    # Counts of a stretch fit 32 bits.
    SUM: tl.constexpr = tl.int64 if BY_MASS else tl.int32
    sums = tl.zeros((SUB, WAYS), dtype=SUM)
    if tl.max(some, axis=0) != 0:
        top = tl.load(maxima + row)
        temperature = tl.load(temperatures + row)
        key_k = tl.load(limits + row * 4)
        id_k = tl.load(limits + row * 4 + 1)
        begin = tl.program_id(1) * BLOCK
        for start in range(begin, min(begin + BLOCK, V), SUB):
            at = start + tl.arange(0, SUB)
            z = _scaled(logits, row, at, V, top, temperature)
            key = _order(z)
            left = (key >= low) & (key <= high)
            if tl.max(left.to(tl.int32), axis=0) > 0:
                weight = tl.where(left, _weights(z, key, at, key_k, id_k, BY_MASS), 0).to(SUM)
                sums += tl.where(key[:, None] >= keys[None, :], weight[:, None], 0)
    tl.debug_barrier()  # every thread has read what the turn before left
    tl.store(bases + stretch + tl.arange(0, 1), base)
    tl.store(partials + stretch * WAYS + way, tl.sum(sums, axis=0).to(tl.int64) + base)
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") < blocks - 1:
        return
    tl.store(arrived + row, 0)
    block = tl.arange(0, PADDED)
    every = (row * blocks + block)[:, None] * WAYS + way[None, :]
    found = tl.load(partials + every, mask=(block < blocks)[:, None], other=0, cache_modifier=".cg")
    weight = tl.sum(found, axis=0)
    target = tl.load(targets + row)
    if BY_MASS and FIRST:  # the first of the keys is that of -inf: the whole mass
        total = tl.max(weight, axis=0)
        wanted = tl.ceil(
            tl.maximum(tl.load(top_ps + row), 0.0).to(tl.float64) * total.to(tl.float64)
        )
        target = tl.maximum(wanted.to(tl.int64), 1)
        tl.store(targets + row, target)
    enough = weight >= target
    wide = keys.to(tl.int64)
    tl.store(ways + row, tl.sum(enough.to(tl.int32), axis=0) - 1)
    tl.store(lows + row, tl.max(tl.where(enough, wide, low), axis=0))
    tl.store(highs + row, tl.min(tl.where(enough, high, wide - 1), axis=0))


@triton.jit(do_not_specialize_on_alignment=["temperatures"])
def _edge_kernel(
    logits, limits, maxima, lows, targets, partials, bases, ways, temperatures, V, blocks,
    BLOCK: tl.constexpr, PADDED: tl.constexpr, WAYS: tl.constexpr, BY_MASS: tl.constexpr,
):  # fmt: skip
    """Key and id at which the descending prefix (ties: lower id first) reaches the target."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    if target == 0:
        return
    edge = tl.load(lows + row).to(tl.int32)
    top = tl.load(maxima + row)
    temperature = tl.load(temperatures + row)
    key_k = tl.load(limits + row * 4)
    id_k = tl.load(limits + row * 4 + 1)
    block = tl.arange(0, PADDED)
    above, equal = _left(partials, bases, ways, row, row * blocks + block, block < blocks, WAYS)
    before = tl.sum(above, axis=0)
    reached = (before + tl.cumsum(equal, axis=0) >= target) & (equal > 0)
    first = tl.min(tl.where(reached, block, PADDED), axis=0)
    before += tl.sum(tl.where(block < first, equal, 0), axis=0)
    at = first * BLOCK + tl.arange(0, BLOCK)
    z = _scaled(logits, row, at, V, top, temperature)
    key = _order(z)
    weight = tl.where(key == edge, _weights(z, key, at, key_k, id_k, BY_MASS), 0)
    reached = (before + tl.cumsum(weight, axis=0) >= target) & (weight > 0)
    index = tl.min(tl.where(reached, at, 2147483647), axis=0)
    place = limits + row * 4
    if BY_MASS:
        place += 2
    tl.store(place, edge)
    tl.store(place + 1, index)


@triton.jit(
    do_not_specialize_on_alignment=["temperatures", "min_ps", "seeds", "choices", "positions"],
)
def _draw_kernel(
    logits, limits, maxima, values, ids, temperatures, min_ps, seeds, choices, positions,
    V, blocks, BLOCK: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Best of a stretch's ids that are kept, by z + g; a greedy row's are there already."""
    row = tl.program_id(0).to(tl.int64)
    top = tl.load(maxima + row)
    temperature = tl.load(temperatures + row)
    min_p = tl.load(min_ps + row)
    # A min_p above 1 keeps nothing, which leaves the most likely id.
    if (temperature > 0) & (tl.abs(top) < float("inf")) & (min_p <= 1):
        key_k = tl.load(limits + row * 4)
        id_k = tl.load(limits + row * 4 + 1)
        key_p = tl.load(limits + row * 4 + 2)
        id_p = tl.load(limits + row * 4 + 3)
        seed = tl.load(seeds + row)
        choice = tl.load(choices + row)
        position = tl.load(positions + row)
        begin = tl.program_id(1) * BLOCK
        best = float("-inf")
        index = begin
        for start in range(begin, begin + BLOCK, SUB):
            at = start + tl.arange(0, SUB)
            z = _scaled(logits, row, at, V, top, temperature)
            key = _order(z)
            kept = (key > key_k) | ((key == key_k) & (at <= id_k))
            kept = kept & ((key > key_p) | ((key == key_p) & (at <= id_p)))
            kept = kept & (exact_exp(z) >= min_p)
            if tl.max(kept.to(tl.int32), axis=0) > 0:
                g = gumbel(at, position, choice, seed)
                value, found = _best(tl.where(kept, z + g, float("-inf")), at)
                index = tl.where(value > best, found, index)
                best = tl.maximum(value, best)
        tl.store(values + row * blocks + tl.program_id(1), best)
        tl.store(ids + row * blocks + tl.program_id(1), index)


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


def _limits(logits: Tensor, values: Tensor, maxima: Tensor, batch: SampleBatch) -> Tensor:
    """The (key, id) edges of top-k and top-p, int32 [R, 4]; fills the rows' maxima."""
    rows, vocab = logits.shape
    blocks = values.shape[1]
    device = logits.device
    limits = torch.empty(rows, 4, dtype=torch.int32, device=device)
    lows, highs, targets = torch.empty(3, 2, rows, dtype=torch.int64, device=device)
    padded = power_of_two(blocks)
    _begin_kernel[(rows,)](
        values, maxima, limits, lows, highs, targets,
        batch.temperature, batch.top_k, batch.top_p, rows, vocab, blocks,
        PADDED=padded, num_warps=1, **LAUNCH,
    )  # fmt: skip
    if not (batch.cuts_by_count or batch.cuts_by_mass):
        return limits
    partials = torch.empty(rows * blocks * _WAYS, dtype=torch.int64, device=device)
    bases = torch.empty(rows * blocks, dtype=torch.int64, device=device)
    ways = torch.empty(rows, dtype=torch.int32, device=device)
    arrived = arrivals(device)[:rows]
    if rows > arrived.shape[0]:
        raise ValueError(f"{rows} rows are drawn from at once, the limit is {arrived.shape[0]}")
    for by_mass in (False, True):
        if not (batch.cuts_by_mass if by_mass else batch.cuts_by_count):
            continue
        search = lows[int(by_mass)], highs[int(by_mass)], targets[int(by_mass)]
        for turn in range(_TURNS):
            _narrow_kernel[(rows, blocks)](
                logits, limits, maxima, *search, partials, bases, ways, arrived,
                batch.temperature, batch.top_p, vocab, blocks,
                BLOCK=_BLOCK, SUB=_SUB, WAYS=_WAYS, PADDED=padded,
                BY_MASS=by_mass, FIRST=turn == 0, num_warps=8, **LAUNCH,
            )  # fmt: skip
        _edge_kernel[(rows,)](
            logits, limits, maxima, search[0], search[2], partials, bases, ways,
            batch.temperature, vocab, blocks,
            BLOCK=_BLOCK, PADDED=padded, WAYS=_WAYS, BY_MASS=by_mass, num_warps=8, **LAUNCH,
        )  # fmt: skip
    return limits


def sample(logits: Tensor, batch: SampleBatch) -> Tensor:
    """See `Backend.sample`."""
    rows, vocab = _rows(logits)
    if not rows:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    values, ids = _block_best(logits, rows, vocab)
    blocks = values.shape[1]
    maxima = torch.empty(rows, dtype=torch.float32, device=logits.device)
    limits = _limits(logits, values, maxima, batch)
    _draw_kernel[(rows, blocks)](
        logits, limits, maxima, values, ids,
        batch.temperature, batch.min_p, batch.seed, batch.choice, batch.position,
        vocab, blocks, BLOCK=_BLOCK, SUB=_DRAWN, num_warps=8, **LAUNCH,
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
