"""A backend that breaks the promise on every machine: its sums follow the batch.

Torch's own products happen to be equal in bits for some shapes, dtypes and machines. This
one splits K by the number of rows, as libraries do that are tuned by batch, so the bit tests
must catch it wherever they run. All else is the native form, with fixed trees.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lockstep.kernels.contract import Activation, Weight
from lockstep.kernels.cpu.native import NativeBackend


def slices(rows: int) -> int:
    """Parts of K for a product of that many rows: few rows leave cores idle, so more parts."""
    return 8 if rows <= 4 else 4 if rows <= 16 else 2 if rows <= 64 else 1


class RowSplitBackend(NativeBackend):
    """Products whose tree depends on how many rows share the launch."""

    name = "row split"

    def __init__(self) -> None:
        super().__init__(1)

    def pack(self, weight: Tensor) -> Weight:
        data = weight.detach().float().contiguous()
        return Weight(data=data, n=data.shape[0], k=data.shape[1], dtype=weight.dtype)

    def pack_gated(self, gate: Tensor, up: Tensor) -> Weight:
        data = torch.cat([gate.detach().float(), up.detach().float()])
        return Weight(data=data, n=data.shape[0], k=data.shape[1], dtype=gate.dtype, gated=True)

    def unpack(self, weight: Weight) -> Tensor:
        return weight.data.to(weight.dtype)

    def logits(self, x: Tensor, weight: Weight) -> Tensor:
        size = -(-weight.k // slices(len(x)))
        total = torch.zeros(len(x), weight.n)
        for part, columns in zip(
            x.float().split(size, dim=1), weight.data.split(size, dim=1), strict=True
        ):
            total += part @ columns.T
        return total

    def linear(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        total = self.logits(x, weight)
        out = (total if bias is None else total + bias.float()).to(x.dtype)
        return out if residual is None else residual + out

    def gated_linear(self, x: Tensor, weight: Weight, activation: Activation) -> Tensor:
        gate, up = self.linear(x, weight).chunk(2, dim=-1)
        if activation == "silu":
            return functional.silu(gate) * up
        return functional.gelu(gate, approximate="tanh") * up

    def embedding(self, ids: Tensor, weight: Weight, scale: float = 1.0) -> Tensor:
        rows = functional.embedding(ids, weight.data).to(weight.dtype)
        return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=rows.dtype)
