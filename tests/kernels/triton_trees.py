"""The Triton trees spelled out in torch, on the CPU: every step correctly rounded."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.kernels import exact, tree
from lockstep.kernels.exact import fused


def pair_sum(x: Tensor) -> Tensor:
    """Sum of the last dimension, padded with zeros to a power of two, by neighbours."""
    size = x.shape[-1]
    padded = 1 << max(0, size - 1).bit_length()
    x = torch.nn.functional.pad(x, (0, padded - size))
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def rms_norm(x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
    """`Backend.rms_norm` over the last dimension; eps as the kernel gets it, float32."""
    values = x.float()
    mean = pair_sum(values * values) / x.shape[-1]
    inverse = 1.0 / exact.sqrt(mean + torch.tensor(eps, dtype=torch.float32))
    values = values * inverse[..., None]
    if unit_offset:
        return (values * (1.0 + weight.float())).to(x.dtype)
    return (exact.round_to(values, x.dtype) * weight.float()).to(x.dtype)


def log_sum_exp(logits: Tensor) -> Tensor:
    """`Backend.log_sum_exp` of [R, V]."""
    size = -logits.shape[1] % tree.VOCAB_BLOCK
    blocks = torch.nn.functional.pad(logits, (0, size), value=-torch.inf)
    blocks = blocks.view(logits.shape[0], -1, tree.VOCAB_BLOCK)
    top = blocks.amax(-1)
    base = torch.where(top == -torch.inf, 0.0, top)
    sums = pair_sum(exact.exp(blocks - base[..., None], fused))
    row = top.amax(-1)
    base = torch.where(row.isinf(), 0.0, row)
    total = pair_sum(sums * exact.exp(top - base[:, None], fused))
    return torch.where(row.isinf(), row, base + exact.log(total, fused))
