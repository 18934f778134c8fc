"""Branches and gates through both Python doors, over a fake that judges."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from lockstep import LLM, SamplingParams
from lockstep.branch import BranchError
from lockstep.config import BranchOptions, CacheConfig, ConfigError, SchedulerConfig
from lockstep.decisions import Choice, GatedCompletion, Predicate, Score
from lockstep.engine.loop import Engine
from lockstep.settings import engine_config
from lockstep.types import FinishReason, RequestError
from tests.branch_fake import BranchExecutor, make_branch
from tests.server.support import fake_llm, parrot, smollm2_tokenizer, told

CHAT = [{"role": "user", "content": "answer answer"}]


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    return {
        "judge": make_branch(tmp_path, "judge"),
        "reward": make_branch(tmp_path, "reward", head="value", options=("value",)),
    }


def make(folders: dict[str, str], prefix_caching: bool = True) -> LLM:
    executor = BranchExecutor(vocab_size=49152, max_context=512, script=parrot, judge=told)
    engine = Engine(
        executor,
        SchedulerConfig(),
        CacheConfig(prefix_caching=prefix_caching),
        branches=BranchOptions(load=tuple(folders.items())),
    )
    return LLM.from_engine(engine, smollm2_tokenizer(), progress=False)


@pytest.fixture
def llm(folders: dict[str, str]) -> Iterator[LLM]:
    with make(folders) as made:
        yield made


def test_a_branch_decides_its_own_question(llm: LLM) -> None:
    decision = llm.decide("search it, search", branch="judge")
    assert (decision.value, decision.source, decision.mass) == ("search", "judge", 1.0)
    assert [option.value for option in decision.question.options] == ["answer", "search", "refuse"]
    one, two = llm.decide(CHAT, [Choice("?", ["refuse", "answer", "search"])] * 2, branch="judge")
    assert one == two
    assert one.value == "answer"
    number = llm.decide("value value", branch="reward")
    assert (number.number, number.expected) == (4.0, 4.0)
    assert llm.decide("value", Score("how?", ["bad", "good"]), branch="reward").number == 2.0


def test_what_a_branch_cannot_answer(llm: LLM) -> None:
    with pytest.raises(RequestError, match="no branch 'nobody'; loaded: 'judge', 'reward'"):
        llm.decide("x", branch="nobody")
    with pytest.raises(RequestError, match="decides between"):
        llm.decide("x", Predicate("is it?"), branch="judge")
    with pytest.raises(RequestError, match="questions must be given"):
        llm.decide("x")


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_decide_then_write(folders: dict[str, str], prefix_caching: bool) -> None:
    with make(folders, prefix_caching) as llm:
        prompts = ["answer it all", "search for it", "answer", "refuse refuse"]
        params = SamplingParams(max_tokens=3, n=2, seed=1)
        before = llm.stats().computed_tokens
        found = llm.decide_then_write(prompts, params, branch="judge", continue_if=["answer"])
        read = llm.stats().computed_tokens - before
        values = ["answer", "search", "answer", "refuse"]
        assert [own.decision.value for own in found] == values
        for own, prompt in zip(found, prompts, strict=True):
            plain = llm.generate(prompt, params)
            if own.decision.value == "answer":
                assert [c.text for c in own.completion.choices] == [c.text for c in plain.choices]
                assert own.text == plain.text
            else:
                assert {c.finish_reason for c in own.completion.choices} == {FinishReason.GATE}
                assert own.text == ""
        ids = sum(len(smollm2_tokenizer().encode(prompt)) for prompt in prompts)
        written = sum(len(c.token_ids) for own in found for c in own.completion.choices)
        assert read <= ids + len(prompts) + written + 4  # each prompt once


def test_one_in_one_out(llm: LLM) -> None:
    one = llm.decide_then_write("answer", branch="judge", continue_if="answer")
    assert isinstance(one, GatedCompletion)
    chat = llm.decide_then_write(CHAT, branch="judge", continue_if="answer")
    assert isinstance(chat, GatedCompletion)
    assert chat.text == llm.chat(CHAT).text
    (listed,) = llm.decide_then_write([CHAT], branch="judge", continue_if="answer")
    assert listed.decision == chat.decision
    assert llm.decide_then_write([], branch="judge", continue_if="answer") == []


def test_a_prefix_begins_the_reply(llm: LLM) -> None:
    gate = {"prefix": '{"do": "', "options": ["write", "skip"]}
    first = llm.decide_then_write("a b", continue_if=["write", "skip"], **gate)  # type: ignore[arg-type]
    assert first.text.startswith('{"do": "' + str(first.decision.value))
    assert first.decision == llm.decide_prefix("a b", '{"do": "', ["write", "skip"])
    other = "write" if first.decision.value == "skip" else "skip"
    shut = llm.decide_then_write("a b", continue_if=[other], **gate)  # type: ignore[arg-type]
    assert shut.text == ""
    moved = llm.decide_then_write("a b", continue_if=[other], threshold={other: 0.0}, **gate)  # type: ignore[arg-type]
    assert moved.decision.value == other
    assert moved.text.startswith('{"do": "' + other)


def test_a_label_gate_decides_as_decide_does(llm: LLM) -> None:
    question = Choice("Which?", ["a", "b", "c"])
    gated = llm.decide_then_write(CHAT, question=question, continue_if=["a", "b", "c"])
    assert gated.decision == llm.decide(CHAT, question)


def test_wrong_gates(llm: LLM) -> None:
    with pytest.raises(RequestError, match="continue_if must be given"):
        llm.decide_then_write("x", branch="judge")
    with pytest.raises(RequestError, match="is none of the options"):
        llm.decide_then_write(["x"], branch="judge", continue_if=["write"])
    with pytest.raises(TypeError):
        llm.decide_then_write("x", branch="judge", continue_if=["answer"], judge=1)  # type: ignore[call-overload]


def test_branches_come_and_go(llm: LLM, tmp_path: Path) -> None:
    tone = llm.load_branch("tone", make_branch(tmp_path, "tone", options=("calm", "angry")))
    assert llm.branches["tone"] == tone
    assert llm.decide("angry", branch="tone").value == "angry"
    llm.unload_branch("tone")
    assert sorted(llm.branches) == ["judge", "reward"]
    with pytest.raises(BranchError, match="not loaded"):
        llm.unload_branch("tone")
    with pytest.raises(BranchError, match="name must be"):
        llm.load_branch("a/b", tmp_path)
    with pytest.raises(BranchError, match="No such file"):
        llm.load_branch("tone", tmp_path / "nowhere")


def test_the_asynchronous_door(folders: dict[str, str], tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_llm("judged", branches=folders) as llm:
            assert sorted(llm.branches) == ["judge", "reward"]
            assert (await llm.decide("search", branch="judge")).value == "search"
            gate = partial(llm.decide_then_write, branch="judge", continue_if="answer")
            found = await gate(["answer", "search"], SamplingParams(max_tokens=2))
            assert [own.completion.finish_reason for own in found] == ["stop", "gate"]
            plain = await llm.generate("answer", SamplingParams(max_tokens=2))
            assert found[0].text == plain.text
            await llm.load_branch("tone", make_branch(tmp_path, "tone", options=("x", "y")))
            assert (await llm.decide("y y", branch="tone")).value == "y"
            await llm.unload_branch("tone")
            with pytest.raises(RequestError, match="no branch 'tone'"):
                await llm.decide("y", branch="tone")
            with pytest.raises(BranchError):
                await llm.unload_branch("tone")

    asyncio.run(main())


def test_settings_name_branches(folders: dict[str, str], tmp_path: Path) -> None:
    config = engine_config(
        "smollm2", branches={"judge": tmp_path / "judge"}, branch_depth="exit", keep_tails=True
    )
    assert config.branches.load == (("judge", folders["judge"]),)
    assert (config.branches.depth, config.branches.keep_tails) == ("exit", True)
    for wrong in (["judge"], {"judge": 3}, {"judge": ""}):
        with pytest.raises(ConfigError, match="branches"):
            engine_config("smollm2", branches=wrong)  # type: ignore[arg-type]
    for name in ("", "a b", "labels", "prefix", "-x"):
        with pytest.raises(BranchError, match="name must be"):
            engine_config("smollm2", branches={name: "x"})
    with pytest.raises(ConfigError, match="branch_depth"):
        engine_config("smollm2", branch_depth="half")  # type: ignore[arg-type]


def test_a_conversation_with_functions_is_read_as_a_chat_reads_it(llm: LLM) -> None:
    look = {"type": "function", "function": {"name": "look", "description": "answer answer"}}
    call = {"name": "look", "arguments": {"what": "search"}}
    given = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "1", "content": "refuse"},
    ]
    told = llm.decide_then_write(given, branch="judge", continue_if="answer", tools=[look])
    assert told.text == llm.chat(given, tools=[look]).text
    before = llm.stats().computed_tokens
    decision = llm.decide(given, branch="judge", tools=[look])
    assert decision == told.decision
    assert decision.value == "answer"  # said by the function alone, once more than the others
    suffix = len(smollm2_tokenizer().encode_inside(" ?"))
    assert llm.stats().computed_tokens - before == suffix
    assert llm.decide(given, branch="judge").value != "answer"
    question = Choice("?", ["a", "b"])
    gated = llm.decide_then_write(given, question=question, continue_if=["a", "b"], tools=[look])
    assert llm.decide(given, question, tools=[look]) == gated.decision
    with pytest.raises(RequestError, match=r"tool_calls\[0\] must have an id"):
        llm.decide([{"role": "assistant", "tool_calls": [{}]}], branch="judge")
