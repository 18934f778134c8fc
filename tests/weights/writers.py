"""Writers of tiny checkpoints with random weights, in both formats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

Array = np.ndarray[Any, Any]

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 40,
}
TOKENS = ["<s>", "</s>", *(chr(code) for code in range(33, 71))]


def tiny_tensors(
    *,
    tied: bool = True,
    qk_norm: bool = False,
    gemma: bool = False,
    bias: bool = False,
    seed: int = 0,
) -> dict[str, Array]:
    """Random float32 tensors of a two-layer model, by Hugging Face's names."""
    random = np.random.default_rng(seed)
    size = TINY
    hidden, inner, dim = size["hidden_size"], size["intermediate_size"], size["head_dim"]
    queries, keys = size["num_attention_heads"] * dim, size["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (size["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not tied:
        shapes["lm_head.weight"] = (size["vocab_size"], hidden)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if gemma:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for layer in range(size["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{norm}.weight": (hidden,) for norm in norms}
        for name, rows, columns in (
            ("self_attn.q_proj", queries, hidden),
            ("self_attn.k_proj", keys, hidden),
            ("self_attn.v_proj", keys, hidden),
            ("self_attn.o_proj", hidden, queries),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias and name[-6:-5] in "qkv":
                shapes[f"{prefix}{name}.bias"] = (rows,)
        if qk_norm:
            shapes |= {f"{prefix}self_attn.{part}_norm.weight": (dim,) for part in "qk"}
    return {
        name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }


def _interleaved(weights: Array, heads: int) -> Array:
    """llama.cpp's storage of query and key rows (its convert_hf_to_gguf.py, `permute`)."""
    shape = weights.shape
    split = weights.reshape(heads, 2, shape[0] // heads // 2, *shape[1:])
    return split.swapaxes(1, 2).reshape(shape)


def _gguf_name(name: str, architecture: str) -> str:
    kinds = {
        "llama": gguf.MODEL_ARCH.LLAMA,
        "qwen2": gguf.MODEL_ARCH.QWEN2,
        "qwen3": gguf.MODEL_ARCH.QWEN3,
        "gemma3": gguf.MODEL_ARCH.GEMMA3,
    }
    names = gguf.get_tensor_name_map(kinds[architecture], TINY["num_hidden_layers"])
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return str(found)


def write_gguf(
    path: Path,
    tensors: Mapping[str, Array],
    *,
    architecture: str = "llama",
    types: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    metadata: Mapping[str, Any] | None = None,
    leave_out: tuple[str, ...] = (),
    extra: Mapping[str, Array] | None = None,
) -> Path:
    """A GGUF file as llama.cpp's converter writes it.

    Args:
        types: quantisation of single tensors, by Hugging Face's names.
        metadata: further or other entries under the architecture's prefix; an entry whose
            key starts with a dot goes in without the prefix.
        leave_out: entries under the prefix not to write.
        extra: tensors by their names in the file, written as they are.
    """
    writer = gguf.GGUFWriter(path, architecture)
    entries: dict[str, Any] = {
        "block_count": TINY["num_hidden_layers"],
        "context_length": 128,
        "embedding_length": TINY["hidden_size"],
        "feed_forward_length": TINY["intermediate_size"],
        "attention.head_count": TINY["num_attention_heads"],
        "attention.head_count_kv": TINY["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    if architecture in ("qwen3", "gemma3"):
        entries |= {"attention.key_length": 16, "attention.value_length": 16}
    if architecture == "gemma3":
        entries["attention.sliding_window"] = 8
    for key, value in {**entries, **(metadata or {})}.items():
        if key in leave_out:
            continue
        name = key[1:] if key.startswith(".") else f"{architecture}.{key}"
        _add(writer, name, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, *[1] * 38])
    writer.add_token_merges([])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    for name, values in tensors.items():
        if architecture == "llama" and "q_proj" in name:
            values = _interleaved(values, TINY["num_attention_heads"])
        if architecture == "llama" and "k_proj" in name:
            values = _interleaved(values, TINY["num_key_value_heads"])
        if architecture == "gemma3" and name.endswith("norm.weight"):
            values = values + np.float32(1)
        kind = (types or {}).get(name)
        stored = _gguf_name(name, architecture)
        if kind is None:
            writer.add_tensor(stored, np.ascontiguousarray(values))
        else:
            writer.add_tensor(stored, gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, list):
        writer.add_array(name, value)
    else:
        writer.add_string(name, value)


def write_folder(
    path: Path,
    tensors: Mapping[str, Array],
    *,
    config: Mapping[str, Any] | None = None,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """A Hugging Face folder of safetensors with a small tokenizer."""
    path.mkdir(parents=True, exist_ok=True)
    base = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **TINY}
    (path / "config.json").write_text(json.dumps({**base, **(config or {})}))
    torch_tensors = {name: torch.from_numpy(values).to(dtype) for name, values in tensors.items()}
    if shards == 1:
        save_file(torch_tensors, path / "model.safetensors")
    else:
        weight_map = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
            part = dict(list(torch_tensors.items())[shard::shards])
            save_file(part, path / file)
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    write_tokenizer(path)
    return path


def write_tokenizer(path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(TOKENS)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in TOKENS[:2]])
    # What a folder's file may carry from training, and an engine must not apply.
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=6)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": {"content": "<s>"},
                "eos_token": "</s>",
                "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
            }
        )
    )
