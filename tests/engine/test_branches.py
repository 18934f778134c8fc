"""Decisions by branches: what is computed, what is shared with generation, what is let go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.branch import Adapt, BranchError
from lockstep.config import BranchOptions, CacheConfig, ConfigError, SchedulerConfig
from lockstep.engine.loop import Engine
from lockstep.types import (
    FinishReason,
    Gate,
    GateProbe,
    LayerGroup,
    Request,
    RequestError,
    SamplingParams,
)
from tests.branch_fake import BranchExecutor, make_branch, scores_of
from tests.engine.harness import drain, engine, request, tokens
from tests.fakes import expected_tokens

LAYERS, FORK, EXIT = 8, 3, 5
SPLIT = (
    LayerGroup("full", "full", (0, 2, 4, 6), 1, 8),
    LayerGroup("sliding", "sliding", (1, 3, 5, 7), 1, 8, 20),
)
FULL = (LayerGroup("full", "full", tuple(range(LAYERS)), 1, 8),)
CONTEXT = [i % 97 for i in range(500)]
QUESTION = [501, 502, 503, 504, 505]


def judged(
    tmp_path: Path,
    *adapts: Adapt,
    groups: tuple[LayerGroup, ...] = FULL,
    keep: bool = True,
    slabs: int = 256,
    **options: Any,
) -> Engine:
    """An engine with a branch of each of these kinds, named after it (and its number)."""
    folders = {}
    for index, adapt in enumerate(adapts):
        name = f"{adapt}{index or ''}"
        folders[name] = make_branch(tmp_path, name, fork=FORK, exit_=EXIT, adapt=adapt)
    config = BranchOptions(load=tuple(folders.items()), **options)
    executor = BranchExecutor(
        folders=list(folders.values()),
        groups=groups,
        num_layers=LAYERS,
        num_slabs=slabs,
    )
    return Engine(
        executor,
        SchedulerConfig(),
        CacheConfig(prefix_caching=keep),
        branches=config,
    )


def ask(
    name: str, context: Sequence[int], question: Sequence[int], branch: str = "suffix"
) -> Request:
    return Request(
        name,
        (*context, *question),
        SamplingParams(max_tokens=0, seed=0),
        branch=branch,
        branch_from=len(context),
    )


def decided(target: Engine, asked: Request) -> tuple[float, ...]:
    """Scores of one decision, which are checked; nothing else may be open."""
    target.submit(asked)
    ((output,),) = drain(target).values()
    assert output.finish is FinishReason.LENGTH
    assert output.tokens == ()
    branch = target.branches[asked.branch]
    assert output.scores == scores_of(asked.prompt, asked.branch_from, branch)
    return output.scores


def spent(target: Engine, *work: Request) -> int:
    """Layers that rows went through for this work."""
    before = target.stats().computed_layers
    for one in work:
        target.submit(one)
    drain(target)
    found = target.stats().computed_layers - before
    assert isinstance(target._executor, BranchExecutor)
    return found


@pytest.mark.parametrize("groups", [FULL, SPLIT])
@pytest.mark.parametrize("adapt", ["suffix", "context"])
@pytest.mark.parametrize("options", [{}, {"depth": "exit"}, {"keep_activations": True}])
def test_a_head_tells_what_its_rows_say(
    tmp_path: Path, adapt: Adapt, groups: tuple[LayerGroup, ...], options: dict[str, Any]
) -> None:
    target = judged(tmp_path, adapt, groups=groups, **options)
    for length in (1, 15, 16, 17, 100, 500):
        decided(target, ask("d", CONTEXT[:length], QUESTION, adapt))
    target.submit(ask("a", CONTEXT[:40], QUESTION, adapt))
    target.submit(ask("b", CONTEXT[:40], [7], adapt))
    found = drain(target)
    assert found[("a", 0)][0].scores != found[("b", 0)][0].scores


@pytest.mark.parametrize(
    ("adapt", "options", "layers"),
    [
        ("suffix", {}, LAYERS),
        ("suffix", {"depth": "exit"}, EXIT),
        ("context", {}, LAYERS + EXIT - FORK),
        ("context", {"depth": "exit"}, EXIT),
    ],
)
def test_what_a_cold_decision_costs(
    tmp_path: Path, adapt: Adapt, options: dict[str, Any], layers: int
) -> None:
    target = judged(tmp_path, adapt, **options)
    cost = spent(target, ask("d", CONTEXT, QUESTION, adapt))
    assert cost == len(CONTEXT) * layers + len(QUESTION) * EXIT


def test_b05_a_decision_after_a_chat_costs_its_question(tmp_path: Path) -> None:
    """The adapter acts on the question alone, and so the whole chat's keys and values serve."""
    target = judged(tmp_path, "suffix")
    alone = judged(tmp_path, "suffix")
    target.submit(request("chat", CONTEXT, 30))
    answer = tokens(drain(target)[("chat", 0)])
    chat = [*CONTEXT, *answer]
    # The last id that was drawn is not computed yet.
    assert spent(target, ask("d", chat, QUESTION)) == LAYERS + len(QUESTION) * EXIT
    target.submit(ask("again", chat, QUESTION))
    ((output,),) = drain(target).values()
    assert output.cached_tokens == len(chat)
    assert output.scores == decided(alone, ask("cold", chat, QUESTION))
    # And the chat goes on from its own pages.
    assert spent(target, request("on", [*chat, 5], 1)) == LAYERS


@pytest.mark.parametrize("length", [500, 529, 530, 700, 1450])
def test_of_a_context_that_the_trunk_has_its_rows_stop_at_the_fork(
    tmp_path: Path, length: int
) -> None:
    """What the trunk lacks above is made from there, when somebody asks for it."""
    target = judged(tmp_path, "context")
    target.submit(request("chat", CONTEXT, 30))
    answer = tokens(drain(target)[("chat", 0)])
    chat = [*CONTEXT, *answer, *range(1000)][:length]
    cost = spent(target, ask("d", chat, QUESTION, "context"))
    assert cost == length * EXIT + len(QUESTION) * EXIT
    known = length if length < 530 else 528
    again = (length - known) * (LAYERS - FORK)
    assert spent(target, request("on", [*chat, 5], 1)) == again + LAYERS
    # What the fork was given is kept as well.
    assert spent(target, ask("d", chat, [9], "context")) == length * (EXIT - FORK) + EXIT


@pytest.mark.parametrize("adapt", ["suffix", "context"])
def test_a_chat_after_a_decision_finds_its_context(tmp_path: Path, adapt: str) -> None:
    target = judged(tmp_path, adapt)
    decided(target, ask("d", CONTEXT, QUESTION, adapt))
    target.submit(request("chat", [*CONTEXT, 7, 8, 9], 5))
    outputs = drain(target)[("chat", 0)]
    assert outputs[0].cached_tokens == len(CONTEXT)
    assert tokens(outputs) == expected_tokens([*CONTEXT, 7, 8, 9], 5, 1000)


def test_rows_that_left_early_serve_decisions_alone(tmp_path: Path) -> None:
    target = judged(tmp_path, "suffix", depth="exit")
    decided(target, ask("d", CONTEXT, QUESTION))
    assert spent(target, ask("d", CONTEXT, [9])) == EXIT
    assert spent(target, request("chat", [*CONTEXT, 7], 1)) == (len(CONTEXT) + 1) * LAYERS
    # The other way round the trunk's own rows serve, and go on being the trunk's.
    longer = [*CONTEXT, *range(40)]
    assert spent(target, ask("e", longer, [9])) == 40 * EXIT + EXIT
    assert spent(target, ask("e", longer, [8])) == EXIT


@pytest.mark.parametrize("keep", [False, True])
def test_a_tail_is_let_go_with_the_decision(tmp_path: Path, keep: bool) -> None:
    target = judged(tmp_path, "context", keep_tails=keep)
    decided(target, ask("d", CONTEXT, QUESTION, "context"))
    pages = -(-len(CONTEXT) // 16)
    assert target.stats().pages_tail == (pages if keep else 0)
    cost = spent(target, ask("d", CONTEXT, [9, 8], "context"))
    again = len(CONTEXT) * EXIT  # what is above is the trunk's, which has it
    assert cost == (0 if keep else again) + 2 * EXIT
    target.flush_cache()
    assert target.stats().pages_tail == 0


def test_activations_spare_the_trunk(tmp_path: Path) -> None:
    target = judged(tmp_path, "context", "context", keep_activations=True)
    decided(target, ask("d", CONTEXT, QUESTION, "context"))
    whole = len(CONTEXT) - len(CONTEXT) % 16
    again = len(CONTEXT) * (EXIT - FORK)
    assert spent(target, ask("d", CONTEXT, QUESTION, "context")) == again + len(QUESTION) * EXIT
    # What enters the fork is no branch's own.
    assert spent(target, ask("d", CONTEXT, QUESTION, "context1")) == again + len(QUESTION) * EXIT
    longer = [*CONTEXT[:whole], *range(200, 300)]
    cost = spent(target, ask("d", longer, [9], "context"))
    assert cost == whole * (EXIT - FORK) + 100 * (LAYERS + EXIT - FORK) + EXIT


def test_a_tail_that_is_kept_is_better_than_activations(tmp_path: Path) -> None:
    target = judged(tmp_path, "context", keep_activations=True, keep_tails=True)
    decided(target, ask("d", CONTEXT, QUESTION, "context"))
    assert spent(target, ask("d", CONTEXT, [9], "context")) == EXIT


@pytest.mark.parametrize("adapt", ["suffix", "context"])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("activations", [False, True])
def test_many_questions_read_their_context_once(
    tmp_path: Path, adapt: Adapt, keep: bool, activations: bool
) -> None:
    target = judged(tmp_path, adapt, keep=keep, keep_activations=activations)
    asked = [ask(f"q{i}", CONTEXT, [600 + i, 700], adapt) for i in range(12)]
    cost = spent(target, *asked)
    per_row = LAYERS + (EXIT - FORK if adapt == "context" else 0)
    once = len(CONTEXT) * per_row + 12 * 2 * EXIT
    if keep:
        assert cost == once
    else:
        assert cost >= 12 * once - 12 * 16 * per_row  # nobody else's pages


def test_context_and_question_share_a_step(tmp_path: Path) -> None:
    target = judged(tmp_path, "suffix")
    target.submit(ask("d", CONTEXT[:100], QUESTION))
    assert target.step()[0].scores
    assert target.stats().steps == 1


@pytest.mark.parametrize("fork", [0, FORK])
def test_rows_that_are_doubled_count_twice_in_a_step(tmp_path: Path, fork: int) -> None:
    folder = make_branch(tmp_path, "judge", fork=fork, exit_=EXIT, adapt="context")
    executor = BranchExecutor(folders=[folder], groups=FULL, num_layers=LAYERS, num_slabs=256)
    config = BranchOptions(load=(("judge", folder),))
    target = Engine(executor, SchedulerConfig(max_step_tokens=64), CacheConfig(), branches=config)
    for index in range(4):
        target.submit(ask(f"d{index}", [index, *CONTEXT[:40]], QUESTION, "judge"))
    drain(target)
    most = max(sum(len(run.tokens) for run in plan.runs) for plan in executor.plans)
    assert most <= 64 + 1  # the last row of a step may be one that is doubled


def test_b01_decisions_and_generation_from_one_engine_at_once(tmp_path: Path) -> None:
    target = judged(tmp_path, "suffix", "context")
    prompts = [[*CONTEXT[: 40 * i], i] for i in range(1, 10)]
    for i, prompt in enumerate(prompts):
        target.submit(request(f"chat{i}", prompt, 20, n=2))
        for name in ("suffix", "context1"):
            target.submit(ask(f"{name}{i}", prompt, QUESTION, name))
    found = drain(target)
    for i, prompt in enumerate(prompts):
        for choice in range(2):
            whole = expected_tokens(prompt, 20, 1000, choice)
            assert tokens(found[(f"chat{i}", choice)]) == whole
        for name in ("suffix", "context1"):
            branch = target.branches[name]
            (output,) = found[(f"{name}{i}", 0)]
            assert output.scores == scores_of((*prompt, *QUESTION), len(prompt), branch)


def test_the_next_step_is_planned_ahead_beside_idle_branches(tmp_path: Path) -> None:
    folder = make_branch(tmp_path)
    executor = BranchExecutor(folders=[folder])
    target = Engine(
        executor,
        SchedulerConfig(overlap=True),
        CacheConfig(),
        branches=BranchOptions(load=(("judge", folder),)),
    )
    target.submit(request("chat", range(10), 50))
    for _ in range(20):
        target.step()
    assert executor.ahead >= 18
    before = executor.ahead
    target.submit(ask("d", range(10), QUESTION, "judge"))
    found = drain(target)
    assert executor.ahead > before + 20
    assert found[("d", 0)][0].scores


def test_extra_groups_cost_the_model_nothing(tmp_path: Path) -> None:
    plain = Engine(BranchExecutor(groups=SPLIT), SchedulerConfig(), CacheConfig())
    target = judged(tmp_path, "context", groups=SPLIT, keep_activations=True)
    assert 0.99 * plain._pool_tokens < target._pool_tokens <= plain._pool_tokens


# --- loading and unloading ---------------------------------------------------------------


def test_branches_come_and_go(tmp_path: Path) -> None:
    target = judged(tmp_path, "suffix")
    executor = target._executor
    assert isinstance(executor, BranchExecutor)
    first = target.branches["suffix"]
    target.submit(ask("old", CONTEXT, QUESTION))
    other = target.load_branch("suffix", make_branch(tmp_path, "other", fork=2, exit_=6))
    target.submit(ask("new", CONTEXT, QUESTION))
    assert executor.loaded == {first.key: 1, other.key: 1}
    target.unload_branch("suffix")
    with pytest.raises(RequestError, match="'suffix' is not loaded") as refused:
        target.submit(ask("late", CONTEXT, QUESTION))
    assert (refused.value.field, refused.value.code) == ("branch", "branch_not_found")
    with pytest.raises(BranchError, match="'suffix' is not loaded"):
        target.unload_branch("suffix")
    found = drain(target)
    prompt = (*CONTEXT, *QUESTION)
    assert found[("old", 0)][0].scores == scores_of(prompt, len(CONTEXT), first)
    assert found[("new", 0)][0].scores == scores_of(prompt, len(CONTEXT), other)
    assert executor.loaded == {}
    assert target.branches == {}


def test_a_request_made_for_a_branch_is_not_read_by_another(tmp_path: Path) -> None:
    """What a head's outputs mean was settled before the name went to another branch."""
    target = judged(tmp_path, "suffix")
    key = target.branches["suffix"].key
    asked = replace(ask("d", CONTEXT, QUESTION), branch_key=key)
    probe = GateProbe(QUESTION)
    gate = Gate("suffix", (probe,), ((),) * 3, (None,) * 3, outputs=(0, 1, 2), branch_key=key)
    gated = Request("g", CONTEXT, SamplingParams(max_tokens=1, seed=0), gate=gate)
    target.submit(replace(asked, id="before"))
    other = target.load_branch("suffix", make_branch(tmp_path, "other", fork=2, exit_=6))
    for made, field in ((asked, "branch"), (gated, "gate")):
        with pytest.raises(RequestError, match="replaced") as refused:
            target.submit(made)
        assert (refused.value.field, refused.value.code) == (field, "branch_replaced")
    target.submit(replace(asked, branch_key=other.key))
    assert len(drain(target)) == 2


def test_two_names_of_one_branch(tmp_path: Path) -> None:
    target = judged(tmp_path, "suffix")
    folder = str(tmp_path / "suffix")
    target.load_branch("again", folder)
    target.load_branch("again", folder)  # in its own place
    target.unload_branch("suffix")
    assert set(target.branches) == {"again"}
    decided(target, ask("d", CONTEXT, QUESTION, "again"))


def test_a_cancelled_request_lets_its_branch_go(tmp_path: Path) -> None:
    target = judged(tmp_path, "suffix")
    executor = target._executor
    assert isinstance(executor, BranchExecutor)
    target.submit(ask("d", CONTEXT, QUESTION))
    target.unload_branch("suffix")
    assert executor.loaded.total() == 1
    target.cancel("d")
    drain(target)
    assert executor.loaded.total() == 0


def test_what_cannot_be_loaded_changes_nothing(tmp_path: Path) -> None:
    target = judged(tmp_path, "suffix")
    wrong = make_branch(tmp_path, "wrong", base="other weights")
    deep = make_branch(tmp_path, "deep", exit_=99)
    tail = make_branch(tmp_path, "tail", adapt="context")
    for folder, text in (
        (wrong, "other weights"),
        (deep, "exit 99"),
        (tail, "--branch at start"),
        (str(tmp_path / "none"), "No such file"),
    ):
        with pytest.raises(BranchError, match=text):
            target.load_branch("suffix", folder)
    with pytest.raises(BranchError, match="name"):
        target.load_branch("no name", str(tmp_path / "suffix"))
    decided(target, ask("d", CONTEXT, QUESTION))
    plain = engine()
    with pytest.raises(BranchError, match="runs no branches"):
        plain.load_branch("judge", wrong)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"sampling": SamplingParams(max_tokens=1, seed=0)}, "branch"),
        ({"sampling": SamplingParams(max_tokens=0, n=2, seed=0)}, "branch"),
        ({"sampling": SamplingParams(max_tokens=0, prompt_logprobs=1, seed=0)}, "branch"),
        ({"pooling": "last", "sampling": SamplingParams(max_tokens=0, seed=0)}, "branch"),
        ({"branch_from": 4}, "branch_from"),
        ({"branch_from": -1}, "branch_from"),
        ({"branch": "nobody"}, "branch"),
    ],
)
def test_what_makes_no_sense_is_refused(
    tmp_path: Path, change: dict[str, object], field: str
) -> None:
    target = judged(tmp_path, "suffix")
    values: dict[str, object] = {
        "id": "d",
        "prompt": (1, 2, 3, 4),
        "sampling": SamplingParams(max_tokens=0, seed=0),
        "branch": "suffix",
        "branch_from": 3,
    }
    with pytest.raises(RequestError) as refused:
        target.submit(Request(**{**values, **change}))  # type: ignore[arg-type]
    assert refused.value.field == field
    assert not target.has_work()


def test_a_decision_that_the_pool_cannot_hold_is_refused(tmp_path: Path) -> None:
    target = judged(tmp_path, "context", slabs=20)  # a context takes twice its pages
    decided(target, ask("d", CONTEXT[:140], QUESTION, "context"))
    with pytest.raises(RequestError, match="more pages than the cache holds"):
        target.submit(ask("d", CONTEXT[:200], QUESTION, "context"))


def test_settings_that_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="keep_activations needs branch_depth full"):
        BranchOptions(depth="exit", keep_activations=True)
