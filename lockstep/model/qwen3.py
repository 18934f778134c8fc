"""Qwen 3, dense (Yang et al. 2025): Llama with per-head norms of queries and keys."""

from __future__ import annotations

from lockstep.model.llama import LlamaForCausalLM
from lockstep.model.qwen2 import windowed_layers


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Heads have a size of their own, by default 128."""

    qk_norm = True

    def default_head_dim(self) -> int:
        return 128

    def attention_types(self) -> tuple[tuple[str, ...], int | None]:
        return windowed_layers(self.reader, self.num_layers)
