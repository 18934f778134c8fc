"""What every kernel shares: the summation tree, elementwise functions, launch options.

Bits may depend on nothing but the tree, so:
- `tl.sum` over a long axis is never used on floats (its order follows the layout);
  `pair_sum` adds neighbours level by level, and an addition of two has no order.
- contraction is off in every launch (`LAUNCH`): a * b + c rounds twice, everywhere.
- a fused kernel and a plain one call the same function from here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LAUNCH: dict[str, Any] = {"enable_fp_fusion": False}
MOST_ARRIVALS = 1 << 17
STREAMED_ROWS = 256  # of a product, at most, that reads its weight ahead (`stream.py`)
INTERPRETED = bool(triton.knobs.runtime.interpret)
_INTERPRETED = tl.constexpr(INTERPRETED)


@lru_cache(maxsize=8)
def can_chain(device: torch.device) -> bool:
    """Whether a launch may begin while the one before it ends: on Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def chained(device: torch.device, rows: int = 0) -> dict[str, Any]:
    """Options of a launch that may begin while the one before it ends (`chain`), where the
    device can do that. With no more `rows` than are streamed it also lets the next one in."""
    if not can_chain(device):
        return {"CHAINED": 0, **LAUNCH}
    return {"CHAINED": 2 if 0 < rows <= STREAMED_ROWS else 1, "launch_pdl": True, **LAUNCH}


def ahead(device: torch.device) -> int:
    """1 while a graph is captured, else 0: whether a kernel may read what no launch of its
    graph writes (weights, indices) before the launches ahead of it have ended. All that ran
    before a graph has ended when it begins; without one, the launch ahead may be a writer."""
    return int(device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def lines_of(cache: torch.Tensor) -> torch.Tensor:
    """A layer's keys or values [pages, heads, tokens, E] as lines [.., E], `page stride / E` of
    them a page."""
    pages, heads, tokens, size = cache.shape
    stride = cache.stride(0)
    lines = (pages - 1) * (stride // size) + heads * tokens
    return cache.as_strided((lines, size), (size, 1))


@lru_cache(maxsize=8)
def arrivals(device: torch.device) -> torch.Tensor:
    """Zeroed int32 counters of programs that share a piece of work, so that the last to
    arrive can end it. Launches on one stream share them; each leaves zeros."""
    return torch.zeros(MOST_ARRIVALS, dtype=torch.int32, device=device)


@triton.jit
def chain(CHAINED: tl.constexpr):
    """Wait until every launch before this one has ended; with 2, let the next begin first.

    Nothing that another kernel writes is read, and nothing at all written, before it. The
    next launch may be a product that reads its weight ahead (`stream.py`).
    """
    if CHAINED:
        if CHAINED == 2:
            gdc_launch_dependents()
        gdc_wait()


@triton.jit
def begin(CHAINED: tl.constexpr, early):
    """Let the next launch begin, as `chain` does; wait here only without `early` (`ahead`).
    `chain` must follow, also on ways that return."""
    if CHAINED:
        if CHAINED == 2:
            gdc_launch_dependents()
        if early == 0:
            gdc_wait()


def power_of_two(n: int) -> int:
    """Smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of the device; under the interpreter a small number."""
    if device.type != "cuda":
        return 3
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def check_rows(x: torch.Tensor, width: int, what: str) -> int:
    """Rows of a contiguous [R, width] tensor; a mismatch would read out of bounds.

    Raises:
        ValueError: another shape or stride.
    """
    if x.dim() != 2 or x.shape[1] != width or not x.is_contiguous():
        raise ValueError(f"{what} must be contiguous [R, {width}], got {tuple(x.shape)}")
    return x.shape[0]


@triton.jit
def product(a, b, acc):
    """acc + a b with float32 sums, k ascending: tensor cores for bfloat16, fma for float32."""
    if _INTERPRETED:  # its bfloat16 is an integer that its dot does not decode
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def finish(
    acc, bias, residual, out, rows, columns, M, N: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Bias, cast, residual and store of one tile of a product, float32 or already cast."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    if HAS_BIAS:
        acc = acc + tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    value = acc.to(DTYPE)
    if HAS_RESIDUAL:
        base = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        value = (base + value.to(tl.float32)).to(DTYPE)
    tl.store(out + at, value, mask=inside)


@triton.jit
def pair_sum(x, LEVELS: tl.constexpr):
    """Sum x [A, 2**LEVELS] over its last axis by neighbours: [A].

    Level by level (x[0] + x[1]), (x[2] + x[3]), ... Zeros at the end change nothing.
    """
    for _ in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), axis=2)
    return tl.reshape(x, [x.shape[0]])


@triton.jit
def inverse_rms(square_sum, SIZE: tl.constexpr, eps):
    """1 / sqrt(square_sum / SIZE + eps), every step correctly rounded."""
    mean = tl.div_rn(square_sum, tl.full(square_sum.shape, SIZE, tl.float32))
    root = tl.sqrt_rn(mean + eps)
    return tl.div_rn(tl.full(root.shape, 1.0, tl.float32), root)


@triton.jit
def scale_normed(x, inverse, weight, UNIT_OFFSET: tl.constexpr, DTYPE: tl.constexpr):
    """x times inverse times weight, rounded to DTYPE where the contract says, as float32."""
    y = x * inverse
    if UNIT_OFFSET:
        y = y * (1.0 + weight)
    else:
        y = y.to(DTYPE).to(tl.float32) * weight
    return y.to(DTYPE).to(tl.float32)


@triton.jit
def exact_exp(x):
    """Exponential of float32 x by correctly rounded steps: the bits of `cpu/vec.h`.

    Exactly 0 below -87.33, inf above 88.72.
    """
    magic = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer
    shifted = tl.fma(x, tl.full(x.shape, 1.44269504088896341, tl.float32), magic)
    n = shifted - magic
    r = tl.fma(n, tl.full(x.shape, -0.693359375, tl.float32), x)
    r = tl.fma(n, tl.full(x.shape, 2.12194440e-4, tl.float32), r)
    p = tl.full(x.shape, 1.9875691500e-4, tl.float32)
    p = tl.fma(p, r, 1.3981999507e-3)
    p = tl.fma(p, r, 8.3334519073e-3)
    p = tl.fma(p, r, 4.1665795894e-2)
    p = tl.fma(p, r, 1.6666665459e-1)
    p = tl.fma(p, r, 5.0000001201e-1)
    p = tl.fma(p, r * r, r) + 1.0
    exponent = shifted.to(tl.int32, bitcast=True) - 0x4B400000  # the bits of magic
    y = (p.to(tl.int32, bitcast=True) + (exponent << 23)).to(tl.float32, bitcast=True)
    y = tl.where(x < -87.33, 0.0, y)
    y = tl.where(x > 88.72, float("inf"), y)
    return tl.where(x != x, x, y)


@triton.jit
def exact_log(x):
    """Natural logarithm of float32 x >= 0, not subnormal: the bits of `cpu/vec.h`.

    The hardware's logarithm is off by 2^-22 near 1, which would decide draws.
    """
    bits = x.to(tl.int32, bitcast=True)
    e = ((bits >> 23) & 0x1FF) - 126
    m = ((bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    small = m < 0.707106781186547524
    e = tl.where(small, e - 1, e).to(tl.float32)
    m = tl.where(small, m + m, m) - 1.0
    z = m * m
    p = tl.full(x.shape, 7.0376836292e-2, tl.float32)
    p = tl.fma(p, m, -1.1514610310e-1)
    p = tl.fma(p, m, 1.1676998740e-1)
    p = tl.fma(p, m, -1.2420140846e-1)
    p = tl.fma(p, m, 1.4249322787e-1)
    p = tl.fma(p, m, -1.6668057665e-1)
    p = tl.fma(p, m, 2.0000714765e-1)
    p = tl.fma(p, m, -2.4999993993e-1)
    p = tl.fma(p, m, 3.3333331174e-1)
    y = m * z * p
    y = tl.fma(e, tl.full(x.shape, -2.12194440e-4, tl.float32), y)
    y = tl.fma(z, tl.full(x.shape, -0.5, tl.float32), y)
    r = tl.fma(e, tl.full(x.shape, 0.693359375, tl.float32), m + y)
    r = tl.where(x == 0.0, float("-inf"), r)
    return tl.where((x == float("inf")) | (x != x), x, r)


@triton.jit
def silu(x):
    """x * sigmoid(x) of float32."""
    return tl.div_rn(x, 1.0 + tl.exp(-x))


@triton.jit
def gelu_tanh(x):
    """The tanh form of GELU (Hendrycks & Gimpel 2016) of float32."""
    inner = 0.7978845608028654 * (x + 0.044715 * (x * x * x))
    # tanh(y) = 1 - 2 / (exp(2 y) + 1), exact at both ends: exp overflows to inf.
    tanh = 1.0 - tl.div_rn(2.0, tl.exp(2.0 * inner) + 1.0)
    return 0.5 * x * (1.0 + tanh)


@triton.jit
def gate(g, u, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """act(g) * u from two float32 accumulators, rounded at each of the contract's casts."""
    g = g.to(DTYPE).to(tl.float32)
    u = u.to(DTYPE).to(tl.float32)
    if ACTIVATION == 1:
        a = silu(g)
    else:
        a = gelu_tanh(g)
    return (a.to(DTYPE).to(tl.float32) * u).to(DTYPE)
