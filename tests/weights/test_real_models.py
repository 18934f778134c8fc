"""The two packaged models: values, names and speed."""

from __future__ import annotations

import time

import gguf
import numpy as np
import pytest
import torch
from gguf import quants

from lockstep.weights import PACKAGED_MODELS, Checkpoint, open_checkpoint
from lockstep.weights.dequant import TensorType
from lockstep.weights.gguf_file import GGUFFile


def packaged(name: str) -> Checkpoint:
    model = next(model for model in PACKAGED_MODELS if model.name == name)
    if not model.installed():
        pytest.skip(f"{name} is not installed: {model.install}")
    return open_checkpoint(name)


def test_smollm2_loads_quickly() -> None:
    # Processor time, so that a busy machine does not fail it: measured 0.7 s; transformers
    # takes 16 to 45.
    checkpoint = packaged("smollm2")
    start = time.process_time()
    checkpoint = open_checkpoint("smollm2")
    count = sum(checkpoint.tensor(name).numel() for name in checkpoint.tensor_names())
    assert count == 134_515_008
    assert time.process_time() - start < 3.0


@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_values_equal_the_gguf_package(name: str) -> None:
    """The first rows of every tensor that is neither permuted nor offset."""
    checkpoint = packaged(name)
    file = GGUFFile(checkpoint.path)
    seen = set()
    by_kind = {
        tensor.kind: tensor
        for tensor in file.tensors.values()
        if "attn_q" not in tensor.name and "attn_k" not in tensor.name and "norm" not in tensor.name
    }
    for kind, tensor in by_kind.items():
        rows = file.rows(tensor.name)[:64]
        expected = quants.dequantize(rows, gguf.GGMLQuantizationType(int(kind)))
        inverse = {stored: known for known, stored in checkpoint._tensors.items()}  # type: ignore[attr-defined]
        found = checkpoint.tensor(inverse[tensor.name])[:64]
        assert torch.equal(found, torch.from_numpy(np.ascontiguousarray(expected)))
        seen.add(kind)
    assert (
        seen
        == {
            "smollm2": {TensorType.Q4_1, TensorType.Q8_0},
            "gemma3-270m": {TensorType.Q5_0, TensorType.Q8_0, TensorType.Q4_K, TensorType.Q6_K},
        }[name]
    )


def test_smollm2_config() -> None:
    checkpoint = packaged("smollm2")
    config = checkpoint.config
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_hidden_layers"], config["hidden_size"]) == (30, 576)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (9, 3)
    assert (config["rope_theta"], config["rms_norm_eps"]) == (100000.0, 1e-5)
    assert config["tie_word_embeddings"] is True
    assert checkpoint.chat_template is not None
    assert len(checkpoint.tensor_names()) == 272


def test_gemma_config() -> None:
    config = packaged("gemma3-270m").config
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert config["layer_types"].count("full_attention") == 3
    assert config["layer_types"][5] == "full_attention"
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e6, 1e4)
    assert (config["sliding_window"], config["query_pre_attn_scalar"]) == (512, 256)


def test_hash_is_quick_and_steady() -> None:
    start = time.process_time()
    hashes = {packaged("smollm2").weights_hash() for _ in range(2)}
    assert len(hashes) == 1
    assert time.process_time() - start < 2.0
