"""Qwen 2 and 2.5 (Yang et al. 2024): Llama with biases on queries, keys and values."""

from __future__ import annotations

from lockstep.model.config import ConfigReader, layer_types
from lockstep.model.llama import LlamaForCausalLM


def windowed_layers(reader: ConfigReader, layers: int) -> tuple[tuple[str, ...], int | None]:
    """Qwen's layer kinds: sliding from `max_window_layers` on, if `use_sliding_window`."""
    use = reader.flag("use_sliding_window", False)
    first = reader.integer("max_window_layers", 28, least=0)
    window = reader.integer("sliding_window", 4096) if use else None
    reader.optional("sliding_window")
    default = [
        "sliding_attention" if use and index >= first else "full_attention"
        for index in range(layers)
    ]
    types = layer_types(reader, default)
    if "sliding_attention" in types and window is None:
        raise reader.fail("layer_types", "has sliding layers but use_sliding_window is not set")
    return types, window


class Qwen2ForCausalLM(LlamaForCausalLM):
    """The output projection has no bias, whatever the others have."""

    def attention_types(self) -> tuple[tuple[str, ...], int | None]:
        return windowed_layers(self.reader, self.num_layers)

    def attention_biases(self) -> tuple[bool, bool]:
        self.reader.only("attention_bias", True)
        return True, False
