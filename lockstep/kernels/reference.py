"""The trees spelled out slowly: the ground truth of the kernel tests.

The first half gives exact bits, those of the native CPU form: every step is a
correctly rounded float32 operation in the order that `contract.py` states. The
second half gives float64 values, for tolerances.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.kernels import exact, tree
from lockstep.kernels.contract import Activation, LoraPair
from lockstep.kernels.exact import fused

_SMALLEST_NORMAL = 2.0**-126


# --- exact bits ---------------------------------------------------------------


def _flush(x: Tensor) -> Tensor:
    """Subnormals as zeros of their sign."""
    return torch.where(x.abs() < _SMALLEST_NORMAL, x * 0.0, x)


def product(x: Tensor, weight: Tensor, isa: str) -> Tensor:
    """Float32 accumulators of x [M, K] times weight [N, K] transposed: [M, N].

    K ascending, one fused multiply-add a step. With `isa` "avx512-bf16", bfloat16
    follows VDPBF16PS (Intel Software Developer's Manual, volume 2): of each pair
    (k, k + 1) the odd element first, subnormal inputs and results as zeros.
    """
    dot = isa == "avx512-bf16" and x.dtype == torch.bfloat16
    a, b = x.float(), weight.float()
    if dot:
        a, b = (_flush(exact.pad_last(operand, 2)) for operand in (a, b))
    acc = torch.zeros(a.shape[0], b.shape[0])
    for step in range(a.shape[1]):
        k = step ^ 1 if dot else step
        acc = fused(a[:, k, None].expand_as(acc), b[None, :, k].expand_as(acc), acc)
        acc = _flush(acc) if dot else acc
    return acc


def linear(
    x: Tensor, weight: Tensor, isa: str, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """`Backend.linear` on a logical weight [N, K]."""
    return _finish(product(x, weight, isa), x.dtype, bias, residual)


def _finish(
    acc: Tensor, dtype: torch.dtype, bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    out = (acc if bias is None else acc + bias.float()).to(dtype)
    return out if residual is None else (residual.float() + out.float()).to(dtype)


def gated_linear(x: Tensor, gate: Tensor, up: Tensor, activation: Activation, isa: str) -> Tensor:
    """`Backend.gated_linear` on logical weights [F, K]."""
    return _gate(product(x, torch.cat([gate, up]), isa), x.dtype, activation)


def _gate(acc: Tensor, dtype: torch.dtype, activation: Activation) -> Tensor:
    function = exact.silu if activation == "silu" else exact.gelu_tanh
    left, right = (exact.round_to(half, dtype) for half in acc.chunk(2, dim=-1))
    return (exact.round_to(function(left, fused), dtype) * right).to(dtype)


def adapted_product(
    x: Tensor,
    weight: Tensor,
    index: Sequence[int],
    adapters: Sequence[Sequence[LoraPair]],
    isa: str,
) -> Tensor:
    """Float32 accumulators as in `product` with the deltas of `Backend.adapted_linear`.

    Args:
        index: the adapter of each row, -1 for none. adapters: the pairs of each.
    """
    acc = product(x, weight, isa)
    for row, adapter in enumerate(index):
        for pair in adapters[adapter] if adapter >= 0 else ():
            b = (pair.b.float() * pair.scale).to(pair.b.dtype)
            t = product(x[row : row + 1], pair.a, isa).to(x.dtype)
            end = pair.begin + b.shape[0]
            acc[row, pair.begin : end] = acc[row, pair.begin : end] + product(t, b, isa)[0]
    return acc


def adapted_linear(
    x: Tensor,
    weight: Tensor,
    index: Sequence[int],
    adapters: Sequence[Sequence[LoraPair]],
    isa: str,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`Backend.adapted_linear` on a logical weight [N, K]."""
    return _finish(adapted_product(x, weight, index, adapters, isa), x.dtype, bias, residual)


def adapted_gated_linear(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    index: Sequence[int],
    adapters: Sequence[Sequence[LoraPair]],
    activation: Activation,
    isa: str,
) -> Tensor:
    """`Backend.adapted_gated_linear` on logical weights [F, K]."""
    acc = adapted_product(x, torch.cat([gate, up]), index, adapters, isa)
    return _gate(acc, x.dtype, activation)


def rms_norm(x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
    """`Backend.rms_norm` of [R, D] or, for queries and keys, [R, H, E]."""
    return exact.rms_norm(x, weight, eps, unit_offset, fused)


def log_sum_exp(logits: Tensor) -> Tensor:
    """`Backend.log_sum_exp`."""
    return exact.log_sum_exp(logits, tree.VOCAB_BLOCK, fused)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: int,
    scale: float,
    isa: str,
    window: int | None = None,
    block: int = 32,
) -> Tensor:
    """`Backend.attention` of one run over its own keys and values, in order.

    Args:
        q: [n, Hq, E], rows at positions first .. first + n - 1.
        k, v: [first + n, Hk, E], as stored.

    Returns: [n, Hq * E] in q's dtype.
    """
    rows, q_heads, head_dim = q.shape
    group = q_heads // k.shape[1]
    out = torch.empty(rows, q_heads, head_dim, dtype=q.dtype)
    for row in range(rows):
        high = first + row + 1
        low = max(0, high - window) if window else 0
        for head in range(k.shape[1]):
            heads = slice(head * group, (head + 1) * group)
            out[row, heads] = _attend(
                q[row, heads], k[:, head], v[:, head], low, high, scale, isa, block
            ).to(q.dtype)
    return out.flatten(1)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, low: int, high: int, scale: float, isa: str, block: int
) -> Tensor:
    """Heads [G, E] that share keys [T, E] and see positions [low, high): float32 [G, E]."""
    heads = q.shape[0]
    total: tuple[Tensor, Tensor, Tensor] | None = None
    for segment in range(low // tree.SEGMENT * tree.SEGMENT, high, tree.SEGMENT):
        acc = torch.zeros(heads, v.shape[1])
        top, mass = torch.full((heads,), -torch.inf), torch.zeros(heads)
        for start in range(segment, min(segment + tree.SEGMENT, high), block):
            left, right = max(start, low), min(start + block, high)
            if left >= right:
                continue
            scores = torch.full((heads, block), -torch.inf)
            scores[:, left - start : right - start] = product(q, k[left:right], isa) * scale
            highest = torch.maximum(top, scores.amax(-1))
            keep = exact.exp(top - highest, fused)
            p = exact.exp(scores - highest[:, None], fused)
            lanes = exact.in_lanes(p)
            partial = lanes[:, 0]
            for i in range(1, lanes.shape[1]):
                partial = partial + lanes[:, i]
            mass = fused(mass, keep, exact.sum_lanes(partial))
            top = highest
            acc = acc * keep[:, None]
            for key in range(left, right):
                weight = p[:, key - start, None].expand_as(acc)
                acc = fused(weight, v[key].float().expand_as(acc), acc)
        if total is None:
            total = acc, top, mass
            continue
        whole, whole_top, whole_mass = total
        highest = torch.maximum(whole_top, top)
        old = exact.exp(whole_top - highest, fused)
        new = exact.exp(top - highest, fused)
        total = (
            fused(whole, old[:, None].expand_as(whole), acc * new[:, None]),
            highest,
            fused(whole_mass, old, mass * new),
        )
    assert total is not None
    return total[0] / total[2][:, None]


def gumbel(seed: int, choice: int, position: int, ids: Tensor) -> Tensor:
    """Gumbel noise of one row for int64 ids."""
    key, index, at = (torch.tensor(x, dtype=torch.int64) for x in (seed, choice, position))
    return exact.gumbel(key, index, at, ids, fused)


def sample(
    logits: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    choice: int,
    position: int,
) -> int:
    """`Backend.sample` of one row [V]."""
    return exact.sample_row(
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        lambda ids: gumbel(seed, choice, position, ids),
        fused,
    )


# --- float64 values -------------------------------------------------------------


def product64(x: Tensor, weight: Tensor) -> Tensor:
    """x times weight transposed in float64."""
    return x.double() @ weight.double().T


def rms_norm64(x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
    """Root-mean-square norm in float64."""
    values = x.double()
    values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    return values * (weight.double() + 1.0 if unit_offset else weight.double())


def attention64(
    q: Tensor, k: Tensor, v: Tensor, first: int, scale: float, window: int | None = None
) -> Tensor:
    """Attention of one run as in `attention`, in float64: [n, Hq * E]."""
    group = q.shape[1] // k.shape[1]
    keys, values = (t.double().repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("qhe,khe->hqk", q.double(), keys) * scale
    at = torch.arange(first, first + q.shape[0])[:, None]
    positions = torch.arange(k.shape[0])[None]
    hidden = positions > at
    if window:
        hidden |= positions <= at - window
    p = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khe->qhe", p, values).flatten(1)
