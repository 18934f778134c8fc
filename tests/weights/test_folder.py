"""Hugging Face folders: single and sharded files, tied embeddings, tokenizer, spellings."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.types import ModelError
from lockstep.weights import open_checkpoint
from lockstep.weights.hashing import pieces
from tests.weights.writers import TOKENS, tiny_tensors, write_folder


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_come_as_stored(tmp_path: Path, shards: int, dtype: torch.dtype) -> None:
    tensors = tiny_tensors(tied=False)
    path = write_folder(tmp_path / "m", tensors, shards=shards, dtype=dtype)
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.format == "safetensors"
    assert checkpoint.name == str(path)
    assert set(checkpoint.tensor_names()) == set(tensors)
    for name, values in tensors.items():
        found = checkpoint.tensor(name)
        assert checkpoint.shape(name) == values.shape
        assert torch.equal(found, torch.from_numpy(values).to(dtype))


def test_a_tied_output_is_not_among_the_names(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "m", tiny_tensors(), config={"tie_word_embeddings": True})
    checkpoint = open_checkpoint(str(path))
    assert "lm_head.weight" not in checkpoint.tensor_names()
    assert checkpoint.config["tie_word_embeddings"] is True


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "m", tiny_tensors(), shards=3)
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00003\.safetensors: missing shard"):
        open_checkpoint(str(path))


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "m", tiny_tensors(), shards=2)
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.extra"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"'model\.extra' is missing"):
        open_checkpoint(str(path))


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", 3, None])
def test_an_index_cannot_point_elsewhere(tmp_path: Path, file: object) -> None:
    path = write_folder(tmp_path / "m", tiny_tensors(), shards=2)
    index = {"weight_map": {"model.norm.weight": file}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="weight_map"):
        open_checkpoint(str(path))


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, file: str) -> None:
    path = write_folder(tmp_path / "m", tiny_tensors())
    (path / file).unlink()
    with pytest.raises(ModelError, match=file):
        open_checkpoint(str(path))


def test_a_missing_tokenizer_hurts_only_who_asks(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "m", tiny_tensors())
    (path / "tokenizer.json").unlink()
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.tensor("model.norm.weight").shape == (64,)
    with pytest.raises(ModelError, match=r"tokenizer\.json: missing"):
        checkpoint.tokenizer()


@pytest.mark.parametrize("content", ["{", "[1]", "null", "3", '{"a": 1}{', "[" * 100_000])
def test_damaged_json_is_named(tmp_path: Path, content: str) -> None:
    path = write_folder(tmp_path / "m", tiny_tensors())
    (path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        open_checkpoint(str(path))


def test_tokenizer(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "m", tiny_tensors())
    tokenizer = open_checkpoint(str(path)).tokenizer()
    # The file's training-time truncation to 4 and padding to 6 are not applied.
    assert tokenizer.encode("ABABAB") == [TOKENS.index(letter) for letter in "ABABAB"]
    assert tokenizer.encode("A") == [TOKENS.index("A")]
    assert tokenizer.eos_ids == (1,)
    assert tokenizer.bos_id == 0
    assert tokenizer.special_ids == {0, 1}
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "x"


def test_end_ids_of_the_generation_config_come_first(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "m", tiny_tensors(), config={"eos_token_id": 1})
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.generation_config == {"eos_token_id": [7, 5]}
    assert checkpoint.tokenizer().eos_ids == (7, 5, 1)


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({"chat_template.jinja": "from file", "tokenizer_config.json": "config"}, "from file"),
        ({"tokenizer_config.json": json.dumps({"chat_template": "config"})}, "config"),
        (
            {
                "tokenizer_config.json": json.dumps(
                    {
                        "chat_template": [
                            {"name": "tool_use", "template": "tools"},
                            {"name": "default", "template": "chat"},
                        ]
                    }
                )
            },
            "chat",
        ),
        (
            {
                "chat_template.json": json.dumps({"chat_template": "old"}),
                "tokenizer_config.json": "{}",
            },
            "old",
        ),
        ({"tokenizer_config.json": "{}"}, None),
    ],
)
def test_chat_template_from_every_place(
    tmp_path: Path, files: dict[str, str], template: str | None
) -> None:
    path = write_folder(tmp_path / "m", tiny_tensors())
    for name, content in files.items():
        if content == "config":
            continue
        (path / name).write_text(content)
    assert open_checkpoint(str(path)).chat_template == template


def test_special_tokens_reach_the_template(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "m", tiny_tensors())
    (path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "!"}}))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "add_bos_token": True})
    )
    (path / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}")
    tokenizer = open_checkpoint(str(path)).tokenizer()
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "!</s>"
    assert tokenizer.bos_id == TOKENS.index("!")


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}},
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
            {"rope_theta": 1e4, "rope_scaling": None},
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            {"rope_theta": 1e4, "rope_scaling": None, "partial_rotary_factor": 0.5},
        ),
        (
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                }
            },
            {
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        ),
    ],
)
def test_both_spellings_of_rope(
    tmp_path: Path, written: dict[str, Any], read: dict[str, Any]
) -> None:
    path = write_folder(tmp_path / "m", tiny_tensors(), config=written)
    config = open_checkpoint(str(path)).config
    assert "rope_parameters" not in config
    assert {key: config[key] for key in read} == read


def test_two_ropes_that_differ_are_refused(tmp_path: Path) -> None:
    new, linear = {"rope_theta": 1e4}, {"rope_type": "linear", "factor": 8.0}
    both = {"rope_parameters": {**new, **linear}, "rope_scaling": linear}
    path = write_folder(tmp_path / "equal", tiny_tensors(), config=both)
    assert open_checkpoint(str(path)).config["rope_scaling"] == linear
    for number, first in enumerate((new, {**new, **linear, "factor": 4.0})):
        both = {"rope_parameters": first, "rope_scaling": linear}
        path = write_folder(tmp_path / str(number), tiny_tensors(), config=both)
        with pytest.raises(
            ModelError, match=r"rope_scaling \{.*8.0\} and rope_parameters .* differ"
        ):
            open_checkpoint(str(path))


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_what_transformers_saves_can_be_read(tmp_path: Path, kind: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=40,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "m")
    checkpoint = open_checkpoint(str(tmp_path / "m"))
    saved = dict(model.named_parameters())
    assert set(checkpoint.tensor_names()) == set(saved)
    for name, values in saved.items():
        assert torch.equal(checkpoint.tensor(name), values)
    assert checkpoint.config["rope_theta"] > 0
    if kind == "gemma3_text":
        assert checkpoint.config["rope_local_base_freq"] == 10000.0


def test_hash_follows_the_weights(tmp_path: Path) -> None:
    paths = [
        write_folder(tmp_path / "a", tiny_tensors(seed=1)),
        write_folder(tmp_path / "b", tiny_tensors(seed=1)),
        write_folder(tmp_path / "c", tiny_tensors(seed=2)),
        write_folder(tmp_path / "d", tiny_tensors(seed=1), config={"rope_theta": 7.0}),
    ]
    hashes = [open_checkpoint(str(path)).weights_hash() for path in paths]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


def test_hash_sees_every_byte_of_a_small_checkpoint(tmp_path: Path) -> None:
    first = write_folder(tmp_path / "a", tiny_tensors(seed=1))
    file = next(first.glob("*.safetensors"))
    before = open_checkpoint(str(first)).weights_hash()
    data = bytearray(file.read_bytes())
    for at in range(len(data) - 40, len(data) - 4, 9):
        changed = bytearray(data)
        changed[at] ^= 1
        file.write_bytes(changed)
        assert open_checkpoint(str(first)).weights_hash() != before


@pytest.mark.parametrize("size", [10 << 30, 151936 * 4096 * 2, 1_000_003, 64 * 4096 + 1])
def test_samples_of_a_large_checkpoint_reach_from_end_to_end(size: int) -> None:
    found = list(pieces(size, 20 << 30))
    assert found[0][0] == 0
    assert sum(found[-1]) == size
    assert len(found) == 64
    assert sum(count for _, count in found) < size
    gaps = {after - before for (before, _), (after, _) in itertools.pairwise(found)}
    assert max(gaps) - min(gaps) <= 1  # evenly spaced


@pytest.mark.parametrize(("size", "total"), [(3 << 20, 3 << 20), (64 * 4096, 20 << 30), (0, 0)])
def test_small_checkpoints_and_tensors_are_hashed_whole(size: int, total: int) -> None:
    at = 0
    for start, count in pieces(size, total):
        assert start == at
        at += count
    assert at == size
