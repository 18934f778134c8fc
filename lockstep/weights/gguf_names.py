"""Tensor names of GGUF files, as Hugging Face spells them."""

from __future__ import annotations

import re

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
# Gemma 3 has a norm on either side of attention and of the feed-forward part.
_GEMMA_BLOCK = {
    **_BLOCK,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
_TOP_NAME = re.compile(r"([a-z_]+)\.(weight|bias)")

ROPE_FACTORS = "rope_freqs.weight"


def hugging_face_name(name: str, architecture: str) -> str | None:
    """The name that `name` has in a Hugging Face checkpoint; None if it has none."""
    if match := _BLOCK_NAME.fullmatch(name):
        layer, part, kind = match.groups()
        inner = (_GEMMA_BLOCK if architecture == "gemma3" else _BLOCK).get(part)
        return inner and f"model.layers.{layer}.{inner}.{kind}"
    if match := _TOP_NAME.fullmatch(name):
        part, kind = match.groups()
        outer = _TOP.get(part)
        return outer and f"{outer}.{kind}"
    return None
