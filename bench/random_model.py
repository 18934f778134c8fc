"""A model of a public shape with random weights, made on the device: no file is read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.contract import Backend, Weight
from lockstep.model import DecoderModel
from lockstep.model.loading import WeightLoader
from lockstep.model.registry import FAMILIES

Progress = Callable[[str, float], None]


class RandomCheckpoint:
    """Has the interface of an opened checkpoint, without files: every tensor is made on demand.

    Values are drawn by a generator seeded with the tensor's name, scaled so that rows keep
    their size through the layers; norms are ones.
    """

    format = "safetensors"

    def __init__(self, config: dict[str, Any], device: torch.device) -> None:
        self.name = str(config["model_type"])
        self.config = dict(config)
        self.generation_config: dict[str, Any] = {}
        self.chat_template: str | None = None
        self._device = device
        self._shapes = _shapes(config)

    def tensor_names(self) -> tuple[str, ...]:
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def tensor(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16, device=self._device)
        generator = torch.Generator(self._device).manual_seed(sum(map(ord, name)))
        values = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
        return values.normal_(0.0, 1 / math.sqrt(shape[1]), generator=generator)

    def weights_hash(self) -> str:
        return "random"


class _DeviceLoader(WeightLoader):
    """Stacks on the device: nothing of a random model passes through the host."""

    def _workspace(self, rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=self.dtype, device=self.backend.device)

    def _packed(self, weight: Weight) -> Weight:
        self.weight_bytes += weight.data.numel() * weight.data.element_size()
        return weight


def random_model(
    config: dict[str, Any], backend: Backend, progress: Progress | None = None
) -> DecoderModel:
    """The model of a Hugging Face configuration in bfloat16 on the backend's device."""
    checkpoint = RandomCheckpoint(config, backend.device)
    loader = _DeviceLoader(checkpoint, backend, torch.bfloat16, progress)
    architecture = str(config["architectures"][0])
    with torch.inference_mode():
        return FAMILIES[architecture](
            checkpoint.config, loader, source=checkpoint.name, architecture=architecture
        )


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama-like checkpoint."""
    hidden, inner, vocab = (
        int(config[key]) for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    head = int(config["head_dim"])
    queries = int(config["num_attention_heads"]) * head
    keys = int(config["num_key_value_heads"]) * head
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(int(config["num_hidden_layers"])):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (queries, hidden),
            prefix + "self_attn.k_proj.weight": (keys, hidden),
            prefix + "self_attn.v_proj.weight": (keys, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, queries),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
        }
        if config["model_type"] == "qwen3":
            shapes |= {
                prefix + "self_attn.q_norm.weight": (head,),
                prefix + "self_attn.k_norm.weight": (head,),
            }
    return shapes
