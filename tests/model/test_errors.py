"""Configurations and weights that would compute something else are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.kernels.cpu import make_backend
from lockstep.model import load_model
from lockstep.types import ModelError
from tests.model.tiny import build_oracle

BACKEND = make_backend("native", 1)


class Source:
    """A checkpoint in memory: transformers' own configuration and tensors."""

    name = "in-memory"

    def __init__(self, family: str) -> None:
        model = build_oracle(family)
        self.config: dict[str, Any] = model.config.to_dict()
        self.config["architectures"] = [type(model).__name__]
        tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
        self.tensors = {k: v for k, v in model.state_dict().items() if k not in tied}

    def tensor_names(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]


@pytest.fixture(scope="module")
def sources() -> dict[str, Source]:
    return {name: Source(name) for name in ("llama", "qwen3", "gemma3", "llama-tied-bias")}


def load(source: Source) -> None:
    load_model(source, BACKEND, torch.float32)


def test_the_unchanged_sources_load(sources: dict[str, Source]) -> None:
    """transformers' full configurations hold no key that stops them."""
    for source in sources.values():
        load(source)


YARN = {"rope_type": "yarn", "factor": 2.0}
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*supported are.*Llama"),
    ("llama", {"architectures": None}, "none is not supported"),
    ("llama", {"architectures": "LlamaForCausalLM"}, "architectures must list names.*Llama"),
    ("llama", {"architectures": [["x"]]}, "architectures must list names"),
    ("llama", {"mlp_bias": True}, "mlp_bias"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("llama", {"logit_scale": 0.1}, "logit_scale"),
    ("llama", {"sliding_window": 64}, "sliding_window"),
    ("llama", {"rope_interleaved": True}, "rope_interleaved"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama", {"hidden_act": "relu"}, "hidden_act.*relu"),
    ("llama", {"embedding_multiplier": 12.0}, "embedding_multiplier.*may change the maths"),
    ("llama", {"hidden_act": ["silu"]}, r"hidden_act is \['silu'\]"),
    ("llama", {"hidden_size": "96"}, "hidden_size.*integer"),
    ("llama", {"hidden_size": None}, "hidden_size is missing"),
    ("llama", {"rms_norm_eps": 0}, "rms_norm_eps"),
    ("llama", {"num_key_value_heads": 4}, "num_key_value_heads"),
    ("llama", {"rope_parameters": {"rope_type": "wavy"}}, "rope_parameters.rope_type.*wavy"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic.*length"),
    ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "longrope.*length"),
    ("llama", {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor is missing"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "twist": 3}},
        "rope_parameters.twist",
    ),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling stands beside"),
    ("llama", {"rope_parameters": {**YARN, "rope_theta": 1.0}}, "rope_theta must be above 1"),
    ("llama", {"rope_parameters": {**YARN, "mscale": "x"}}, "mscale must be a positive number"),
    ("qwen3", {"max_window_layers": "x"}, "max_window_layers must be an integer of at least 0"),
    ("qwen3", {"max_window_layers": True}, "max_window_layers must be an integer"),
    ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3", {"layer_types": ["full_attention"]}, "layer_types"),
    ("gemma3", {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
    ("gemma3", {"rope_parameters": {"linear_attention": {"a": 1}}}, "linear_attention"),
    ("gemma3", {"architectures": ["Gemma3ForConditionalGeneration"]}, "not supported"),
]


@pytest.mark.parametrize(("family", "change", "complaint"), CASES)
def test_a_key_that_changes_the_maths_is_refused(
    sources: dict[str, Source], family: str, change: dict[str, Any], complaint: str
) -> None:
    source = Source.__new__(Source)
    source.tensors = sources[family].tensors
    source.config = {**sources[family].config, **change}
    with pytest.raises(ModelError, match=f"in-memory.*{complaint}"):
        load(source)


def edited(source: Source, name: str, tensor: Tensor | None) -> Source:
    copy = Source.__new__(Source)
    copy.config = source.config
    copy.tensors = {k: v for k, v in source.tensors.items() if k != name}
    if tensor is not None:
        copy.tensors[name] = tensor
    return copy


def test_tensors_are_named_when_they_are_wrong(sources: dict[str, Source]) -> None:
    source, name = sources["llama"], "model.layers.1.self_attn.k_proj.weight"
    with pytest.raises(ModelError, match=rf"{name}.*\(32, 96\) is missing"):
        load(edited(source, name, None))
    with pytest.raises(ModelError, match=rf"{name}.*shape \(31, 96\).*asks for \(32, 96\)"):
        load(edited(source, name, torch.zeros(31, 96)))
    extra = "model.layers.1.self_attn.q_norm.weight"
    with pytest.raises(ModelError, match=f"{extra}.*not in the architecture"):
        load(edited(source, extra, torch.zeros(16)))
    with pytest.raises(ModelError, match=r"model.layers.2.self_attn.q_norm.weight.*missing"):
        load(edited(sources["qwen3"], "model.layers.2.self_attn.q_norm.weight", None))


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64])
def test_numbers_without_their_scales_are_no_weights(
    sources: dict[str, Source], dtype: torch.dtype
) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    wrong = torch.ones(sources["llama"].shape(name)).to(dtype)
    with pytest.raises(ModelError, match=f"{name}' is {dtype}.*not supported"):
        load(edited(sources["llama"], name, wrong))


def test_harmless_extras_pass(sources: dict[str, Source]) -> None:
    load(edited(sources["llama"], "model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(8)))
    load(edited(sources["llama-tied-bias"], "lm_head.weight", torch.ones(131, 96)))


def test_older_spelling_of_ropes_means_the_same(sources: dict[str, Source]) -> None:
    gemma = edited(sources["gemma3"], "", None)
    gemma.config = {k: v for k, v in gemma.config.items() if k != "rope_parameters"}
    gemma.config |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None}
    new = load_model(sources["gemma3"], BACKEND, torch.float32)
    old = load_model(gemma, BACKEND, torch.float32)
    for mine, other in zip(new.layers, old.layers, strict=True):
        assert torch.equal(mine.self_attn.rope.cos, other.self_attn.rope.cos)
    scaled = edited(sources["llama"], "", None)
    scaled.config = {k: v for k, v in scaled.config.items() if k != "rope_parameters"}
    scaled.config |= {"rope_theta": 5e4, "rope_scaling": {"type": "linear", "factor": 2.0}}
    table = load_model(scaled, BACKEND, torch.float32).layers[0].self_attn.rope
    expected = torch.cos(torch.arange(512).double() / 2)
    assert torch.equal(table.cos[:, 0], expected.float())
