"""Llama 2 and 3 (Touvron et al. 2023, Dubey et al. 2024), SmolLM2 and their kin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lockstep.kernels.contract import RopeTable
from lockstep.model.base import DecoderModel, layer_groups
from lockstep.model.layers import Attention, ForwardStep, GatedMLP, Module, RMSNorm
from lockstep.model.loading import WeightLoader
from lockstep.model.rope import read_rope, rope_table


class LlamaDecoderLayer(Module):
    """Pre-norm attention and gated MLP, each added to the residual stream."""

    def __init__(
        self,
        input_layernorm: RMSNorm,
        self_attn: Attention,
        post_attention_layernorm: RMSNorm,
        mlp: GatedMLP,
    ) -> None:
        super().__init__()
        self.input_layernorm = input_layernorm
        self.self_attn = self_attn
        self.post_attention_layernorm = post_attention_layernorm
        self.mlp = mlp

    def forward(self, hidden: Tensor, step: ForwardStep) -> Tensor:
        normed = self.input_layernorm(hidden)
        hidden = self.self_attn(normed, step, residual=step.going_on(hidden))
        out: Tensor = self.mlp(self.post_attention_layernorm(hidden), step, residual=hidden)
        return out


class LlamaForCausalLM(DecoderModel):
    """The plain family; Mistral, Qwen 2 and Qwen 3 change what the hooks return."""

    qk_norm = False

    def __init__(self, config: Mapping[str, Any], loader: WeightLoader, **common: Any) -> None:
        super().__init__(config, loader, **common)
        types, window = self.attention_types()
        self.groups = layer_groups(types, self.kv_heads, self.head_dim, window)
        qkv_bias, o_bias = self.attention_biases()
        activation = self.activation()
        rope = self._rope()
        for index in range(self.num_layers):
            prefix = f"model.layers.{index}"
            attention = f"{prefix}.self_attn"
            self.layers.append(
                LlamaDecoderLayer(
                    self.build_norm(f"{prefix}.input_layernorm.weight"),
                    self.build_attention(
                        attention,
                        self.attention_shape(index, self.head_dim**-0.5),
                        rope,
                        self.build_qk_norm(attention) if self.qk_norm else None,
                        qkv_bias=qkv_bias,
                        o_bias=o_bias,
                    ),
                    self.build_norm(f"{prefix}.post_attention_layernorm.weight"),
                    self.build_mlp(f"{prefix}.mlp", index, activation),
                )
            )
        self.finish_loading()

    def attention_types(self) -> tuple[tuple[str, ...], int | None]:
        """Kind of every layer, and the window of the sliding ones."""
        self.reader.only("sliding_window")
        return ("full_attention",) * self.num_layers, None

    def attention_biases(self) -> tuple[bool, bool]:
        """Whether the fused qkv projection and the output projection have biases."""
        bias = self.reader.flag("attention_bias", False)
        return bias, bias

    def _rope(self) -> RopeTable:
        frequencies, scale = read_rope(self.reader, self.head_dim, self.max_positions)
        return rope_table(frequencies, scale, self.max_context, self.backend.device)
