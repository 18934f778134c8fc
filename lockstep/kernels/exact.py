"""Elementwise building blocks of which every step is correctly rounded.

Torch's own `exp`, `log` and sums give a value bits that depend on where it stands
(vector body or scalar tail, how a sum is split among threads). Additions,
multiplications, divisions, square roots and integer arithmetic are correctly
rounded wherever they are computed, so what is built from these alone is a
function of its inputs. The polynomials are those of `cpu/vec.h`.

`madd` is what stands for a * b + c: `fused` rounds once, as the native form does
(exact, slow); `separate` rounds twice (fast enough for the torch form).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

Madd = Callable[[Tensor, Tensor | float, Tensor | float], Tensor]

LANES = 16
_MASK = 0xFFFFFFFF


def _float32(value: Tensor | float) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float32)


def fused(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """Float32 a * b + c with one rounding.

    The product is exact in float64; the sum is rounded to odd there (Boldo &
    Melquiond 2008), so that the second rounding, to float32, is the only one.
    """
    product = a.double() * _float32(b).double()
    addend = _float32(c).double()
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(torch.int64)
    away = (error > 0) == (total > 0)
    odd = torch.where(away, bits + 1, bits - 1)
    inexact = (error != 0) & torch.isfinite(total) & (bits & 1 == 0)
    return torch.where(inexact, odd, bits).view(torch.float64).float()


def separate(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """Float32 a * b + c with a rounding after each step."""
    return a * b + c


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 values of x after a cast to dtype and back."""
    return x.to(dtype).float()


def sqrt(x: Tensor) -> Tensor:
    """Correctly rounded square root: numpy's, since torch's calls MKL, which is not."""
    return torch.from_numpy(np.sqrt(x.numpy()))


def exp(x: Tensor, madd: Madd = separate) -> Tensor:
    """Exponential of float32 x; exactly 0 below -87.33, inf above 88.72."""
    magic = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer
    shifted = madd(x, 1.44269504088896341, magic)
    n = shifted - magic
    r = madd(n, -0.693359375, x)
    r = madd(n, 2.12194440e-4, r)
    p = torch.full_like(x, 1.9875691500e-4)
    for coefficient in (
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    ):
        p = madd(p, r, coefficient)
    p = madd(p, r * r, r) + 1.0
    exponent = shifted.view(torch.int32) - torch.tensor(magic).view(torch.int32)
    y = (p.view(torch.int32) + (exponent << 23)).view(torch.float32)
    y = torch.where(x < -87.33, torch.zeros_like(x), y)
    y = torch.where(x > 88.72, torch.full_like(x, torch.inf), y)
    return torch.where(torch.isnan(x), x, y)


def log(x: Tensor, madd: Madd = separate) -> Tensor:
    """Natural logarithm of float32 x: positive normal numbers, 0 gives -inf."""
    bits = x.view(torch.int32)
    e = ((bits >> 23) & 0x1FF) - 126
    m = ((bits & 0x007FFFFF) | 0x3F000000).view(torch.float32)
    small = m < 0.707106781186547524
    e = torch.where(small, e - 1, e)
    m = torch.where(small, m + m, m) - 1.0
    z = m * m
    p = torch.full_like(x, 7.0376836292e-2)
    for coefficient in (
        -1.1514610310e-1,
        1.1676998740e-1,
        -1.2420140846e-1,
        1.4249322787e-1,
        -1.6668057665e-1,
        2.0000714765e-1,
        -2.4999993993e-1,
        3.3333331174e-1,
    ):
        p = madd(p, m, coefficient)
    y = m * z * p
    ef = e.float()
    y = madd(ef, -2.12194440e-4, y)
    y = madd(z, -0.5, y)
    r = madd(ef, 0.693359375, m + y)
    r = torch.where(x == 0.0, torch.full_like(x, -torch.inf), r)
    r = torch.where(x == torch.inf, x, r)
    return torch.where(torch.isnan(x) | (x < 0.0), torch.full_like(x, torch.nan), r)


def sigmoid(x: Tensor, madd: Madd = separate) -> Tensor:
    """1 / (1 + exp(-x)), float32."""
    return 1.0 / (1.0 + exp(-x, madd))


def silu(x: Tensor, madd: Madd = separate) -> Tensor:
    """x / (1 + exp(-x)), float32."""
    return x / (1.0 + exp(-x, madd))


def gelu_tanh(x: Tensor, madd: Madd = separate) -> Tensor:
    """The tanh form of GELU; 0.5 (1 + tanh(u)) is sigmoid(2 u)."""
    u = 0.7978845608028654 * madd(0.044715 * x * x, x, x)
    return x * sigmoid(u + u, madd)


def pad_last(x: Tensor, multiple: int) -> Tensor:
    """Zeros appended to the last dimension up to a multiple."""
    missing = -x.shape[-1] % multiple
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def in_lanes(x: Tensor) -> Tensor:
    """[..., D] as [..., ceil(D / 16), 16], zero-padded."""
    padded = pad_last(x, LANES)
    return padded.reshape(*padded.shape[:-1], padded.shape[-1] // LANES, LANES)


def sum_lanes(x: Tensor) -> Tensor:
    """Sum of the last dimension (a power of two): folded in halves, [..., W] to [...]."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def sum_squares(x: Tensor, madd: Madd = separate) -> Tensor:
    """Sum of squares over the last dimension: lane l takes l, l + 16, ... ascending."""
    groups = in_lanes(x)
    total = torch.zeros_like(groups[..., 0, :])
    for i in range(groups.shape[-2]):
        total = madd(groups[..., i, :], groups[..., i, :], total)
    return sum_lanes(total)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, unit_offset: bool, madd: Madd = separate
) -> Tensor:
    """`Backend.rms_norm` without residual, over the last dimension; x's dtype."""
    values = x.float()
    mean = sum_squares(values, madd) / x.shape[-1]
    inverse = 1.0 / sqrt(mean + eps)
    values = values * inverse[..., None]
    if unit_offset:
        return (values * (1.0 + weight.float())).to(x.dtype)
    return (round_to(values, x.dtype) * weight.float()).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation of x [R, H, E] by float32 cos, sin [R, E / 2]; x's dtype."""
    first, second = x.float().chunk(2, dim=-1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat([first * c - second * s, second * c + first * s], dim=-1).to(x.dtype)


def argmax(logits: Tensor) -> Tensor:
    """Lowest index of each row's largest value, int64 [R]; NaN counts as the smallest."""
    values = torch.where(torch.isnan(logits), -torch.inf, logits)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    top = values == values.amax(dim=-1, keepdim=True)
    return torch.where(top, ids, logits.shape[-1]).amin(dim=-1)


def log_sum_exp(logits: Tensor, block: int, madd: Madd = separate) -> Tensor:
    """`Backend.log_sum_exp`: blocks of `block` in 16 lanes ascending, blocks ascending."""
    top = torch.where(torch.isnan(logits), -torch.inf, logits).amax(dim=-1)
    values = exp(logits - top[:, None], madd)
    total = torch.zeros_like(top)
    for begin in range(0, logits.shape[-1], block):
        lanes = in_lanes(values[:, begin : begin + block])
        partial = torch.zeros_like(lanes[:, 0])
        for i in range(lanes.shape[1]):
            partial = partial + lanes[:, i]
        total = total + sum_lanes(partial)
    return torch.where(torch.isinf(top), top, top + log(total, madd))


# --- random numbers -----------------------------------------------------------


def _multiply_wide(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low words of a 32 by 32 bit product; a int64 in [0, 2^32)."""
    upper, lower = (a >> 16) * b, (a & 0xFFFF) * b
    high = (upper + (lower >> 16)) >> 16
    low = (((upper & 0xFFFF) << 16) + lower) & _MASK
    return high, low


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> Tensor:
    """Philox-4x32-10 (Salmon, Moraes, Dror, Shaw 2011): words [4, ...] as int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply_wide(c0, 0xD2511F53)
        high1, low1 = _multiply_wide(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    whole = c0 | c1 | c2 | c3
    return torch.stack([word.expand_as(whole) for word in (c0, c1, c2, c3)])


def gumbel(
    seed: Tensor, choice: Tensor, position: Tensor, ids: Tensor, madd: Madd = separate
) -> Tensor:
    """Gumbel noise as `Backend.sample` defines it; int64 inputs of broadcastable shapes."""
    words = philox(
        (ids & _MASK, position & _MASK, choice & _MASK, torch.zeros_like(ids)),
        (seed & _MASK, (seed >> 32) & _MASK),
    )
    u = (words[0].float() + 0.5) * 2.0**-32
    u = torch.clamp(u, max=1.0 - 2.0**-24)
    # log1p(-u) = log(w) * -u / (w - 1) with w = 1 - u rounded (Kahan).
    w = 1.0 - u
    d = w - 1.0
    e = torch.where(d == 0.0, u, -(log(w, madd) * (-u / d)))
    return -log(e, madd)


def sample_row(
    logits: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    noise: Callable[[Tensor], Tensor],
    madd: Madd = separate,
) -> int:
    """One draw from float32 logits [V]; `noise` maps int64 ids to their Gumbel values."""
    values = torch.where(torch.isnan(logits), -torch.inf, logits)
    top = values.max()
    greedy = int(argmax(logits[None]))
    if not temperature > 0.0 or not torch.isfinite(top):
        return greedy
    z = (values - top) / torch.tensor(temperature, dtype=torch.float32)
    ids = torch.sort(z, descending=True, stable=True).indices
    ids = ids[z[ids] > -torch.inf]
    if top_k > 0:
        ids = ids[:top_k]
    p = exp(z[ids], madd)
    if top_p < 1.0:
        # Mass in units of 2^-32 of the largest: integers, so that sums have no order.
        mass = (p.double() * 2.0**32).long()
        wanted = torch.ceil(torch.tensor(max(top_p, 0.0)).double() * mass.sum().double()).long()
        reached = torch.cumsum(mass, 0) >= torch.clamp(wanted, min=1)
        count = int(reached.nonzero()[0]) + 1
        ids, p = ids[:count], p[:count]
    if min_p > 0.0:
        ids = ids[p >= torch.tensor(min_p, dtype=torch.float32)]
    ids = ids.sort().values
    if not len(ids):
        return greedy
    scores = z[ids] + noise(ids)
    return int(ids[(scores == scores.max()).nonzero()[0]])
