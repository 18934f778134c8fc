"""Gemma 3, text (Gemma Team 2025): sliding and full layers, each kind with its own rope."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lockstep.kernels.contract import RopeTable
from lockstep.model.base import DecoderModel, layer_groups
from lockstep.model.config import layer_types
from lockstep.model.layers import Attention, ForwardStep, GatedMLP, Module, RMSNorm
from lockstep.model.loading import WeightLoader
from lockstep.model.rope import default_frequencies, read_rope, rope_table, scaled_frequencies

_GLOBAL_THETA = 1_000_000.0
_LOCAL_THETA = 10_000.0


class Gemma3DecoderLayer(Module):
    """Attention and gated MLP, each normed before and after, then added."""

    def __init__(
        self,
        input_layernorm: RMSNorm,
        self_attn: Attention,
        post_attention_layernorm: RMSNorm,
        pre_feedforward_layernorm: RMSNorm,
        mlp: GatedMLP,
        post_feedforward_layernorm: RMSNorm,
    ) -> None:
        super().__init__()
        self.input_layernorm = input_layernorm
        self.self_attn = self_attn
        self.post_attention_layernorm = post_attention_layernorm
        self.pre_feedforward_layernorm = pre_feedforward_layernorm
        self.mlp = mlp
        self.post_feedforward_layernorm = post_feedforward_layernorm

    def forward(self, hidden: Tensor, step: ForwardStep) -> Tensor:
        attended = self.self_attn(self.input_layernorm(hidden), step)
        hidden = self.post_attention_layernorm(attended, residual=step.going_on(hidden))
        inner = self.mlp(self.pre_feedforward_layernorm(hidden), step)
        out: Tensor = self.post_feedforward_layernorm(inner, residual=hidden)
        return out


class Gemma3ForCausalLM(DecoderModel):
    """Scaled embeddings, offset norms, normed queries and keys; see `DecoderModel`."""

    activation_keys = ("hidden_activation", "hidden_act")
    unit_offset = True

    def __init__(self, config: Mapping[str, Any], loader: WeightLoader, **common: Any) -> None:
        super().__init__(config, loader, **common)
        read = self.reader
        read.only("attention_bias", False)
        window = read.integer("sliding_window", 4096)
        types = self._layer_types()
        self.groups = layer_groups(types, self.kv_heads, self.head_dim, window)
        scale = read.number("query_pre_attn_scalar", 256) ** -0.5
        activation = self.activation()
        ropes = self._ropes()
        for index in range(self.num_layers):
            prefix = f"model.layers.{index}"
            attention = f"{prefix}.self_attn"
            self.layers.append(
                Gemma3DecoderLayer(
                    self.build_norm(f"{prefix}.input_layernorm.weight"),
                    self.build_attention(
                        attention,
                        self.attention_shape(index, scale),
                        ropes[types[index]],
                        self.build_qk_norm(attention),
                    ),
                    self.build_norm(f"{prefix}.post_attention_layernorm.weight"),
                    self.build_norm(f"{prefix}.pre_feedforward_layernorm.weight"),
                    self.build_mlp(f"{prefix}.mlp", index, activation),
                    self.build_norm(f"{prefix}.post_feedforward_layernorm.weight"),
                )
            )
        self.finish_loading()

    def default_kv_heads(self) -> int:
        return 4

    def default_head_dim(self) -> int:
        return 256

    def default_tied(self) -> bool:
        return True

    def default_activation(self) -> str:
        return "gelu_pytorch_tanh"

    def embedding_scale(self) -> float:
        return float(self.hidden_size**0.5)

    def _layer_types(self) -> tuple[str, ...]:
        read = self.reader
        if read.optional("sliding_window_pattern") is None:
            period = read.integer("_sliding_window_pattern", 6)
        else:
            period = read.integer("sliding_window_pattern")
        read.optional("_sliding_window_pattern")
        default = [
            "full_attention" if (index + 1) % period == 0 else "sliding_attention"
            for index in range(self.num_layers)
        ]
        return layer_types(read, default)

    def _ropes(self) -> dict[str, RopeTable]:
        """One table per kind of layer, from `rope_parameters` or from the older keys."""
        read = self.reader
        local_theta = read.number("rope_local_base_freq", _LOCAL_THETA)
        nested = read.section("rope_parameters")
        if nested is None:
            tables = {
                "full_attention": read_rope(
                    read, self.head_dim, self.max_positions, default_theta=_GLOBAL_THETA
                ),
                # `rope_scaling` stretches the full layers only.
                "sliding_attention": (default_frequencies(local_theta, self.head_dim), 1.0),
            }
        else:
            tables = {}
            global_theta = read.number("rope_theta", _GLOBAL_THETA)
            for kind, theta in (
                ("full_attention", global_theta),
                ("sliding_attention", local_theta),
            ):
                part = nested.section(kind)
                if part is None:
                    tables[kind] = (default_frequencies(theta, self.head_dim), 1.0)
                    continue
                theta = part.number("rope_theta", theta)
                tables[kind] = scaled_frequencies(part, theta, self.head_dim, self.max_positions)
            nested.finish()
        return {
            kind: rope_table(frequencies, scale, self.max_context, self.backend.device)
            for kind, (frequencies, scale) in tables.items()
        }
