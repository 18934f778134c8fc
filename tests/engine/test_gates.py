"""Decide, then write: one prefill, and the answer that an ungated request gives."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.config import BranchOptions, CacheConfig, SchedulerConfig
from lockstep.engine.loop import Engine
from lockstep.options import log_softmax, normalise, probes, total_mass
from lockstep.types import (
    FinishReason,
    Gate,
    GateOutcome,
    GateProbe,
    Request,
    RequestError,
    SequenceOutput,
)
from tests.branch_fake import BranchExecutor, make_branch, scores_of
from tests.engine.harness import drain, request, tokens
from tests.engine.test_branches import CONTEXT, EXIT, FORK, FULL, LAYERS, QUESTION, SPLIT, judged
from tests.fakes import expected_tokens, logprob_of

HEADER = (801, 802, 803)
YES, NO = (7,), (8,)  # tokens whose logprobs in the fake are -1 and -2


def by_branch(
    branch: str = "suffix", *, opens: Sequence[int] = (0, 1, 2), header: tuple[int, ...] = HEADER
) -> Gate:
    """A gate of the three options of the fake's head, that opens for some of them."""
    headers = tuple(header if index in opens else None for index in range(3))
    probe = GateProbe(tuple(QUESTION))
    return Gate(branch, (probe,), headers, (None,) * 3, outputs=(0, 1, 2))


def by_labels(
    *sequences: tuple[int, ...],
    headers: Sequence[tuple[int, ...] | None] | None = None,
    suffix: Sequence[int] = tuple(QUESTION),
    **more: Any,
) -> Gate:
    """A gate that the trunk's own head opens; the first of the options wins in the fake."""
    options = sequences or (YES, NO)
    return Gate(
        "",
        tuple(GateProbe(tuple(suffix), probe.path, probe.wanted) for probe in probes(options)),
        tuple(headers) if headers is not None else (HEADER,) * len(options),
        more.pop("thresholds", (None,) * len(options)),
        sequences=options,
        **more,
    )


def gated(
    name: str, prompt: Sequence[int], gate: Gate, max_tokens: int | None = 5, **more: Any
) -> Request:
    return replace(request(name, prompt, max_tokens, **more), gate=gate)


def outcome_of(outputs: Sequence[SequenceOutput]) -> GateOutcome:
    """It comes once, first, and without a token."""
    first, *others = outputs
    assert first.gate is not None
    assert first.tokens == ()
    assert all(output.gate is None for output in others)
    return first.gate


def winner(target: Engine, prompt: Sequence[int], branch: str) -> int:
    outputs = scores_of((*prompt, *QUESTION), len(prompt), target.branches[branch])
    return outputs.index(max(outputs))


@pytest.mark.parametrize("adapt", ["suffix", "context"])
@pytest.mark.parametrize("groups", [FULL, SPLIT])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("header", [(), (801,), HEADER, tuple(range(40))])
def test_a_gate_by_a_branch(
    tmp_path: Path, adapt: Any, groups: Any, keep: bool, header: tuple[int, ...]
) -> None:
    target = judged(tmp_path, adapt, groups=groups, keep=keep)
    for length in (1, 16, 33, 100):
        prompt = CONTEXT[:length]
        asked = gated("r", prompt, by_branch(adapt, header=header), n=2, seed=4)
        target.submit(asked)
        found = drain(target)
        scores = scores_of((*prompt, *QUESTION), length, target.branches[adapt])
        for choice in range(2):
            outcome = outcome_of(found[("r", choice)])
            assert outcome.logprobs == log_softmax(scores)
            assert outcome.probabilities == normalise(outcome.logprobs)
            assert outcome.chosen == winner(target, prompt, adapt)
            assert outcome.mass == 1.0
            whole = expected_tokens([*prompt, *header], 5, 1000, choice, seed=4)
            assert tokens(found[("r", choice)]) == whole
            assert found[("r", choice)][-1].finish is FinishReason.LENGTH


@pytest.mark.parametrize("adapt", ["suffix", "context"])
def test_a_gate_that_stays_closed_writes_nothing(tmp_path: Path, adapt: Any) -> None:
    target = judged(tmp_path, adapt)
    best = winner(target, CONTEXT, adapt)
    others = [index for index in range(3) if index != best]
    target.submit(gated("r", CONTEXT, by_branch(adapt, opens=others), n=3))
    for outputs in drain(target).values():
        (output,) = outputs
        assert output.finish is FinishReason.GATE
        assert output.tokens == ()
        assert outcome_of(outputs).chosen == best
    stats = target.stats()
    assert (stats.submitted, stats.finished, stats.generated_tokens) == (3, 3, 0)


@pytest.mark.parametrize("suffix", [(), tuple(QUESTION)])
@pytest.mark.parametrize(
    "sequences",
    [(YES, NO), ((8,), (7,)), ((7, 1), (7, 2)), ((7, 1, 1), (7, 2, 2), (9, 3), (9, 4))],
)
def test_a_gate_by_the_trunks_own_head(
    tmp_path: Path, suffix: tuple[int, ...], sequences: tuple[tuple[int, ...], ...]
) -> None:
    target = judged(tmp_path)
    gate = by_labels(*sequences, suffix=suffix)
    target.submit(gated("r", CONTEXT, gate, n=2, logprobs=0))
    found = drain(target)
    expected = tuple(float(sum(map(logprob_of, path))) for path in sequences)
    for choice in range(2):
        outcome = outcome_of(found[("r", choice)])
        assert outcome.logprobs == expected
        assert outcome.mass == total_mass(expected)
        assert outcome.chosen == expected.index(max(expected))
        whole = expected_tokens([*CONTEXT, *HEADER], 5, 1000, choice)
        assert tokens(found[("r", choice)]) == whole
        reported = [entry for output in found[("r", choice)] for entry in output.logprobs]
        assert [entry.token for entry in reported] == whole


def test_thresholds_and_temperature(tmp_path: Path) -> None:
    target = judged(tmp_path)
    sequences = ((7,), (8,), (9,))
    for thresholds, chosen in (((None,) * 3, 0), ((None, 0.2, 0.0), 1), ((0.9, None, 0.0), 2)):
        target.submit(gated("r", CONTEXT, by_labels(*sequences, thresholds=thresholds)))
        assert outcome_of(drain(target)[("r", 0)]).chosen == chosen
    target.submit(gated("r", CONTEXT, by_labels(temperature=0.0)))
    assert outcome_of(drain(target)[("r", 0)]).probabilities == (1.0, 0.0)


def test_a_forced_prefix_goes_on_where_it_stands(tmp_path: Path) -> None:
    """Its reply is that of an ungated request whose prompt holds prefix and option, and not a
    row is computed twice."""
    target = judged(tmp_path)
    prefix = (11, 12, 13)
    gate = by_labels(suffix=prefix, headers=((*prefix, *YES), None))
    target.submit(gated("r", CONTEXT, gate, 4))
    outputs = drain(target)[("r", 0)]
    assert tokens(outputs) == expected_tokens([*CONTEXT, *prefix, *YES], 4, 1000)
    rows = len(CONTEXT) + len(prefix) + 1 + 3  # the last token drawn is never computed
    assert target.stats().computed_tokens == rows
    assert target.stats().prompt_tokens == len(CONTEXT) + len(prefix) + 4


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    ("adapt", "per_row"), [("suffix", LAYERS), ("context", LAYERS + EXIT - FORK)]
)
@pytest.mark.parametrize("header", [HEADER, ()])
@pytest.mark.parametrize("count", [1, 2])
def test_the_context_is_computed_once(
    tmp_path: Path, adapt: Any, per_row: int, keep: bool, header: tuple[int, ...], count: int
) -> None:
    target = judged(tmp_path, adapt, keep=keep)
    target.submit(gated("r", CONTEXT, by_branch(adapt, header=header), 4, n=count))
    drain(target)
    written = len(header) * LAYERS + 3 * LAYERS * count
    if not header:  # the last row of the context again, for its logits
        written += EXIT if adapt == "suffix" else FORK
    if count == 2:  # whose first token needs a row of its own
        written += LAYERS
    cost = len(CONTEXT) * per_row + len(QUESTION) * EXIT + written
    assert target.stats().computed_layers == cost


@pytest.mark.parametrize("keep_tails", [False, True])
def test_a_gate_in_every_turn_of_a_chat(tmp_path: Path, keep_tails: bool) -> None:
    """A context branch reads earlier turns up to its exit, or not at all where its tail stays;
    the trunk reads them once."""
    target = judged(tmp_path, "context", keep_tails=keep_tails)
    chat: list[int] = []
    for turn in range(4):
        chat += [(31 * turn + i) % 400 for i in range(100)]
        known = len(chat) - 100
        before = target.stats().computed_layers
        target.submit(gated(f"r{turn}", chat, by_branch("context"), 10))
        outputs = drain(target)[(f"r{turn}", 0)]
        assert outcome_of(outputs).chosen == winner(target, chat, "context")
        assert tokens(outputs) == expected_tokens([*chat, *HEADER], 10, 1000)
        cost = target.stats().computed_layers - before
        cost -= len(QUESTION) * EXIT + (len(HEADER) + 9) * LAYERS
        fresh = 113 + 16  # the question, the answer before it, and of the page they begin in
        if keep_tails or not known:
            assert cost <= fresh * (LAYERS + EXIT - FORK)
        else:
            assert cost <= len(chat) * EXIT + fresh * LAYERS
        chat += [*HEADER, *tokens(outputs)]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("adapt", ["suffix", "context"])
@pytest.mark.parametrize("seed", range(4))
def test_no_pressure_costs_a_second_prefill(
    tmp_path: Path, adapt: Any, keep: bool, seed: int
) -> None:
    """Strangers fill the pool and push everything out that nobody holds; the gated request is
    the most important one, and computes each of its rows once."""
    target = judged(tmp_path, adapt, keep=keep, slabs=24)
    chance = random.Random(seed)
    executor = target._executor
    assert isinstance(executor, BranchExecutor)
    for i in range(12):
        length = chance.randint(5, 60)
        target.submit(request(f"s{i}", [i, *CONTEXT[:length]], 40, n=2, priority=1))
    for _ in range(chance.randint(1, 30)):
        target.step()
    context = [99, *CONTEXT[:100]]
    target.submit(gated("r", context, by_branch(adapt), 30))
    number = target._scheduler.requests["r"][0].number
    found = drain(target)
    assert target.stats().preemptions > 0
    trunk = [
        run
        for plan in executor.plans
        for run in plan.runs
        if run.sequence == number and not run.branch
    ]
    passed = Counter(
        (position, layer)
        for run in trunk
        for position in range(run.start, run.start + len(run.tokens))
        for layer in range(*run.layers)
    )
    length = len(context) + len(HEADER) + 29
    assert set(passed) == {(p, layer) for p in range(length) for layer in range(LAYERS)}
    assert passed.total() == len(passed), "a row went twice through a layer"
    assert tokens(found[("r", 0)]) == expected_tokens([*context, *HEADER], 30, 1000)


@pytest.mark.parametrize("adapt", ["", "suffix", "context"])
def test_the_answer_reports_what_an_ungated_one_does(tmp_path: Path, adapt: Any) -> None:
    for params in (
        {"prompt_logprobs": 1},
        {"prompt_logprobs": 1, "logprobs": 2, "n": 2},
        {"logprobs": 0, "stop_ids": tuple(range(0, 1000, 3))},
        {"seed": 9, "repetition_penalty": 1.3, "n": 3},
    ):
        target = judged(tmp_path, *([adapt] if adapt else []))
        gate = by_branch(adapt) if adapt else by_labels()
        target.submit(gated("r", CONTEXT[:60], gate, 6, **params))
        found = drain(target)
        plain = judged(tmp_path)
        plain.submit(request("r", [*CONTEXT[:60], *HEADER], 6, **params))
        for key, outputs in drain(plain).items():
            head, *told = found[key]
            assert head.gate is not None
            assert [replace(out, cached_tokens=0) for out in told] == [
                replace(out, cached_tokens=0) for out in outputs
            ]


def test_a_gated_request_that_only_scores(tmp_path: Path) -> None:
    target = judged(tmp_path, "suffix")
    target.submit(gated("r", CONTEXT, by_branch(), 0, prompt_logprobs=0))
    head, last = drain(target)[("r", 0)]
    assert head.gate is not None
    assert last.finish is FinishReason.LENGTH
    assert last.prompt_logprobs is not None
    assert len(last.prompt_logprobs) == len(CONTEXT) + len(HEADER)


# --- what goes wrong ----------------------------------------------------------------------


GATES = {
    "suffix": by_branch(),
    "context": by_branch("context1"),
    "labels": by_labels((7, 1, 1), (7, 2, 2), (9, 3)),
    "closed": by_labels(headers=(None, None)),
}


@pytest.mark.parametrize("which", GATES)
@pytest.mark.parametrize("choice", [None, 0, 2])
def test_a_request_is_cancelled_at_every_moment(
    tmp_path: Path, which: str, choice: int | None
) -> None:
    for moment in range(40):
        target = judged(tmp_path, "suffix", "context", keep=moment % 2 == 0)
        target.submit(request("other", [1, *CONTEXT[:90]], 30))
        target.submit(gated("r", CONTEXT[:300], GATES[which], 3, n=3))
        told = [out for _ in range(moment) for out in target.step() if out.request == "r"]
        target.cancel("r", choice)
        told += [out for key, outs in drain(target).items() if key[0] == "r" for out in outs]
        ends = {out.choice: out.finish for out in told if out.finish is not None}
        assert set(ends) == {0, 1, 2}
        done = all(out.finish is not FinishReason.CANCELLED for out in told)
        assert done or choice is None or ends[choice] is FinishReason.CANCELLED
        kept = [c for c in range(3) if ends[c] is FinishReason.LENGTH]
        for c in kept:
            whole = expected_tokens([*CONTEXT[:300], *HEADER], 3, 1000, c)
            assert tokens([out for out in told if out.choice == c]) == whole
        stats = target.stats()
        assert stats.submitted == stats.finished + stats.cancelled + stats.failed == 4
        if done:
            break
    assert moment >= 2


@pytest.mark.parametrize("which", ["suffix", "context", "labels"])
def test_a_step_that_fails_ends_every_choice_that_waits_for_it(tmp_path: Path, which: str) -> None:
    target = judged(tmp_path, "suffix", "context")
    executor = target._executor
    assert isinstance(executor, BranchExecutor)
    executor.fails = lambda plan: plan.step == 1
    target.submit(gated("r", CONTEXT[:40], GATES[which], 30, n=3))
    found = drain(target)
    assert len(found) == 3
    for (output,) in found.values():
        assert output.finish is FinishReason.ERROR
        assert "told to fail" in output.error
    stats = target.stats()
    assert (stats.submitted, stats.failed) == (3, 3)


@pytest.mark.parametrize("which", GATES)
@pytest.mark.parametrize("moment", range(1, 6))
def test_a_judge_that_makes_way_begins_again(tmp_path: Path, which: str, moment: int) -> None:
    target = judged(tmp_path, "suffix", "context", slabs=26)
    target._scheduler.config = replace(target._scheduler.config, max_step_tokens=48)
    target.submit(gated("r", CONTEXT[:90], GATES[which], 3, n=2))
    told = [out for _ in range(moment) for out in target.step()]
    target.submit(request("urgent", [1, *CONTEXT[:310]], 2, priority=-1))
    told += [out for outputs in drain(target).values() for out in outputs]
    mine = [[out for out in told if (out.request, out.choice) == ("r", c)] for c in range(2)]
    assert outcome_of(mine[0]) == outcome_of(mine[1])
    for choice in range(2) if which != "closed" else ():
        whole = expected_tokens([*CONTEXT[:90], *HEADER], 3, 1000, choice)
        assert tokens(mine[choice]) == whole


@pytest.mark.parametrize(
    ("gate", "text"),
    [
        (by_branch("nobody"), "'nobody' is not loaded"),
        (replace(by_branch(), outputs=(0, 1, 3)), "output 3 is not among the head's 3"),
        (replace(by_branch(), outputs=(0, 1)), "3 headers for 2 outputs"),
        (replace(by_branch(), probes=()), "no probes"),
        (replace(by_branch(), probes=(GateProbe(()),)), "one probe, which has a suffix"),
        (replace(by_branch(), probes=(GateProbe((1,)),) * 2), "one probe"),
        (replace(by_branch(), thresholds=(None,)), "1 thresholds"),
        (replace(by_labels(), thresholds=(None, 1.5)), "threshold must be in"),
        (replace(by_labels(), temperature=-1.0), "temperature"),
        (replace(by_labels(), sequences=(YES,)), "2 headers for 1 options"),
        (replace(by_labels(), sequences=((7,), (9,))), "no probe shows token 9"),
        (replace(by_labels(), sequences=((7,), (8, 1))), "no probe shows token 1"),
        (by_labels(headers=((1000,), None)), "token id 1000"),
        (by_labels(suffix=(-1,)), "token id -1"),
    ],
)
def test_a_gate_that_cannot_be_read_is_refused(tmp_path: Path, gate: Gate, text: str) -> None:
    target = judged(tmp_path, "suffix")
    with pytest.raises(RequestError, match=text) as refused:
        target.submit(gated("r", CONTEXT, gate))
    assert refused.value.field == "gate"
    assert not target.has_work()


def test_lengths_are_those_of_what_may_come(tmp_path: Path) -> None:
    folder = make_branch(tmp_path)
    target = Engine(
        BranchExecutor(max_context=64),
        SchedulerConfig(),
        CacheConfig(),
        branches=BranchOptions(load=(("suffix", folder),)),
    )
    target.submit(gated("fits", CONTEXT[:59], by_branch(), None))
    drain(target)
    for prompt, gate in (
        (CONTEXT[:60], by_branch()),  # its question
        (CONTEXT[:30], by_labels(headers=(tuple(range(34)), None))),
    ):
        with pytest.raises(RequestError) as refused:
            target.submit(gated("r", prompt, gate))
        assert refused.value.code == "context_length_exceeded"
    with pytest.raises(RequestError, match="no branch and no pooling"):
        target.submit(replace(gated("r", CONTEXT[:9], by_branch()), branch="suffix"))


def test_a_branch_that_is_unloaded_decides_for_those_who_have_it(tmp_path: Path) -> None:
    target = judged(tmp_path, "suffix")
    executor = target._executor
    assert isinstance(executor, BranchExecutor)
    target.submit(gated("r", CONTEXT, by_branch(), 20))
    target.unload_branch("suffix")
    assert executor.loaded.total() == 1
    while not target.step():
        pass
    assert executor.loaded.total() == 0  # it writes, and needs no branch for that
    assert len(tokens(drain(target)[("r", 0)])) == 20
