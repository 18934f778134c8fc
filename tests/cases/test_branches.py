"""Answer and judge from one loaded SmolLM2: one weight copy, every task, no token moved."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from lockstep import LLM, SamplingParams
from lockstep.branch import TARGETS, TENSORS, Branch
from lockstep.decisions import Decision
from lockstep.llm import Score
from lockstep.model.adapters import tensor_shapes
from lockstep.runner.runner import Runner
from lockstep.types import TokenLogprob
from lockstep.weights.branch import write_package
from tests.model.branches import random_tensors

CHAT = [
    {"role": "user", "content": "Tell me about the tides. " * 12},
    {"role": "assistant", "content": "The moon pulls the sea. " * 12},
    {"role": "user", "content": "And about the sun?"},
]
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=1)
FORK, EXIT = 26, 30


def runner(llm: LLM) -> Runner:
    executor = llm._open_engine()._executor
    assert isinstance(executor, Runner)
    return executor


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


@pytest.fixture(scope="module")
def folder(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A branch with random adapters and a head of three options."""
    path = tmp_path_factory.mktemp("branches") / "judge"
    branch = Branch(
        base=llm.info.weights_hash,
        base_name="smollm2",
        fork=FORK,
        exit=EXIT,
        adapt="suffix",
        rank=8,
        scale=0.5,
        targets=TARGETS,
        head="options",
        options=("answer", "search", "refuse"),
        suffix="<|im_start|>judge\nDecision:",
    )
    model = runner(llm).model
    tensors = random_tensors(model, branch)
    assert tensors.keys() == tensor_shapes(model, branch).keys()
    for name in tensors:
        if "lora_A" in name:
            tensors[name] = tensors[name] * model.hidden_size**-0.5
    write_package(branch, tensors, path)
    return path


@pytest.fixture(scope="module")
def judged(llm: LLM, folder: Path) -> Iterator[LLM]:
    llm.load_branch("judge", folder)
    yield llm
    llm.unload_branch("judge")


def bits(decision: Decision) -> tuple[object, ...]:
    return decision.chosen, decision.probabilities, decision.mass, decision.source


def at_once(*works: Callable[[], Any]) -> list[Any]:
    """What each gives, all in one engine at the same time."""
    found: list[Any] = [None] * len(works)

    def one(index: int) -> None:
        found[index] = works[index]()

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_b01_answers_with_and_without_the_judge_from_one_weight_copy(
    llm: LLM, folder: Path
) -> None:
    llm.flush_cache()
    quiet = llm.chat(CHAT, GREEDY)
    before = resident()
    loaded = llm.load_branch("judge", folder)
    own = (folder / TENSORS).stat().st_size  # float32; of what serves, half of it is bfloat16
    assert own / 3 < loaded.weight_bytes < own * 2
    assert loaded.weight_bytes == llm.branches["judge"].weight_bytes
    try:
        decision = llm.decide(CHAT, branch="judge")
        grown = resident() - before
        assert grown < runner(llm).model.weight_bytes / 8, "no second copy of the weights"
        for _ in range(2):
            llm.flush_cache()
            stream = llm.stream_chat(CHAT, GREEDY)
            text, entries = "", list[TokenLogprob]()
            for delta in stream:
                text += delta.text
                entries += delta.logprobs
                assert bits(llm.decide(CHAT, branch="judge")) == bits(decision)
            assert text == quiet.text
            assert tuple(entries) == quiet.logprobs
    finally:
        llm.unload_branch("judge")
    llm.flush_cache()
    assert llm.chat(CHAT, GREEDY).logprobs == quiet.logprobs


def test_b02_every_task_in_one_process_at_the_same_time(judged: LLM) -> None:
    """Answers, vectors, likelihoods and both kinds of decision, none by way of a file."""
    works: list[Callable[[], Any]] = [
        lambda: judged.chat(CHAT, GREEDY).logprobs,
        lambda: judged.embed("The sea").tobytes(),
        lambda: cast("Score", judged.score("The moon", context="Because of")).logprobs,
        lambda: bits(judged.decide_prefix(CHAT, "", ["Yes", "No"])),
        lambda: bits(judged.decide(CHAT, branch="judge")),
        lambda: bits(judged.decide("The sea", branch="judge")),
    ]
    alone = []
    for work in works:
        judged.flush_cache()
        alone.append(work())
    judged.flush_cache()
    for _ in range(3):
        assert at_once(*works) == alone
    assert alone[4] != alone[5]


def test_b05_a_judge_after_a_chat_computes_its_suffix_alone(judged: LLM) -> None:
    judged.flush_cache()
    cold = bits(judged.decide(CHAT, branch="judge"))
    judged.flush_cache()
    answer = judged.chat(CHAT, GREEDY)
    before = judged.stats()
    assert bits(judged.decide(CHAT, branch="judge")) == cold
    after = judged.stats()
    asked = after.prompt_tokens - before.prompt_tokens
    cached = after.cached_tokens - before.cached_tokens
    branch = judged.branches["judge"]
    suffix = len(judged.tokenizer.encode_inside(branch.suffix))
    assert cached == asked - suffix, "all tokens in front of the question"
    layers = after.computed_layers - before.computed_layers
    assert layers == suffix * EXIT, "these through the layers up to the exit alone"
    again = judged.chat(CHAT, GREEDY)
    assert again.logprobs == answer.logprobs
    assert again.cached_tokens > len(again.prompt_token_ids) - 16


def test_b04_a_trunk_without_a_head_gives_no_score(http: Any) -> None:
    reply = http.post("/v1/classify", json={"model": "smollm2", "input": "The sea"})
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "model_has_no_head"
