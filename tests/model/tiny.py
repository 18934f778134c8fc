"""Small random models of every family, as transformers writes them, and their oracles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lockstep.kernels.contract import Backend
from lockstep.kernels.cpu import make_backend
from lockstep.model import load_model
from lockstep.runner.probe import Probe
from lockstep.runner.runner import Runner
from lockstep.weights import Checkpoint, open_checkpoint

_COMMON: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 20000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}

# Name -> model_type and what differs from the common shape.
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-bias": ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama-llama3": ("llama", {"rope_parameters": _LLAMA3_ROPE}),
    "llama-yarn": ("llama", {"rope_parameters": _YARN_ROPE}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-wide-heads": ("qwen3", {"head_dim": 32, "attention_bias": True}),
    "gemma3": (
        "gemma3_text",
        {
            "tie_word_embeddings": True,
            "sliding_window": 24,
            "query_pre_attn_scalar": 40,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gemma3-scaled": (
        "gemma3_text",
        {
            "tie_word_embeddings": True,
            "sliding_window": 16,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            },
        },
    ),
}


def build_oracle(name: str, **more: Any) -> Any:
    """A random transformers model in float32 whose every tensor matters; `more` of its
    configuration."""
    model_type, changes = TINY[name]
    config = AutoConfig.for_model(model_type, **{**_COMMON, **changes, **more})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter_name.endswith("norm.weight"):
                offset = 0.0 if model_type == "gemma3_text" else 1.0
                parameter.copy_(offset + 0.3 * noise)
            else:
                parameter.copy_(0.15 * noise)
    return model.float().eval()


def save(model: Any, folder: Path) -> Checkpoint:
    """The oracle's files, opened as a checkpoint."""
    model.save_pretrained(folder)
    return open_checkpoint(str(folder))


def probe_of(
    checkpoint: Checkpoint,
    dtype: torch.dtype = torch.float32,
    backend: Backend | None = None,
    **options: Any,
) -> Probe:
    """A runner over the checkpoint on the native backend, with a pool of 8 MiB."""
    backend = backend or make_backend("native", 1)
    options = {"memory_bytes": 8 * 2**20, **options}
    return Probe(Runner(load_model(checkpoint, backend, dtype), backend, **options))
