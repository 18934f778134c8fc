"""Trunk layers [fork, exit) in plain torch with adapters and a head that learn.

The same mathematics as the served layers, in operations that autograd knows and in no fixed
tree: training needs gradients, and its result is a function of seed and data on one kind of
machine. What is served is compared with it (`evaluate.agreement`), not assumed equal.

Everything is float32 but the products with the frozen matrices: of a bfloat16 model they are
bfloat16, as they are served, where the processor has instructions for it (twice as quick).

Shapes: B examples, S rows each, D hidden, Hq and Hk heads of E, T earlier positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from lockstep.branch import TARGETS
from lockstep.kernels.contract import QKNorm, RopeTable
from lockstep.model.base import DecoderModel
from lockstep.model.gemma3 import Gemma3DecoderLayer
from lockstep.model.layers import AttentionShape, RMSNorm
from lockstep.model.llama import LlamaDecoderLayer

Parameters = Mapping[str, Tensor]
KeysValues = tuple[Tensor, Tensor]  # [B, Hk, T, E] each


@dataclass(frozen=True, slots=True)
class Norm:
    """Root-mean-square norm with its factor as it is multiplied (Gemma's 1 + weight)."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] over its root mean square, times weight [D]."""
    scaled: Tensor = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return scaled * weight


@dataclass(frozen=True, slots=True)
class TrunkLayer:
    """One frozen layer: weights [N, K] and biases by target; norms; None where it has none."""

    index: int
    weights: dict[str, Tensor]
    biases: dict[str, Tensor]
    shape: AttentionShape
    rope: RopeTable
    before_attention: Norm
    after_attention: Norm | None
    before_mlp: Norm
    after_mlp: Norm | None
    query_norm: Norm | None
    key_norm: Norm | None
    activation: str


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of some examples, padded on the right to the longest.

    Attributes:
        hidden: float32 [B, S, D] at the entrance of the fork.
        before: positions that lie before each example's first row, int64 [B]: rows of the
            context whose keys and values are `past`.
        lengths: rows of each example, int64 [B]; the head reads the last.
        past: keys and values of the context of every layer; None where `before` is 0.
    """

    hidden: Tensor
    before: Tensor
    lengths: Tensor
    past: tuple[KeysValues, ...] | None = None


class Layers:
    """Trunk layers [fork, exit) of a model, unpacked once.

    Attributes:
        dtype: of the products with the trunk's matrices, see above.

    Raises:
        TypeError: a family whose layers this module does not know.
    """

    def __init__(self, model: DecoderModel, fork: int, exit: int) -> None:
        self.fork, self.exit = fork, exit
        self.hidden_size = model.hidden_size
        self.eps = model.eps
        self.dtype = _linears_dtype(model)
        self.layers = [_unpack(model, index, self.dtype) for index in range(fork, exit)]

    def shape_of(self, target: str) -> tuple[int, int]:
        """N and K of the linear that `target` names."""
        rows, columns = self.layers[0].weights[target].shape
        return rows, columns

    def keys_values(self, hidden: Tensor) -> list[KeysValues]:
        """What the trunk's rows [B, T, D] leave behind in every layer; no adapter acts."""
        positions = torch.arange(hidden.shape[1]).expand(hidden.shape[0], -1)
        count = torch.full((hidden.shape[0],), hidden.shape[1])
        batch = Batch(hidden, torch.zeros_like(count), count)
        found = []
        for layer in self.layers:
            last = layer is self.layers[-1]
            mask = _mask(batch, 0, layer.shape.window)
            hidden, own = _layer(layer, hidden, positions, None, mask, {}, 0.0, only_keys=last)
            found.append(own)
        return found

    def forward(self, batch: Batch, parameters: Parameters, scale: float) -> Tensor:
        """Rows [B, D] that the head reads: the last of each example, as they leave the exit.

        Of the last layer no other row is computed, beyond its keys and values.
        """
        hidden = batch.hidden
        positions = batch.before[:, None] + torch.arange(hidden.shape[1])
        width = 0 if batch.past is None else batch.past[0][0].shape[2]
        for place, layer in enumerate(self.layers):
            past = None if batch.past is None else batch.past[place]
            mask = _mask(batch, width, layer.shape.window)
            read = batch.lengths - 1 if layer is self.layers[-1] else None
            hidden, _ = _layer(layer, hidden, positions, past, mask, parameters, scale, read=read)
        return hidden[:, 0]

    def outputs(self, batch: Batch, parameters: Parameters, scale: float) -> Tensor:
        """The head's float32 outputs [B, outputs]."""
        hidden = self.forward(batch, parameters, scale)
        rows = rms_norm(hidden, parameters["norm.weight"], self.eps)
        return functional.linear(rows, parameters["head.weight"], parameters["head.bias"])


def _mask(batch: Batch, width: int, window: int | None) -> Tensor:
    """What to add to scores [B, 1, 1, S, width + S]: 0 where a row sees a key, else -inf.

    A padded row sees itself, so that no row sees nothing.
    """
    rows = batch.hidden.shape[1]
    at = torch.arange(rows)
    query = batch.before[:, None, None] + at[:, None]
    earlier = torch.arange(width).expand(len(batch.hidden), 1, width)
    own = batch.before[:, None, None] + at
    keys = torch.cat([earlier, own], dim=2)
    real = torch.cat([earlier < batch.before[:, None, None], torch.ones_like(own) > 0], dim=2)
    seen = real & (keys <= query)
    if window is not None:
        seen &= query - keys < window
    mask = torch.zeros(seen.shape).masked_fill(~seen, -math.inf)
    return mask[:, None, None]


def _layer(
    layer: TrunkLayer,
    hidden: Tensor,
    positions: Tensor,
    past: KeysValues | None,
    mask: Tensor,
    parameters: Parameters,
    scale: float,
    *,
    only_keys: bool = False,
    read: Tensor | None = None,
) -> tuple[Tensor, KeysValues]:
    """Rows as they leave the layer, and their own keys and values (before `past` is joined).

    Args:
        only_keys: leave the rows as they are. read: int64 [B], the one row of each example that
            goes on; by default all do.
    """

    def linear(x: Tensor, target: str) -> Tensor:
        weight = layer.weights[target]
        out = functional.linear(x.to(weight.dtype), weight, layer.biases.get(target))
        down = parameters.get(f"layers.{layer.index}.{target}.lora_A")
        if down is None:
            return out.float()
        up = parameters[f"layers.{layer.index}.{target}.lora_B"]
        return functional.linear(functional.linear(x, down), up) * scale + out

    shape = layer.shape
    normed = layer.before_attention(hidden)

    def heads(target: str, count: int) -> Tensor:
        found = linear(normed, target)
        return found.view(*found.shape[:2], count, shape.head_dim).transpose(1, 2)

    key = _rotate(_normed(heads("k_proj", shape.kv_heads), layer.key_norm), layer.rope, positions)
    value = heads("v_proj", shape.kv_heads)
    own = (key, value)
    if only_keys:
        return hidden, own
    if read is not None:
        normed, hidden = _rows(normed, read), _rows(hidden, read)
        positions, mask = _rows(positions, read), _rows(mask[:, 0, 0], read)[:, None, None]
    examples, rows, _ = hidden.shape
    query = heads("q_proj", shape.q_heads)
    query = _rotate(_normed(query, layer.query_norm), layer.rope, positions)
    if past is not None:
        key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
    # Heads that share keys stand below each other: one product for all, no copies of the keys.
    grouped = query.reshape(examples, shape.kv_heads, -1, shape.head_dim)
    scores = grouped @ key.transpose(-1, -2) * shape.scale
    scores = scores.view(examples, shape.kv_heads, -1, rows, key.shape[2]) + mask
    attended = scores.softmax(-1).flatten(2, 3) @ value
    attended = attended.view(examples, shape.q_heads, rows, shape.head_dim)
    attended = linear(attended.transpose(1, 2).reshape(examples, rows, -1), "o_proj")
    hidden = hidden + _normed(attended, layer.after_attention)
    normed = layer.before_mlp(hidden)
    inner = _activate(linear(normed, "gate_proj"), layer.activation) * linear(normed, "up_proj")
    hidden = hidden + _normed(linear(inner, "down_proj"), layer.after_mlp)
    return hidden, own


def _rows(x: Tensor, read: Tensor) -> Tensor:
    """One row of each example of x [B, S, ...], as [B, 1, ...]."""
    return x[torch.arange(len(x)), read][:, None]


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else norm(x)


def _activate(x: Tensor, kind: str) -> Tensor:
    return functional.silu(x) if kind == "silu" else functional.gelu(x, approximate="tanh")


def _rotate(x: Tensor, rope: RopeTable, positions: Tensor) -> Tensor:
    """Rotary positions, half-split form, of x [B, H, S, E] at positions [B, S]."""
    at = positions.clamp(max=rope.cos.shape[0] - 1)  # padded rows may stand behind the table
    cos, sin = rope.cos[at][:, None], rope.sin[at][:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


# --- from the model's packed layers -----------------------------------------------


def _linears_dtype(model: DecoderModel) -> torch.dtype:
    """bfloat16 for a bfloat16 model on a processor that multiplies it, else float32."""
    capabilities = torch.cpu.get_capabilities()
    quick = any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))
    return torch.bfloat16 if quick and model.dtype == torch.bfloat16 else torch.float32


def _unpack(model: DecoderModel, index: int, dtype: torch.dtype) -> TrunkLayer:
    layer = model.layers[index]
    if not isinstance(layer, LlamaDecoderLayer | Gemma3DecoderLayer):
        raise TypeError(f"layers of {model.architecture} cannot be trained through")
    attention, mlp = layer.self_attn, layer.mlp
    unpack = model.backend.unpack
    sizes = list(attention.shape.qkv_sizes)
    qkv = torch.split(unpack(attention.qkv_proj.weight).float().cpu(), sizes)
    gate, up = unpack(mlp.gate_up_proj).float().cpu().chunk(2)
    matrices = (
        *qkv,
        unpack(attention.o_proj.weight).float().cpu(),
        gate,
        up,
        unpack(mlp.down_proj.weight).float().cpu(),
    )
    biases: dict[str, Tensor] = {}
    if attention.qkv_proj.bias is not None:
        parts = torch.split(attention.qkv_proj.bias.float().cpu(), sizes)
        biases.update(zip(TARGETS[:3], parts, strict=True))
    if attention.o_proj.bias is not None:
        biases["o_proj"] = attention.o_proj.bias.float().cpu()
    after: Sequence[RMSNorm | None] = (None, None)
    before_mlp = layer.post_attention_layernorm
    if isinstance(layer, Gemma3DecoderLayer):
        after = (layer.post_attention_layernorm, layer.post_feedforward_layernorm)
        before_mlp = layer.pre_feedforward_layernorm
    rope = RopeTable(attention.rope.cos.cpu(), attention.rope.sin.cpu())
    return TrunkLayer(
        index=index,
        weights={
            name: matrix.to(dtype).contiguous()
            for name, matrix in zip(TARGETS, matrices, strict=True)
        },
        biases={name: bias.to(dtype) for name, bias in biases.items()},
        shape=attention.shape,
        rope=rope,
        before_attention=_norm(layer.input_layernorm),
        after_attention=None if after[0] is None else _norm(after[0]),
        before_mlp=_norm(before_mlp),
        after_mlp=None if after[1] is None else _norm(after[1]),
        query_norm=_head_norm(attention.norm, "q"),
        key_norm=_head_norm(attention.norm, "k"),
        activation=mlp.activation,
    )


def _norm(norm: RMSNorm) -> Norm:
    weight = norm.weight.float().cpu()
    return Norm(1.0 + weight if norm.unit_offset else weight, norm.eps)


def _head_norm(norm: QKNorm | None, part: str) -> Norm | None:
    if norm is None:
        return None
    weight: Tensor = getattr(norm, part).float().cpu()
    return Norm(1.0 + weight if norm.unit_offset else weight, norm.eps)
