"""A backend that breaks the promise on every machine: its sums follow the batch.

Torch's own products happen to be equal in bits for some shapes, dtypes and machines. This
one splits K by the number of rows, as libraries do that are tuned by batch, so the bit tests
must catch it wherever they run. All else is the native form, with fixed trees.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from lockstep.kernels.contract import (
    Activation,
    LoraPair,
    LoraRows,
    LoraSet,
    LoraWeight,
    Weight,
)
from lockstep.kernels.cpu.native import NativeBackend
from lockstep.kernels.lora import add_deltas, make_set, packed


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

    def pack_lora(self, pairs: Sequence[LoraPair], n: int, *, gated: bool = False) -> LoraWeight:
        return packed(pairs, n, gated, lambda a, b, begin: (a, b))

    def lora_set(self, weights: Sequence[LoraWeight | None]) -> LoraSet:
        return make_set(weights, torch.empty(0))

    @staticmethod
    def _product(x: Tensor, matrix: Tensor) -> Tensor:
        size = -(-matrix.shape[1] // slices(len(x)))
        total = torch.zeros(len(x), matrix.shape[0])
        for part, columns in zip(
            x.float().split(size, dim=1), matrix.float().split(size, dim=1), strict=True
        ):
            total += part @ columns.T
        return total

    def logits(self, x: Tensor, weight: Weight) -> Tensor:
        return self._product(x, weight.data)

    def linear(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        return _finish(self.logits(x, weight), x.dtype, bias, residual)

    def gated_linear(self, x: Tensor, weight: Weight, activation: Activation) -> Tensor:
        return _gate(self.logits(x, weight).to(x.dtype), activation)

    def adapted_linear(
        self,
        x: Tensor,
        weight: Weight,
        lora: LoraRows,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        total = add_deltas(self.logits(x, weight), x, lora, self._product)
        return _finish(total, x.dtype, bias, residual)

    def adapted_gated_linear(
        self, x: Tensor, weight: Weight, lora: LoraRows, activation: Activation
    ) -> Tensor:
        total = add_deltas(self.logits(x, weight), x, lora, self._product)
        return _gate(total.to(x.dtype), activation)

    def embedding(self, ids: Tensor, weight: Weight, scale: float = 1.0) -> Tensor:
        rows = functional.embedding(ids, weight.data).to(weight.dtype)
        return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=rows.dtype)


def _finish(
    total: Tensor, dtype: torch.dtype, bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    out = (total if bias is None else total + bias.float()).to(dtype)
    return out if residual is None else residual + out


def _gate(both: Tensor, activation: Activation) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    if activation == "silu":
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate="tanh") * up
