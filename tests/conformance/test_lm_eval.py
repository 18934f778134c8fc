"""lm-evaluation-harness over `/v1/completions` agrees with its own Hugging Face backend.

Both read SmolLM2's weights in float32 and the same two small tasks, kept in `tasks/`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lockstep.async_llm import AsyncLLM
from lockstep.weights import open_checkpoint
from tests.server.support import ServerThread

os.environ.setdefault("HF_HUB_OFFLINE", "1")
lm_eval = pytest.importorskip("lm_eval")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TASKS = Path(__file__).parent / "tasks"
ROUNDING = 2e-3  # between two float32 engines, in nats over one answer
PER_TOKEN = 2e-4  # of a passage


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    with ServerThread(
        lambda: AsyncLLM("smollm2", dtype="float32", threads=2, cache_bytes=128 << 20)
    ) as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 as Hugging Face's libraries read it."""
    path = tmp_path_factory.mktemp("smollm2")
    checkpoint = open_checkpoint("smollm2")
    tensors = {name: checkpoint.tensor(name).contiguous() for name in checkpoint.tensor_names()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = {
        **checkpoint.config,
        "torch_dtype": "float32",
        "tie_word_embeddings": "lm_head.weight" not in tensors,
    }
    (path / "config.json").write_text(json.dumps(config))
    tokenizer = checkpoint.tokenizer()
    tokenizer.save(path / "tokenizer.json")
    end = tokenizer.token_text(tokenizer.eos_ids[0])
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": end}
    (path / "tokenizer_config.json").write_text(json.dumps(described))
    return path


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    import yaml

    os.environ["HF_DATASETS_CACHE"] = str(tmp_path_factory.mktemp("datasets"))
    found = []
    for path in sorted(TASKS.glob("*.yaml")):
        task = yaml.safe_load(path.read_text())
        task["dataset_kwargs"] = {"data_files": {"test": str(path.with_suffix(".jsonl"))}}
        found.append(task)
    return found


def samples(
    model: str, arguments: dict[str, Any], tasks: list[dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    report = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=[dict(task) for task in tasks],
        batch_size=1,
        bootstrap_iters=0,
        log_samples=True,
    )
    raw = {
        name: [entry["resps"] for entry in sorted(rows, key=lambda row: row["doc_id"])]
        for name, rows in report["samples"].items()
    }
    return report["results"], raw


def test_log_likelihoods_agree_with_the_hugging_face_backend(
    server: ServerThread, folder: Path, tasks: list[dict[str, Any]]
) -> None:
    torch.set_num_threads(2)
    ours = {
        "model": "smollm2",
        "base_url": f"{server.url}/v1/completions",
        "tokenizer": str(folder),
        "tokenizer_backend": "huggingface",
        "num_concurrent": 8,
        "max_length": 2048,
    }
    theirs = {"pretrained": str(folder), "dtype": "float32", "device": "cpu", "max_length": 2048}
    our_results, our_samples = samples("local-completions", ours, tasks)
    their_results, their_samples = samples("hf", theirs, tasks)

    facts = our_samples["lockstep_facts"]
    assert len(facts) == 10
    for own, other in zip(facts, their_samples["lockstep_facts"], strict=True):
        for (((own_value, own_greedy),),), (((other_value, other_greedy),),) in zip(
            [[answer] for answer in own], [[answer] for answer in other], strict=True
        ):
            assert own_value == pytest.approx(other_value, abs=ROUNDING)
            assert own_greedy == other_greedy
    assert our_results["lockstep_facts"]["acc,none"] == their_results["lockstep_facts"]["acc,none"]
    assert our_results["lockstep_facts"]["acc,none"] >= 0.5  # it is the model that answers

    for own, other in zip(
        our_samples["lockstep_passages"], their_samples["lockstep_passages"], strict=True
    ):
        assert own[0][0] == pytest.approx(other[0][0], abs=PER_TOKEN * 80)
    name = "bits_per_byte,none"
    assert our_results["lockstep_passages"][name] == pytest.approx(
        their_results["lockstep_passages"][name], abs=1e-3
    )
