"""What a decision branch adds to a model: adapters on its linears, and a head of its own.

Tensors have the names that `lockstep.branch` lists and Hugging Face's shapes; a family's
fused linears take the parts of several of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.branch import Branch
from lockstep.kernels.contract import Backend, LoraPair, LoraWeight
from lockstep.model.base import DecoderModel
from lockstep.model.layers import LinearName, Module, RMSNorm


@dataclass(frozen=True, slots=True)
class Part:
    """The outputs begin .. begin + n of a fused linear, which were a linear [n, k] before."""

    linear: LinearName
    begin: int
    n: int
    k: int


def parts_of(model: DecoderModel) -> dict[str, Part]:
    """Where each of `branch.TARGETS` lies in a model's layers."""
    hidden, inner = model.hidden_size, model.intermediate_size
    queries, keys = model.q_heads * model.head_dim, model.kv_heads * model.head_dim
    return {
        "q_proj": Part("qkv", 0, queries, hidden),
        "k_proj": Part("qkv", queries, keys, hidden),
        "v_proj": Part("qkv", queries + keys, keys, hidden),
        "o_proj": Part("o", 0, hidden, queries),
        "gate_proj": Part("gate_up", 0, inner, hidden),
        "up_proj": Part("gate_up", inner, inner, hidden),
        "down_proj": Part("down", 0, hidden, inner),
    }


def outputs_of(model: DecoderModel, linear: LinearName) -> int:
    """Outputs of a fused linear."""
    return sum(part.n for part in parts_of(model).values() if part.linear == linear)


def tensor_shapes(model: DecoderModel, branch: Branch) -> dict[str, tuple[int, ...]]:
    """Every tensor that a branch of this model has, and its shape."""
    parts = parts_of(model)
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(branch.fork, branch.exit):
        for target in branch.targets:
            prefix = f"layers.{layer}.{target}"
            shapes[f"{prefix}.lora_A"] = (branch.rank, parts[target].k)
            shapes[f"{prefix}.lora_B"] = (parts[target].n, branch.rank)
    outputs = len(branch.options)
    shapes["norm.weight"] = (model.hidden_size,)
    shapes["head.weight"] = (outputs, model.hidden_size)
    shapes["head.bias"] = (outputs,)
    return shapes


def pack_adapters(
    model: DecoderModel, branch: Branch, tensors: Mapping[str, Tensor]
) -> dict[tuple[int, LinearName], LoraWeight]:
    """A branch's adapters as the backend reads them, by layer and linear.

    Both factors are rounded once to the model's dtype, B after it was scaled in float32.
    """
    parts = parts_of(model)
    packed: dict[tuple[int, LinearName], LoraWeight] = {}
    for layer in range(branch.fork, branch.exit):
        pairs: dict[LinearName, list[LoraPair]] = {}
        for target in branch.targets:
            part, prefix = parts[target], f"layers.{layer}.{target}"
            a = tensors[f"{prefix}.lora_A"].to(model.dtype)
            b = (tensors[f"{prefix}.lora_B"].float() * branch.scale).to(model.dtype)
            pairs.setdefault(part.linear, []).append(LoraPair(a, b, begin=part.begin))
        for linear, found in pairs.items():
            packed[layer, linear] = model.backend.pack_lora(
                found, outputs_of(model, linear), gated=linear == "gate_up"
            )
    return packed


class BranchHead(Module):
    """Norm, linear map and bias of a branch: hidden rows [R, D] to float32 [R, outputs].

    In float32 from the stored rows on, whatever the model's dtype: they are few, and a
    decision near its threshold is worth the digits. The norm multiplies by its weight in
    every family, in those too whose own norms multiply by 1 + weight.
    """

    def __init__(self, model: DecoderModel, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.backend: Backend = model.backend
        weight = tensors["norm.weight"].float().to(self.backend.device)
        self.norm = RMSNorm(self.backend, weight, model.eps)
        self.weight = self.backend.pack(tensors["head.weight"].float())
        self.bias = tensors["head.bias"].float().to(self.backend.device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it holds."""
        return self.norm.weight, self.weight.data, self.bias

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden.to(torch.float32))
        return self.backend.logits(normed, self.weight) + self.bias
