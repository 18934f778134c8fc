"""Answering and judging from one loaded SmolLM2: rows B01, B02 and B05 of the field's faults.

B04, a score asked of a model without a head, is in tests/server/test_branches.py.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep import LLM, SamplingParams
from lockstep.decisions import Choice
from lockstep.runner.runner import Runner
from tests.model.branches import package

STORY = "The river runs from the hills through two towns and a wide plain to the sea. " * 12
CHAT = [{"role": "user", "content": f"{STORY}\nWhere does the river end?"}]
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, logprobs=2)
OPTIONS = ("answer", "search", "refuse")
WORDS = (" the", " a")


@pytest.fixture(scope="module")
def judged(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The same model with a branch whose weights are random."""
    folder: Path = tmp_path_factory.mktemp("judge")
    executor: Any = llm._open_engine()._executor
    assert isinstance(executor, Runner)
    package(
        executor.model,
        folder,
        base=llm.info.weights_hash,
        fork=20,
        exit=24,
        options=OPTIONS,
        suffix="<|im_start|>user\nCan this be answered?<|im_end|>\n<|im_start|>assistant\n",
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    llm.load_branch("judge", folder)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 < llm.info.weight_bytes / 4  # B01: no second copy of the weights
    yield llm
    llm.unload_branch("judge")


def test_b01_b02_chat_and_decisions_at_once_from_one_model(judged: LLM) -> None:
    judged.flush_cache()
    quiet = judged.chat(CHAT, PARAMS)
    alone = judged.decide(CHAT, branch="judge")
    judged.flush_cache()
    told: list[Any] = []
    texts = [f"{STORY} Part {index}." for index in range(8)]
    others = threading.Thread(
        target=lambda: told.extend(judged.decide(text, branch="judge") for text in texts)
    )
    others.start()
    busy = judged.chat([CHAT] * 3, PARAMS)
    others.join()
    for completion in busy:
        assert completion.choices == quiet.choices
    assert judged.decide(CHAT, branch="judge") == alone
    assert len({decision.probabilities for decision in told}) == len(texts)
    vector = judged.embed(STORY)  # B02: each task by its own door, and nothing through a disk
    assert vector.shape == (judged.info.hidden_size,)


def test_b05_a_judge_after_a_long_chat_reads_its_question_alone(judged: LLM) -> None:
    judged.flush_cache()
    cold = judged.decide(CHAT, branch="judge")
    judged.flush_cache()
    first = judged.chat(CHAT, PARAMS)
    before = judged.stats()
    warm = judged.decide(CHAT, branch="judge")
    after = judged.stats()
    assert warm == cold
    suffix = judged.tokenizer.encode_inside(judged.branches["judge"].suffix)
    assert after.computed_tokens - before.computed_tokens == len(suffix)
    again = judged.chat(CHAT, PARAMS)
    assert again.choices == first.choices
    assert again.cached_tokens >= len(first.prompt_token_ids) - 1


@pytest.mark.parametrize("source", ["branch", "question", "prefix"])
def test_what_a_gate_lets_through_is_the_ungated_answer(judged: LLM, source: str) -> None:
    gate: dict[str, Any] = {
        "branch": {"branch": "judge", "continue_if": OPTIONS},
        "question": {"question": Choice("What now?", list(OPTIONS)), "continue_if": OPTIONS},
        "prefix": {
            "prefix": "It ends in",
            "options": [" the", " a"],
            "continue_if": [" the", " a"],
        },
    }[source]
    judged.flush_cache()
    before = judged.stats().computed_tokens
    params = SamplingParams(temperature=0.8, seed=4, n=2, max_tokens=12, logprobs=1)
    gated = judged.decide_then_write(CHAT, params, **gate)
    read = judged.stats().computed_tokens - before
    if source == "prefix":
        begin = "It ends in" + str(gated.decision.value)
        ids = judged._builder.encode_chat(CHAT)
        ids += judged.tokenizer.encode_inside("It ends in")
        plain = judged.generate(
            ids + judged.tokenizer.encode_inside(str(gated.decision.value)), params
        )
        assert [c.text for c in gated.completion.choices] == [begin + c.text for c in plain.choices]
        decided = judged.decide_prefix(CHAT, "It ends in", WORDS)
    else:
        plain = judged.chat(CHAT, params)
        assert [c.text for c in gated.completion.choices] == [c.text for c in plain.choices]
        question = gate.get("question")
        decided = judged.decide(CHAT, question, branch=gate.get("branch", ""))
    for own, other in zip(gated.completion.choices, plain.choices, strict=True):
        assert own.token_ids == other.token_ids
        assert own.logprobs == other.logprobs
    assert gated.decision == decided
    prompt = len(judged._builder.encode_chat(CHAT))
    assert read < prompt + 150  # a question of some 60 tokens, two answers of 12
    shut = judged.decide_then_write(
        CHAT, params, **{**gate, "continue_if": [str(_loser(gated.decision))]}
    )
    assert {c.finish_reason for c in shut.completion.choices} == {"gate"}
    assert shut.text == ""


def _loser(decision: Any) -> str:
    return next(o.text for o in decision.question.options if o != decision.option)
