"""Modules that families share: those of the Hugging Face source, over `Backend` operations.

Activations are [R, ...], one row a token of the step, in the model's dtype. Modules
hold packed weights and never compute a reduction themselves, so that a row's bits are
those of the backend's fixed trees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from lockstep.kernels.contract import (
    Activation,
    AttentionBatch,
    Backend,
    KVLayer,
    LoraRows,
    LoraSet,
    QKNorm,
    RopeTable,
    Weight,
)

LinearName = Literal["qkv", "o", "gate_up", "down"]
"""The linears of a layer, as they are fused."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """Low-rank adapters of the rows of one pass.

    Attributes:
        index: int32 [R]; each row's place in every set, -1 for a row that has none.
        sets: (layer, linear) -> its adapters; absent where no adapter touches the linear.
    """

    index: Tensor
    sets: Mapping[tuple[int, LinearName], LoraSet]


@dataclass(frozen=True, slots=True)
class Onward:
    """The rows that leave a layer, where not all of those that enter it do.

    Attributes:
        rows: int32 [K], ascending: which of the R entering rows. Of every run the last few.
        attention: as `ForwardStep.attention`, of these rows; `slots` is not read.
        adapters: int32 [K], as `Adapters.index`, of these rows; None where none has any.
    """

    rows: Tensor
    attention: Mapping[int, AttentionBatch]
    adapters: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ForwardStep:
    """Where the rows of one pass stand.

    Attributes:
        positions: int32 [R], absolute.
        attention: by place among the model's cache groups; of those with a layer in the pass.
        kv: keys and values of every layer, indexed by layer.
        onward: the rows that anybody reads after this layer; None for all. The others
            only write their keys and values.
        adapters: what is added to some rows' linears; None for none.
    """

    positions: Tensor
    attention: Mapping[int, AttentionBatch]
    kv: tuple[KVLayer, ...]
    onward: Onward | None = None
    adapters: Adapters | None = None

    def lora(self, layer: int, linear: LinearName) -> LoraRows | None:
        """The adapters of the rows that pass through a linear; None where there are none."""
        if self.adapters is None:
            return None
        found = self.adapters.sets.get((layer, linear))
        if found is None:
            return None
        index = self.adapters.index
        if self.onward is not None and linear != "qkv":
            assert self.onward.adapters is not None
            index = self.onward.adapters
        return LoraRows(index, found)

    def going_on(self, rows: Tensor) -> Tensor:
        """Of rows [R, ...] those that leave the layer."""
        return rows if self.onward is None else rows.index_select(0, self.onward.rows)


class Module(nn.Module):
    """A module that is called as its `forward`, without torch's hooks, which took a quarter of
    the time between two operations."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.__call__ = cls.forward  # type: ignore[method-assign]


class Linear(Module):
    """x [R, K] to [R, N], with an optional bias and adapters; adds `residual` [R, N] after the
    cast."""

    def __init__(self, backend: Backend, weight: Weight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.backend = backend
        self.weight = weight
        self.bias = bias

    def forward(
        self, x: Tensor, residual: Tensor | None = None, lora: LoraRows | None = None
    ) -> Tensor:
        if lora is None:
            return self.backend.linear(x, self.weight, self.bias, residual)
        return self.backend.adapted_linear(x, self.weight, lora, self.bias, residual)


class RMSNorm(Module):
    """Root-mean-square norm; `unit_offset` multiplies by 1 + weight (Gemma)."""

    def __init__(
        self, backend: Backend, weight: Tensor, eps: float, unit_offset: bool = False
    ) -> None:
        super().__init__()
        self.backend = backend
        self.weight = weight
        self.eps = eps
        self.unit_offset = unit_offset

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.backend.rms_norm(x, self.weight, self.eps, self.unit_offset, residual)


class Embedding(Module):
    """ids int32 [R] to rows [R, K], times `scale` rounded to the model's dtype (Gemma)."""

    def __init__(self, backend: Backend, weight: Weight, scale: float = 1.0) -> None:
        super().__init__()
        self.backend = backend
        self.weight = weight
        self.scale = scale

    def forward(self, ids: Tensor) -> Tensor:
        return self.backend.embedding(ids, self.weight, self.scale)


class GatedMLP(Module):
    """down(act(gate x) * up x), gate and up packed together; of the rows that leave the layer."""

    def __init__(
        self,
        backend: Backend,
        layer: int,
        gate_up_proj: Weight,
        down_proj: Linear,
        activation: Activation,
    ) -> None:
        super().__init__()
        self.backend = backend
        self.layer = layer
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self.activation: Activation = activation

    def forward(self, x: Tensor, step: ForwardStep, residual: Tensor | None = None) -> Tensor:
        lora = step.lora(self.layer, "gate_up")
        if lora is None:
            inner = self.backend.gated_linear(x, self.gate_up_proj, self.activation)
        else:
            inner = self.backend.adapted_gated_linear(x, self.gate_up_proj, lora, self.activation)
        out: Tensor = self.down_proj(inner, residual, step.lora(self.layer, "down"))
        return out


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What one layer's attention computes, beside its weights.

    Attributes:
        layer, group: index of the layer and of its cache group.
        q_heads, kv_heads, head_dim: heads; query head h reads key head h * kv_heads // q_heads.
        scale: factor on q·k. window: positions seen, itself included; None is all.
    """

    layer: int
    group: int
    q_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        return (
            self.q_heads * self.head_dim,
            self.kv_heads * self.head_dim,
            self.kv_heads * self.head_dim,
        )


class Attention(Module):
    """Causal grouped-query attention over the paged cache, with rotary positions.

    Takes the rows that enter the layer; `residual` and the result are of those that leave it.
    """

    def __init__(
        self,
        backend: Backend,
        shape: AttentionShape,
        qkv_proj: Linear,
        o_proj: Linear,
        rope: RopeTable,
        norm: QKNorm | None = None,
    ) -> None:
        super().__init__()
        self.backend = backend
        self.shape = shape
        self.qkv_proj = qkv_proj
        self.o_proj = o_proj
        self.rope = rope
        self.norm = norm

    def forward(self, x: Tensor, step: ForwardStep, residual: Tensor | None = None) -> Tensor:
        shape = self.shape
        batch, kv = step.attention[shape.group], step.kv[shape.layer]
        qkv = self.qkv_proj(x, lora=step.lora(shape.layer, "qkv"))
        q = self.backend.write_kv(
            qkv, step.positions, self.rope, kv, batch, shape.q_heads, self.norm
        )
        if step.onward is not None:
            q, batch = step.going_on(q), step.onward.attention[shape.group]
        heads = self.backend.attention(q, kv, batch, shape.scale, shape.window)
        out: Tensor = self.o_proj(heads, residual, step.lora(shape.layer, "o"))
        return out
