"""What every family offers to the runner, and the parts that all families build alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lockstep.kernels.contract import Activation, QKNorm, RopeTable, Weight
from lockstep.model.config import ConfigReader
from lockstep.model.layers import (
    Attention,
    AttentionShape,
    Embedding,
    ForwardStep,
    GatedMLP,
    Linear,
    Onward,
    RMSNorm,
)
from lockstep.model.loading import WeightLoader
from lockstep.types import LayerGroup

__all__ = ["DecoderModel", "ForwardStep", "Onward"]


def layer_groups(
    types: Sequence[str], kv_heads: int, head_dim: int, window: int | None
) -> tuple[LayerGroup, ...]:
    """Cache groups of layers named "full_attention" or "sliding_attention", full first."""
    groups = []
    full = tuple(i for i, kind in enumerate(types) if kind == "full_attention")
    if full:
        groups.append(LayerGroup("full", "full", full, kv_heads, head_dim))
    sliding = tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")
    if sliding:
        groups.append(LayerGroup("sliding", "sliding", sliding, kv_heads, head_dim, window))
    return tuple(groups)


class DecoderModel(nn.Module):
    """A decoder-only model over packed weights; its rows are tokens of any sequences.

    A family's constructor reads its configuration through `self.reader`, builds its
    layers with `build_*`, and leaves `layers`, `norm`, `embed_tokens` and `lm_head`
    behind. Nothing here is per request: which rows run is the runner's business.

    Attributes:
        groups: cache groups; `ForwardStep.attention` names them by their place.
        num_layers, hidden_size, vocab_size: of the model.
        max_context: positions that the rotation tables cover.
        architecture: name in `config.json`. weight_bytes: bytes of packed weights.
        dtype: of weights and activations.

    Raises (on construction):
        ModelError: naming the configuration key or tensor at fault.
    """

    activation_keys: ClassVar[tuple[str, ...]] = ("hidden_act",)
    unit_offset: ClassVar[bool] = False

    groups: tuple[LayerGroup, ...]
    embed_tokens: Embedding
    norm: RMSNorm
    lm_head: Weight

    def __init__(
        self,
        config: Mapping[str, Any],
        loader: WeightLoader,
        *,
        source: str,
        architecture: str,
        max_context: int = 0,
    ) -> None:
        super().__init__()
        self.architecture = architecture
        self.backend = loader.backend
        self.dtype = loader.dtype
        self.loader: WeightLoader = loader
        self.reader: ConfigReader = ConfigReader(config, source)
        read = self.reader
        self.hidden_size = read.integer("hidden_size")
        self.intermediate_size = read.integer("intermediate_size")
        self.num_layers = read.integer("num_hidden_layers")
        self.vocab_size = read.integer("vocab_size")
        self.q_heads = read.integer("num_attention_heads")
        self.kv_heads = read.integer("num_key_value_heads", self.default_kv_heads())
        self.head_dim = read.integer("head_dim", self.default_head_dim())
        self.eps = read.number("rms_norm_eps", 1e-6)
        self.tied = read.flag("tie_word_embeddings", self.default_tied())
        self.max_positions = read.integer("max_position_embeddings", 2048)
        self.max_context = min(max_context or self.max_positions, self.max_positions)
        self._refuse_unsupported()
        # First, while nothing else is in memory: it is the largest tensor by far.
        table = loader.matrix(["model.embed_tokens.weight"], (self.vocab_size,), self.hidden_size)
        self.embed_tokens = Embedding(self.backend, table, self.embedding_scale())
        self.layers = nn.ModuleList()

    def default_kv_heads(self) -> int:
        return self.q_heads

    def default_head_dim(self) -> int:
        return self.hidden_size // self.q_heads

    def default_tied(self) -> bool:
        return False

    def _refuse_unsupported(self) -> None:
        read = self.reader
        if self.q_heads % self.kv_heads:
            raise read.fail(
                "num_key_value_heads", f"({self.kv_heads}) must divide {self.q_heads} query heads"
            )
        read.only("mlp_bias", False)
        read.only("partial_rotary_factor", 1.0)
        read.only("rope_interleaved", False)
        read.only("logit_scale", 1.0)
        read.only("final_logit_softcapping")
        read.only("attn_logit_softcapping")
        read.only("use_bidirectional_attention", False)
        read.only("is_encoder_decoder", False)
        read.only("add_cross_attention", False)
        read.only("quantization_config")

    # --- building ------------------------------------------------------------

    def finish_loading(self) -> None:
        """The last norm and the head; then refuse keys and tensors that nothing read."""
        loader = self.loader
        self.norm = self.build_norm("model.norm.weight")
        self.lm_head = (
            self.embed_tokens.weight
            if self.tied
            else loader.matrix(["lm_head.weight"], (self.vocab_size,), self.hidden_size)
        )
        self.reader.finish()
        loader.finish(self._ignored_tensor)
        self.weight_bytes = loader.weight_bytes
        del self.loader, self.reader
        self.eval()

    def _ignored_tensor(self, name: str) -> bool:
        # Tables that old checkpoints stored, and the copy of a tied head.
        return name.endswith("rotary_emb.inv_freq") or (self.tied and name == "lm_head.weight")

    def embedding_scale(self) -> float:
        return 1.0

    def activation(self) -> Activation:
        """The gated MLP's activation, from whichever key the family uses."""
        known: dict[str, Activation] = {
            "silu": "silu",
            "swish": "silu",
            "gelu_pytorch_tanh": "gelu_tanh",
            "gelu_new": "gelu_tanh",
        }
        named: str | None = None
        for key in self.activation_keys:
            value = self.reader.optional(key)
            if value is None or named is not None:
                continue
            if not isinstance(value, str) or value not in known:
                raise self.reader.fail(key, f"is {value!r}; one of {', '.join(known)} is supported")
            named = value
        return known[named or self.default_activation()]

    def default_activation(self) -> str:
        return "silu"

    def build_norm(self, name: str) -> RMSNorm:
        weight = self.loader.vector(name, self.hidden_size)
        return RMSNorm(self.backend, weight, self.eps, self.unit_offset)

    def build_qk_norm(self, prefix: str) -> QKNorm:
        """Per-head norms `q_norm` and `k_norm` below `prefix`."""
        return QKNorm(
            q=self.loader.vector(f"{prefix}.q_norm.weight", self.head_dim),
            k=self.loader.vector(f"{prefix}.k_norm.weight", self.head_dim),
            eps=self.eps,
            unit_offset=self.unit_offset,
        )

    def build_attention(
        self,
        prefix: str,
        shape: AttentionShape,
        rope: RopeTable,
        norm: QKNorm | None = None,
        *,
        qkv_bias: bool = False,
        o_bias: bool = False,
    ) -> Attention:
        loader, names = self.loader, [f"{prefix}.{part}_proj" for part in "qkv"]
        qkv = Linear(
            self.backend,
            loader.matrix([f"{n}.weight" for n in names], shape.qkv_sizes, self.hidden_size),
            loader.bias([f"{n}.bias" for n in names], shape.qkv_sizes) if qkv_bias else None,
        )
        size = (self.hidden_size,)
        out = Linear(
            self.backend,
            loader.matrix([f"{prefix}.o_proj.weight"], size, shape.q_heads * shape.head_dim),
            loader.bias([f"{prefix}.o_proj.bias"], size) if o_bias else None,
        )
        return Attention(self.backend, shape, qkv, out, rope, norm)

    def build_mlp(self, prefix: str, layer: int, activation: Activation) -> GatedMLP:
        gate_up = self.loader.gated(
            f"{prefix}.gate_proj.weight",
            f"{prefix}.up_proj.weight",
            self.intermediate_size,
            self.hidden_size,
        )
        down = self.loader.matrix(
            [f"{prefix}.down_proj.weight"], (self.hidden_size,), self.intermediate_size
        )
        return GatedMLP(self.backend, layer, gate_up, Linear(self.backend, down), activation)

    def attention_shape(self, layer: int, scale: float) -> AttentionShape:
        """Shape of a layer's attention; its group is the one that lists the layer."""
        group = next(g for g, entry in enumerate(self.groups) if layer in entry.layers)
        return AttentionShape(
            layer=layer,
            group=group,
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            scale=scale,
            window=self.groups[group].window,
        )

    # --- running -------------------------------------------------------------

    def embed(self, ids: Tensor) -> Tensor:
        """ids int32 [R] to hidden rows [R, D]."""
        out: Tensor = self.embed_tokens(ids)
        return out

    def run_layers(self, hidden: Tensor, begin: int, end: int, step: ForwardStep) -> Tensor:
        """Layers [begin, end) over rows [R, D]; their keys and values go into the cache.

        With `step.onward` rows are left behind in a layer, so that it must be the only one.
        """
        for layer in islice(self.layers, begin, end):
            hidden = layer(hidden, step)
        return hidden

    def final_norm(self, hidden: Tensor) -> Tensor:
        """The last norm of rows [R, D]; `head` reads its result."""
        out: Tensor = self.norm(hidden)
        return out

    def head(self, normed: Tensor) -> Tensor:
        """Logits of normed rows [R, D]: float32 [R, V]."""
        return self.backend.logits(normed, self.lm_head)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head of rows [R, D]: float32 [R, V]."""
        return self.head(self.final_norm(hidden))


def model_dtype(name: str) -> torch.dtype:
    """torch's dtype for `ModelOptions.dtype`; "auto" is bfloat16."""
    return torch.float32 if name == "float32" else torch.bfloat16
