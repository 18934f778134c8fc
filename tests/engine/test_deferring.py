"""What a gate leaves for later: layers above a branch's stop are computed for those that open,
from the rows kept there, and no row goes through a layer twice."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.branch import Branch
from lockstep.config import BranchOptions, CacheConfig, SchedulerConfig
from lockstep.engine.loop import Engine
from lockstep.runner.plan import Plan, RunResult, StepResult, TokenRun
from lockstep.types import FinishReason, Request
from tests.branch_fake import BranchExecutor, make_branch
from tests.engine.harness import drain, request, tokens
from tests.engine.test_branches import (
    CONTEXT,
    EXIT,
    FORK,
    FULL,
    LAYERS,
    QUESTION,
    SPLIT,
    ask,
    judged,
    spent,
)
from tests.engine.test_gates import HEADER, by_branch, gated, winner
from tests.fakes import expected_tokens

PAGE = 16
STOP = {"suffix": EXIT, "context": FORK}
TAIL = {"suffix": 0, "context": EXIT - FORK}
ASKED = len(QUESTION) * EXIT


def closed(target: Engine, name: str, prompt: Sequence[int], branch: str, **more: Any) -> Request:
    """A gate that the fake's head leaves shut."""
    best = winner(target, prompt, branch)
    return gated(name, prompt, by_branch(branch, opens=[i for i in range(3) if i != best]), **more)


@pytest.mark.parametrize("adapt", ["suffix", "context"])
@pytest.mark.parametrize("groups", [FULL, SPLIT])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("length", [1, 48, 500])
def test_a_closed_gate_costs_its_stop(
    tmp_path: Path, adapt: Any, groups: Any, keep: bool, length: int
) -> None:
    target = judged(tmp_path, adapt, groups=groups, keep=keep)
    prompt = CONTEXT[:length]
    cost = spent(target, closed(target, "r", prompt, adapt))
    assert cost == length * (STOP[adapt] + TAIL[adapt]) + ASKED


@pytest.mark.parametrize("adapt", ["suffix", "context"])
@pytest.mark.parametrize("groups", [FULL, SPLIT])
@pytest.mark.parametrize("length", [48, 500])
def test_a_chat_after_a_closed_gate_costs_what_it_left_out(
    tmp_path: Path, adapt: Any, groups: Any, length: int
) -> None:
    target = judged(tmp_path, adapt, groups=groups)
    spent(target, closed(target, "r", CONTEXT[:length], adapt))
    chat = [*CONTEXT[:length], 7, 8, 9]
    cost = spent(target, request("chat", chat, 5))
    assert cost == length * (LAYERS - STOP[adapt]) + (3 + 4) * LAYERS
    # Now it is there whole, for anybody.
    assert spent(target, request("again", chat, 1)) == LAYERS
    target.submit(request("told", chat, 5))
    outputs = drain(target)[("told", 0)]
    assert tokens(outputs) == expected_tokens(chat, 5, 1000)
    assert outputs[0].cached_tokens == length + 2


@pytest.mark.parametrize("groups", [FULL, SPLIT])
@pytest.mark.parametrize("length", [48, 500])
def test_a_gate_after_a_chat_costs_its_question(tmp_path: Path, groups: Any, length: int) -> None:
    target = judged(tmp_path, "suffix", groups=groups)
    spent(target, request("chat", CONTEXT[:length], 1))
    for name in ("first", "second"):
        assert spent(target, closed(target, name, CONTEXT[:length], "suffix")) == ASKED
    cost = spent(target, gated("open", CONTEXT[:length], by_branch(), 5))
    assert cost == ASKED + (len(HEADER) + 4) * LAYERS


@pytest.mark.parametrize("adapt", ["suffix", "context"])
def test_the_next_gate_finds_what_the_last_one_left(tmp_path: Path, adapt: Any) -> None:
    target = judged(tmp_path, adapt)
    spent(target, closed(target, "first", CONTEXT, adapt))
    again = len(CONTEXT) * TAIL[adapt] + ASKED
    assert spent(target, closed(target, "second", CONTEXT, adapt)) == again
    cost = spent(target, gated("third", CONTEXT, by_branch(adapt), 5))
    above = len(CONTEXT) * (LAYERS - STOP[adapt])
    assert cost == again + above + (len(HEADER) + 4) * LAYERS


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("adapt", ["suffix", "context"])
def test_a_document_is_read_once_for_many_gates(tmp_path: Path, adapt: Any, at_once: bool) -> None:
    target = judged(tmp_path, adapt)
    prompts = [[*CONTEXT, *range(600 + 50 * i, 640 + 50 * i)] for i in range(4)]
    gates = [closed(target, f"r{i}", prompt, adapt) for i, prompt in enumerate(prompts)]
    cost = spent(target, *gates) if at_once else sum(spent(target, gate) for gate in gates)
    read = STOP[adapt] * (len(CONTEXT) + 4 * 40)
    tails = TAIL[adapt] * (len(CONTEXT) * (1 if at_once else 4) + 4 * 40)
    assert cost == read + tails + 4 * ASKED


def test_a_prefix_is_used_that_a_chat_left_whole_and_a_gate_went_on_from(tmp_path: Path) -> None:
    target = judged(tmp_path, "suffix")
    spent(target, request("chat", CONTEXT[:200], 1))
    whole = 200 - 200 % PAGE  # rows are stored from the beginning of a page on
    cost = spent(target, closed(target, "gate", CONTEXT, "suffix"))
    assert cost == (500 - whole) * EXIT + ASKED
    cost = spent(target, request("on", [*CONTEXT, 1], 1))
    assert cost == (500 - whole) * (LAYERS - EXIT) + LAYERS


def test_decisions_use_what_gates_left_and_leave_it_there(tmp_path: Path) -> None:
    for adapt in ("suffix", "context"):
        target = judged(tmp_path, adapt)
        spent(target, closed(target, "gate", CONTEXT, adapt))
        for name in ("a", "b"):
            cost = spent(target, ask(name, CONTEXT, QUESTION, adapt))
            assert cost == len(CONTEXT) * TAIL[adapt] + ASKED
        cost = spent(target, request("chat", [*CONTEXT, 1], 1))
        assert cost == len(CONTEXT) * (LAYERS - STOP[adapt]) + LAYERS


def test_a_decision_that_leaves_at_its_exit_leaves_the_trunks_own_pages(tmp_path: Path) -> None:
    target = judged(tmp_path, "suffix", depth="exit")
    spent(target, ask("d", CONTEXT, QUESTION))
    keys = {key for node in target._cache.tree.nodes() for key in node.components}
    assert keys == {(0, "")}


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("adapt", ["suffix", "context"])
def test_every_choice_goes_on_from_one_context(
    tmp_path: Path, adapt: Any, keep: bool, count: int
) -> None:
    target = judged(tmp_path, adapt, keep=keep)
    target._scheduler.config = replace(target._scheduler.config, max_step_tokens=64)
    cost = spent(target, gated("r", CONTEXT, by_branch(adapt), 4, n=count))
    rows = len(CONTEXT) * (LAYERS + TAIL[adapt]) + ASKED
    assert cost == rows + (len(HEADER) + 3 * count + count - 1) * LAYERS


def test_a_context_gate_on_a_chat_keeps_what_the_trunk_has(tmp_path: Path) -> None:
    """The judge reads the context anew; strangers push out what nobody holds meanwhile."""
    target = judged(tmp_path, "context", slabs=64)
    target._scheduler.config = replace(target._scheduler.config, max_step_tokens=64)
    prompt = CONTEXT[:320]
    spent(target, request("chat", prompt, 1))
    before = target.stats().computed_layers
    target.submit(gated("r", prompt, by_branch("context"), 5))
    target.step()
    for i in range(6):  # they take every page that is free, and evict
        target.submit(request(f"s{i}", [900 + i, *CONTEXT[:300]], 1, priority=1))
    found = drain(target)
    assert target._cache.stats.evictions > 0
    cost = target.stats().computed_layers - before - 6 * 301 * LAYERS
    assert cost == 320 * EXIT + ASKED + (len(HEADER) + 4) * LAYERS
    assert tokens(found[("r", 0)]) == expected_tokens([*prompt, *HEADER], 5, 1000)


class BrokenHead(BranchExecutor):
    """Whose heads' outputs are no numbers, of sound rows or of others."""

    sound = True

    def _execute(self, plan: Plan) -> StepResult:
        found = super()._execute(plan)
        runs = tuple(
            RunResult(error="not finite", scores=one.scores if self.sound else ())
            if run.scores
            else one
            for run, one in zip(plan.runs, found.runs, strict=True)
        )
        return replace(found, runs=runs)


@pytest.mark.parametrize("sound", [False, True])
def test_a_heads_error_leaves_the_context_where_it_is(tmp_path: Path, sound: bool) -> None:
    folder = make_branch(tmp_path, "suffix", fork=FORK, exit_=EXIT)
    executor = BrokenHead(folders=[folder], groups=FULL, num_layers=LAYERS)
    executor.sound = sound
    options = BranchOptions(load=(("suffix", folder),))
    target = Engine(executor, SchedulerConfig(), CacheConfig(), branches=options)
    target.submit(gated("r", CONTEXT, by_branch()))
    ((output,),) = drain(target).values()
    assert output.finish is FinishReason.ERROR
    cost = spent(target, request("chat", [*CONTEXT, 1], 1))
    # Rows of the step in which it failed were told to the tree, and the page begun was not.
    whole = len(CONTEXT) - len(CONTEXT) % PAGE
    left = (len(CONTEXT) - whole) * LAYERS + whole * (LAYERS - EXIT)
    kept = len(CONTEXT) * (LAYERS - EXIT)
    assert cost - LAYERS in ((left, kept) if sound else (len(CONTEXT) * LAYERS,))


# --- nothing twice -------------------------------------------------------------------------


class Counting(BranchExecutor):
    """Counts how often the trunk's row of a prefix went through a layer."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.passed: Counter[tuple[int, int]] = Counter()

    def _slots(self, run: TokenRun, branch: Branch | None, value: int) -> list[tuple[int, object]]:
        if branch is None:
            self.passed.update((value, layer) for layer in range(*run.layers))
        return super()._slots(run, branch, value)


@settings(deadline=None, max_examples=12)
@given(st.integers(0, 2**32 - 1), st.sampled_from([FULL, SPLIT]), st.booleans())
def test_no_row_goes_through_a_layer_twice(seed: int, groups: Any, small_steps: bool) -> None:
    """Chats, gates and decisions about contexts that begin alike, one after another or side by
    side: what a request repeats is less than a page, and the row that it draws from."""
    chance = random.Random(seed)
    with TemporaryDirectory() as folder:
        path = make_branch(Path(folder), "suffix", fork=FORK, exit_=EXIT)
        executor = Counting(
            folders=[path], groups=groups, num_layers=LAYERS, num_slabs=400, vocab_size=3
        )
        scheduler = SchedulerConfig(**({"max_step_tokens": 24} if small_steps else {}))
        target = Engine(
            executor, scheduler, CacheConfig(), branches=BranchOptions(load=(("suffix", path),))
        )
        texts: list[list[int]] = [[]]
        count = 0
        for turn in range(12):
            text = chance.choice(texts)
            text = text[: chance.choice((len(text), chance.randint(0, len(text))))]
            text = text + [chance.randrange(3) for _ in range(chance.randint(1, 90))]
            texts.append(text)
            for side in range(chance.choice((1, 1, 2))):
                name, question = f"r{turn}.{side}", [chance.randrange(3) for _ in range(3)]
                kind = chance.choice(("chat", "gate", "gate", "decide"))
                if kind == "chat":
                    work = request(name, text, chance.randint(1, 4), n=chance.choice((1, 2)))
                elif kind == "decide":
                    work = ask(name, text, question)
                else:
                    opens = chance.choice(((), (0, 1, 2)))
                    gate = by_branch(opens=opens, header=tuple(question))
                    gate = replace(gate, probes=(replace(gate.probes[0], suffix=(1, 2)),))
                    work = gated(name, text, gate, chance.randint(1, 4))
                target.submit(work)
                count += 1
            while target.has_work():
                target.step()
            target.check_integrity()
        again = executor.passed.total() - len(executor.passed)
        assert again <= count * 2 * PAGE * LAYERS
        assert executor.layers_of_rows == target.stats().computed_layers
