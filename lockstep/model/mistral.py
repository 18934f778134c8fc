"""Mistral 7B (Jiang et al. 2023): Llama with an optional sliding window in every layer."""

from __future__ import annotations

from lockstep.model.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """Every layer slides when the configuration names a window, else none does."""

    def default_kv_heads(self) -> int:
        return 8

    def attention_types(self) -> tuple[tuple[str, ...], int | None]:
        if self.reader.optional("sliding_window") is None:
            return ("full_attention",) * self.num_layers, None
        window = self.reader.integer("sliding_window")
        return ("sliding_attention",) * self.num_layers, window

    def attention_biases(self) -> tuple[bool, bool]:
        self.reader.only("attention_bias", False)
        return False, False
