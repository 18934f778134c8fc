"""GGUF files of every supported architecture, read back as Hugging Face's tensors and config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from lockstep.types import ModelError
from lockstep.weights import Checkpoint, open_checkpoint
from lockstep.weights.llama3_rope import llama3_factors, scaling_of_factors
from tests.weights.writers import TINY, TOKENS, tiny_tensors, write_gguf

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"bias": True, "tied": False},
    "qwen3": {"qk_norm": True, "tied": False},
    "gemma3": {"qk_norm": True, "gemma": True},
}


def write(path: Path, architecture: str = "llama", **kwargs: Any) -> Checkpoint:
    tensors = tiny_tensors(**VARIANTS[architecture])
    return open_checkpoint(
        str(write_gguf(path / "m.gguf", tensors, architecture=architecture, **kwargs))
    )


@pytest.mark.parametrize("architecture", VARIANTS)
def test_tensors_come_back_under_their_names(tmp_path: Path, architecture: str) -> None:
    tensors = tiny_tensors(**VARIANTS[architecture])
    checkpoint = write(tmp_path, architecture)
    assert checkpoint.format == "gguf"
    assert set(checkpoint.tensor_names()) == set(tensors)
    for name, values in tensors.items():
        found = checkpoint.tensor(name)
        assert checkpoint.shape(name) == values.shape == tuple(found.shape)
        assert found.dtype == torch.float32
        if architecture == "gemma3" and name.endswith("norm.weight"):
            # The file stores value + 1, rounded: what the model adds up again is equal.
            assert torch.equal(found + 1, torch.from_numpy(values) + 1)
        else:
            assert torch.equal(found, torch.from_numpy(values))


def test_rows_of_quantised_queries_are_put_in_order(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    name = "model.layers.1.self_attn.q_proj.weight"
    kind = gguf.GGMLQuantizationType.Q8_0
    path = write_gguf(tmp_path / "m.gguf", tensors, types={name: kind})
    expected = gguf.quants.dequantize(gguf.quants.quantize(tensors[name], kind), kind)
    assert torch.equal(open_checkpoint(str(path)).tensor(name), torch.from_numpy(expected))


def test_tensors_are_newly_made(tmp_path: Path) -> None:
    checkpoint = write(tmp_path)
    for name in checkpoint.tensor_names():
        before = checkpoint.tensor(name).clone()
        checkpoint.tensor(name).zero_()
        assert torch.equal(checkpoint.tensor(name), before)


def test_config(tmp_path: Path) -> None:
    config = write(tmp_path).config
    assert {key: config[key] for key in TINY} == TINY
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["model_type"] == "llama"
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == 10000.0
    assert config["rope_scaling"] is None
    assert config["max_position_embeddings"] == 128
    assert config["tie_word_embeddings"] is True
    assert config["attention_bias"] is False
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 1)


@pytest.mark.parametrize("architecture", VARIANTS)
def test_transformers_takes_the_config(tmp_path: Path, architecture: str) -> None:
    # Every entry is one that Hugging Face's class knows, with the value that it was given.
    from transformers import AutoConfig

    config = dict(write(tmp_path, architecture).config)
    kind = config.pop("model_type")
    known = AutoConfig.for_model(kind, **config)
    for key in config:
        if not key.startswith("rope_"):
            assert getattr(known, key) == config[key]
    parameters = known.rope_parameters
    full = parameters.get("full_attention", parameters)
    assert full["rope_theta"] == config["rope_theta"]
    if "rope_local_base_freq" in config:
        assert parameters["sliding_attention"]["rope_theta"] == config["rope_local_base_freq"]


# Not qwen3: transformers takes its heads to be 128 wide whatever the file says.
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3"])
def test_equal_logits_to_transformers_own_reading(tmp_path: Path, architecture: str) -> None:
    # The same file, once through this room and once through transformers' GGUF reader: a row
    # order, an offset or a rope base that is read differently shows in the logits.
    from transformers import AutoConfig, AutoModelForCausalLM

    path = write_gguf(
        tmp_path / "m.gguf",
        tiny_tensors(**VARIANTS[architecture]),
        architecture=architecture,
        metadata={"rope.freq_base": 5000.0},
    )
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    )
    checkpoint = open_checkpoint(str(path))
    config = dict(checkpoint.config)
    known = AutoConfig.for_model(config.pop("model_type"), **config)
    if architecture == "gemma3":  # transformers scales queries for heads of 256
        for layer in theirs.model.layers:
            layer.self_attn.scaling = 16**-0.5
    ours = AutoModelForCausalLM.from_config(known)
    ours.load_state_dict(
        {name: checkpoint.tensor(name) for name in checkpoint.tensor_names()}, strict=False
    )
    ours.tie_weights()
    ids = torch.arange(24).reshape(1, 24)
    with torch.no_grad():
        expected, found = theirs.eval()(ids).logits, ours.eval()(ids).logits
    assert expected.std() > 0.01
    assert torch.allclose(found, expected, atol=1e-4, rtol=1e-4)


def test_gemma_config(tmp_path: Path) -> None:
    config = write(tmp_path, "gemma3").config
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert config["model_type"] == "gemma3_text"
    assert config["hidden_activation"] == "gelu_pytorch_tanh"
    assert config["sliding_window"] == 8
    assert config["layer_types"] == ["sliding_attention", "sliding_attention"]
    assert config["rope_local_base_freq"] == 10000.0
    assert config["query_pre_attn_scalar"] == 16
    assert config["final_logit_softcapping"] is None


@pytest.mark.parametrize("pattern", [2, [True, False]])
def test_gemma_pattern_may_be_stored(tmp_path: Path, pattern: object) -> None:
    metadata = {"attention.sliding_window_pattern": pattern}
    config = write(tmp_path, "gemma3", metadata=metadata).config
    assert config["layer_types"] == ["sliding_attention", "full_attention"]


def test_a_window_makes_llama_a_mistral(tmp_path: Path) -> None:
    config = write(tmp_path, metadata={"attention.sliding_window": 32}).config
    assert config["architectures"] == ["MistralForCausalLM"]
    assert config["sliding_window"] == 32


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
         {"rope_type": "linear", "factor": 8.0}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
          "rope.scaling.original_context_length": 64, "rope.scaling.finetuned": True},
         {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
    ],
)  # fmt: skip
def test_rope_scaling(tmp_path: Path, metadata: dict[str, Any], scaling: object) -> None:
    assert write(tmp_path, metadata=metadata).config["rope_scaling"] == scaling


def test_part_of_a_head_may_be_rotated(tmp_path: Path) -> None:
    config = write(tmp_path, "qwen3", metadata={"rope.dimension_count": 8}).config
    assert config["partial_rotary_factor"] == 0.5
    assert (
        "partial_rotary_factor"
        not in write(tmp_path, "qwen3", metadata={"rope.dimension_count": 16}).config
    )


LLAMA3 = {"factor": 32.0, "low": 1.0, "high": 4.0, "context": 8192}


def test_llama3_factors_equal_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = scaling_of_factors(
        llama3_factors(500000.0, 64, **LLAMA3),
        500000.0,
        64,  # type: ignore[arg-type]
    )
    assert scaling is not None
    plain = 1.0 / 500000.0 ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64)
    config = LlamaConfig(head_dim=64, rope_parameters={"rope_theta": 500000.0, **scaling})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    factors = llama3_factors(500000.0, 64, **LLAMA3)  # type: ignore[arg-type]
    assert torch.allclose(plain / torch.from_numpy(factors), scaled, rtol=1e-5)


def test_rope_factors_become_llama3_scaling(tmp_path: Path) -> None:
    factors = llama3_factors(500000.0, 16, **LLAMA3)  # type: ignore[arg-type]
    checkpoint = write(
        tmp_path,
        metadata={"rope.freq_base": 500000.0},
        extra={"rope_freqs.weight": factors},
    )
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert not any("rope" in name for name in checkpoint.tensor_names())
    ones = write(tmp_path, extra={"rope_freqs.weight": np.ones(8, np.float32)})
    assert ones.config["rope_scaling"] is None


def test_other_rope_factors_are_refused(tmp_path: Path) -> None:
    for values in (np.linspace(1, 3, 8), np.ones(5), np.full(8, np.nan)):
        with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
            write(tmp_path, extra={"rope_freqs.weight": values.astype(np.float32)})


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"logit_scale": 0.5}, "llama.logit_scale"),
        ({"expert_count": 8}, "llama.expert_count"),
        ({"brand_new_switch": True}, "llama.brand_new_switch"),
        ({"attention.causal": False}, "llama.attention.causal"),
        ({"rope.scaling.type": "longrope"}, "llama.rope.scaling.type"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0,
          "rope.scaling.attn_factor": 1.5}, "attn_factor"),
        ({"attention.head_count": 0}, "llama.attention.head_count"),
        ({"attention.head_count": "four"}, "llama.attention.head_count"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon"),
        ({"attention.key_length": 16, "attention.value_length": 8}, "value_length"),
        ({"rope.dimension_count": 32}, "rope.dimension_count"),
        ({"block_count": 4_000_000_000}, "llama.block_count"),
        ({".split.count": 3}, "3 parts"),
        ({".general.architecture": "t5"}, "'t5'"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_named(
    tmp_path: Path, metadata: dict[str, Any], named: str
) -> None:
    if ".general.architecture" in metadata:
        path = write_gguf(tmp_path / "m.gguf", tiny_tensors())
        data = path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0other")
        path.write_bytes(data)
        with pytest.raises(ModelError, match="'other' is not supported"):
            open_checkpoint(str(path))
        return
    with pytest.raises(ModelError, match=named) as caught:
        write(tmp_path, metadata=metadata)
    assert "m.gguf" in str(caught.value)


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "context_length"])
def test_what_is_missing_is_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(ModelError, match=f"llama.{key} is missing|llama.{key}"):
        write(tmp_path, leave_out=(key,))


def test_a_folder_may_hold_one_gguf_file(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "a.gguf", tiny_tensors())
    assert open_checkpoint(str(tmp_path)).path == first
    write_gguf(tmp_path / "b.gguf", tiny_tensors())
    with pytest.raises(ModelError, match=r"a\.gguf, b\.gguf"):
        open_checkpoint(str(tmp_path))


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"blk\.0\.ssm_a"):
        write(tmp_path, extra={"blk.0.ssm_a": np.ones(4, np.float32)})


def test_a_tensor_that_is_not_there_is_named(tmp_path: Path) -> None:
    checkpoint = write(tmp_path)
    for ask in (checkpoint.tensor, checkpoint.shape):
        with pytest.raises(ModelError, match=r"'lm_head\.weight'"):
            ask("lm_head.weight")


def test_tokenizer_and_template(tmp_path: Path) -> None:
    checkpoint = write(tmp_path)
    tokenizer = checkpoint.tokenizer()
    assert checkpoint.tokenizer() is tokenizer
    assert tokenizer.encode("AB") == [TOKENS.index("A"), TOKENS.index("B")]
    assert tokenizer.eos_ids == (1,)
    assert tokenizer.bos_id == 0
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "x"
    assert checkpoint.chat_template == tokenizer.chat_template
    assert checkpoint.generation_config["eos_token_id"] == 1


@pytest.mark.parametrize(
    "metadata",
    [
        {".tokenizer.ggml.eot_token_id": 5},
        {".tokenizer.ggml.eom_token_id": 5},
    ],
)
def test_every_end_id_of_the_file_counts(tmp_path: Path, metadata: dict[str, Any]) -> None:
    checkpoint = write(tmp_path, metadata=metadata)
    assert checkpoint.tokenizer().eos_ids == (1, 5)
    assert checkpoint.generation_config["eos_token_id"] == [1, 5]


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({".tokenizer.ggml.eot_token_id": 99}, "eot_token_id"),
        ({".tokenizer.ggml.unknown_token_id": 40}, "unknown_token_id"),
        ({".tokenizer.ggml.padding_token_id": "x"}, "padding_token_id"),
        ({".tokenizer.ggml.scores": ["a"]}, "scores"),
    ],
)
def test_a_damaged_tokenizer_is_named(tmp_path: Path, metadata: dict[str, Any], named: str) -> None:
    checkpoint = write(tmp_path, metadata=metadata)
    with pytest.raises(ModelError, match=named) as caught:
        checkpoint.tokenizer()
    assert "m.gguf" in str(caught.value)


def test_hash_follows_the_weights(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "a.gguf", tiny_tensors(seed=1))
    same = write_gguf(tmp_path / "b.gguf", tiny_tensors(seed=1))
    other = write_gguf(tmp_path / "c.gguf", tiny_tensors(seed=2))
    config = write_gguf(
        tmp_path / "d.gguf", tiny_tensors(seed=1), metadata={"rope.freq_base": 5000.0}
    )
    hashes = [open_checkpoint(str(path)).weights_hash() for path in (first, same, other, config)]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3
