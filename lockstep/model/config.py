"""Checked reads of a model's configuration.

Every key of a `config.json` is either read by the family, known to leave the maths
alone, or an error: a key that is not understood may change what the model computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.types import ModelError
from lockstep.weights.checked import CheckedValues

# Keys that change neither the weights' shapes nor what is computed from them.
HARMLESS = frozenset(
    [
        "architectures",
        "model_type",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "auto_map",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "unk_token_id",
        "decoder_start_token_id",
        "use_cache",
        "initializer_range",
        "initializer_factor",
        "attention_dropout",
        "hidden_dropout",
        "embd_pdrop",
        "attn_pdrop",
        "resid_pdrop",
        "pretraining_tp",
        "cache_implementation",
        "_name_or_path",
        "name_or_path",
        "is_llama_config",
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "task_specific_params",
        "chunk_size_feed_forward",
        "transformers.js_config",
        "unsloth_fixed",
        "unsloth_version",
        "finetuning_task",
        "tokenizer_class",
        "prefix",
        "torchscript",
        "gradient_checkpointing",
        "router_aux_loss_coef",
        "_commit_hash",
    ]
)


class ConfigReader(CheckedValues):
    """Typed reads of one configuration that remember which keys were read.

    Args:
        values: as in `config.json`.
        source: the model's name, for messages.
        where: path of a nested part inside the configuration, for messages.
    """

    def __init__(self, values: Mapping[str, Any], source: str, where: str = "") -> None:
        super().__init__(values)
        self._source = source
        self._where = where

    def fail(self, key: str, complaint: str) -> ModelError:
        """The error for a key, naming the model and the key's full path."""
        return ModelError(f"{self._source}: configuration key {self._where}{key} {complaint}")

    def flag(self, key: str, default: bool) -> bool:
        value = self.optional(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(key, f"must be true or false, is {value!r}")
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse a value that asks for maths which is not implemented; null passes."""
        value = self.optional(key)
        if value is not None and value not in allowed:
            shown = " or ".join(repr(item) for item in allowed) or "its absence"
            raise self.fail(key, f"is {value!r}; only {shown} is supported")

    def section(self, key: str) -> ConfigReader | None:
        """A nested object with its own reader, None when absent."""
        value = self.optional(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.fail(key, f"must be an object, is {value!r}")
        return ConfigReader(value, self._source, f"{self._where}{key}.")

    def keys(self) -> tuple[str, ...]:
        return tuple(self._values)

    def finish(self) -> None:
        """Refuse any key with a value that was neither read nor is known to be harmless.

        Raises:
            ModelError: naming the key.
        """
        for key, value in self._values.items():
            if key not in self._read and key not in HARMLESS and value is not None:
                raise self.fail(key, f"(value {value!r}) is not known and may change the maths")


def layer_types(reader: ConfigReader, default: list[str]) -> tuple[str, ...]:
    """`layer_types` of a configuration, one entry a layer, or the family's default.

    Raises:
        ModelError: wrong length, or a kind other than full and sliding attention.
    """
    value = reader.optional("layer_types")
    types = default if value is None else value
    if not isinstance(types, list) or len(types) != len(default):
        raise reader.fail("layer_types", f"must list {len(default)} layers, is {value!r}")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise reader.fail("layer_types", f"names {kind!r}, which is not supported")
    return tuple(types)
