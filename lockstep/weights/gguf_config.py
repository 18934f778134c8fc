"""A GGUF file's metadata as a Hugging Face configuration.

Every key under the architecture's prefix is either read, known to leave the maths alone,
or an error: a key that is not understood may change what the model computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.types import ModelError
from lockstep.weights.checked import CheckedValues


@dataclass(frozen=True, slots=True)
class Family:
    """What Hugging Face calls an architecture of GGUF, and how its files differ.

    Attributes:
        architecture, model_type: as in config.json.
        activation: name and value of the activation entry.
        permuted: query and key rows are stored interleaved for adjacent-pair rope.
        norm_offset: what the file's norm weights have added to Hugging Face's.
    """

    architecture: str
    model_type: str
    activation: tuple[str, str] = ("hidden_act", "silu")
    permuted: bool = False
    norm_offset: float = 0.0


_LLAMA = Family("LlamaForCausalLM", "llama", permuted=True)
_MISTRAL = Family("MistralForCausalLM", "mistral", permuted=True)
_FAMILIES = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "qwen2": Family("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3"),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        norm_offset=1.0,
    ),
}
# Keys that change nothing in the maths, or nothing that is not read off the tensors.
_HARMLESS = {
    "vocab_size",
    "rope.scaling.finetuned",
    "tensor_data_layout",
    "pooling_type",
    "mm.tokens_per_image",
}
_GEMMA_PERIOD = 6  # every sixth layer attends to everything
_GEMMA_LOCAL_BASE = 10000.0
_GEMMA_27B_LAYERS = 62


class _Keys(CheckedValues):
    """Typed reads of one architecture's metadata that remember what was read."""

    def __init__(self, metadata: Mapping[str, Any], prefix: str, path: str) -> None:
        super().__init__(
            {
                key.removeprefix(prefix + "."): value
                for key, value in metadata.items()
                if key.startswith(prefix + ".")
            }
        )
        self._prefix = prefix
        self._path = path

    def fail(self, key: str, complaint: str) -> ModelError:
        return ModelError(f"{self._path}: metadata {self._prefix}.{key} {complaint}")

    def _wanted(self, key: str, default: float | None) -> Any:
        value = super()._wanted(key, default)
        if isinstance(value, list) and value and len(set(value)) == 1:
            return value[0]  # some writers give a per-layer list of equal values
        return value

    def only(self, key: str, *allowed: Any) -> None:
        value = self.optional(key)
        if value is not None and value not in allowed:
            raise self.fail(key, f"is {value!r}; this engine knows {allowed[0]!r} only")

    def refuse_unread(self) -> None:
        for key in self._values:
            if key not in self._read and key not in _HARMLESS:
                raise self.fail(key, "is not understood and may change what the model computes")


def family_of(metadata: Mapping[str, Any], path: str) -> tuple[str, Family]:
    """The file's architecture, by GGUF's name and as a `Family`.

    Raises:
        ModelError: it names none, or one that is not supported.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise ModelError(f"{path}: metadata general.architecture is missing")
    family = _FAMILIES.get(name)
    if family is None:
        known = ", ".join(sorted(_FAMILIES))
        raise ModelError(f"{path}: architecture {name!r} is not supported ({known} are)")
    if name == "llama" and metadata.get("llama.attention.sliding_window"):
        family = _MISTRAL  # llama.cpp writes both under one name
    return name, family


def build_config(
    metadata: Mapping[str, Any],
    *,
    path: str,
    vocab_size: int,
    layers: int,
    tied: bool,
    biases: frozenset[str],
) -> dict[str, Any]:
    """The configuration of a file with this metadata, as in config.json.

    Args:
        vocab_size: rows of the embedding.
        layers: how many layers have tensors.
        tied: the file has no output matrix of its own.
        biases: which of "attention" and "mlp" have biases.

    Raises:
        ModelError: a key that is missing, out of range, or not understood.
    """
    name, family = family_of(metadata, path)
    keys = _Keys(metadata, name, path)
    if (stated := keys.integer("block_count")) != layers:
        raise keys.fail("block_count", f"is {stated}, but tensors of {layers} layers are there")
    heads = keys.integer("attention.head_count")
    hidden = keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": _short(keys.number("attention.layer_norm_rms_epsilon")),
        "rope_theta": _short(keys.number("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(keys),
        "max_position_embeddings": keys.integer("context_length"),
        "vocab_size": vocab_size,
        "tie_word_embeddings": tied,
        "attention_dropout": 0.0,
        family.activation[0]: family.activation[1],
    }
    # Hugging Face's other families have biases by definition or not at all.
    if family.model_type in ("llama", "qwen3", "gemma3_text"):
        config["attention_bias"] = "attention" in biases
    if family.model_type == "llama":
        config["mlp_bias"] = "mlp" in biases
    keys.only("attention.value_length", head_dim)
    # The rotated part of a head; Hugging Face's name for less than the whole.
    rotated = keys.integer("rope.dimension_count", head_dim)
    if rotated > head_dim or rotated % 2:
        raise keys.fail("rope.dimension_count", f"is {rotated}, heads have {head_dim}")
    if rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    keys.only("attention.causal", True)
    keys.only("expert_count", 0)
    keys.only("expert_used_count", 0)
    keys.only("use_parallel_residual", False)
    if family.model_type == "gemma3_text":
        _add_gemma(config, keys)
    elif family.model_type == "mistral":
        window = keys.optional("attention.sliding_window")
        config["sliding_window"] = keys.integer("attention.sliding_window") if window else None
    for entry, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        value = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(value, int):
            config[f"{entry}_token_id"] = value
    keys.refuse_unread()
    return config


def _short(value: float) -> float:
    """The shortest decimal that has this float32 value: 1e-05, not 9.999999747378752e-06."""
    import numpy as np

    return float(np.format_float_positional(np.float32(value), unique=True))


def _rope_scaling(keys: _Keys) -> dict[str, Any] | None:
    kind = keys.optional("rope.scaling.type")
    factor = keys.optional("rope.scaling.factor")
    original = keys.optional("rope.scaling.original_context_length")
    if kind in (None, "none"):
        old = keys.optional("rope.scale_linear")
        if factor is None and old is not None:
            factor = old
        if factor in (None, 0.0, 1.0):
            return None
        kind = "linear"
    keys.only("rope.scaling.attn_factor", 1.0)
    if kind == "linear":
        return {"rope_type": "linear", "factor": keys.number("rope.scaling.factor", factor)}
    if kind == "yarn":
        scaling: dict[str, Any] = {
            "rope_type": "yarn",
            "factor": keys.number("rope.scaling.factor"),
        }
        if original is not None:
            scaling["original_max_position_embeddings"] = original
        for entry, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if keys.optional(f"rope.scaling.{key}") is not None:
                scaling[entry] = keys.number(f"rope.scaling.{key}")
        return scaling
    raise keys.fail("rope.scaling.type", f"is {kind!r}, which is not supported")


def _add_gemma(config: dict[str, Any], keys: _Keys) -> None:
    layers = config["num_hidden_layers"]
    config["sliding_window"] = keys.integer("attention.sliding_window")
    pattern = keys.optional("attention.sliding_window_pattern")
    if isinstance(pattern, list) and len(pattern) == layers:
        sliding = [bool(entry) for entry in pattern]
    else:
        period = keys.integer("attention.sliding_window_pattern", _GEMMA_PERIOD)
        sliding = [(layer + 1) % period != 0 for layer in range(layers)]
    config["layer_types"] = [
        "sliding_attention" if local else "full_attention" for local in sliding
    ]
    config["rope_local_base_freq"] = _short(keys.number("rope.freq_base_swa", _GEMMA_LOCAL_BASE))
    # The file does not store the query's scale: only the largest model's is not its head's.
    config["query_pre_attn_scalar"] = (
        config["hidden_size"] // config["num_attention_heads"]
        if layers == _GEMMA_27B_LAYERS
        else config["head_dim"]
    )
    for entry, key in (
        ("final_logit_softcapping", "final_logit_softcapping"),
        ("attn_logit_softcapping", "attn_logit_softcapping"),
    ):
        value = keys.optional(key)
        config[entry] = None if not value else keys.number(key)
    config["use_bidirectional_attention"] = False
