"""Rows that nobody reads end in the last layer, and no bit of the others tells."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.runner.batch import StepBatch
from lockstep.runner.plan import Plan, RunResult, SampleSpec, TokenRun
from lockstep.runner.probe import Probe
from lockstep.types import SamplingParams
from lockstep.weights import Checkpoint
from tests.model.tiny import TINY, build_oracle, probe_of, save

TOKENS = [(11 * i * i + 5 * i + 2) % 131 for i in range(90)]
STRANGERS = [[(13 * i + 7 * s) % 131 for i in range(9 + 12 * s)] for s in range(4)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=None)
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", params=sorted(TINY))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return save(build_oracle(request.param), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=["llama", "gemma3-scaled"])
def probe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Probe:
    folder = tmp_path_factory.mktemp(request.param)
    return probe_of(save(build_oracle(request.param), folder), torch.bfloat16)


def built(probe: Probe, *runs: TokenRun) -> StepBatch:
    return probe.runner._builder.build(Plan(1, runs))


def fresh(probe: Probe, tokens: list[int], logits: int) -> TokenRun:
    return probe.run(tokens, 0, probe.pages(len(tokens)), logits=logits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_read_keep_their_bits(family: Checkpoint, dtype: torch.dtype) -> None:
    probe = probe_of(family, dtype)
    every = probe.score(TOKENS)
    for logits in (1, 3, 89):
        probe.reset()
        (found,) = probe.step(fresh(probe, TOKENS, logits))
        assert torch.equal(found, every[-logits:])
    for place in (0, 2, 4):
        probe.reset()
        company = [fresh(probe, stranger, i % 3) for i, stranger in enumerate(STRANGERS)]
        runs = [*company[:place], fresh(probe, TOKENS, 2), *company[place:]]
        onward = built(probe, *runs).segments[0].lanes[0].onward
        assert onward is not None
        assert onward.rows.shape[0] == sum(run.logits for run in runs)
        assert torch.equal(probe.step(*runs)[place], every[-2:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_end_leave_their_keys_and_values(family: Checkpoint, dtype: torch.dtype) -> None:
    """What was computed without one row of logits serves the rows behind it."""
    probe = probe_of(family, dtype)
    every = probe.score(TOKENS)
    probe.reset()
    pages = probe.pages(len(TOKENS))
    for begin, end in ((0, 33), (33, 40), (40, 75)):
        assert probe.step(probe.run(TOKENS[begin:end], begin, pages, logits=0))[0].shape[0] == 0
    rest = probe.score(TOKENS, start=75, pages=pages, chunk=4)
    assert torch.equal(rest, every[75:])


def test_the_last_layer_computes_what_is_read(
    probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe.reset()
    rows: list[int] = []
    gated = probe.runner.backend.gated_linear

    def counted(x: torch.Tensor, *rest: object) -> torch.Tensor:
        rows.append(x.shape[0])
        return gated(x, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(probe.runner.backend, "gated_linear", counted)
    before = probe.runner.num_layers - 1
    probe.step(fresh(probe, TOKENS, 1), fresh(probe, STRANGERS[3], 0), fresh(probe, [5], 1))
    assert rows == [90 + 45 + 1] * before + [2]
    rows.clear()
    probe.step(fresh(probe, TOKENS, 0))
    assert rows == [90] * before + [1]  # no kernel takes a launch without rows


def test_steps_of_which_every_row_is_read_stay_whole(probe: Probe) -> None:
    """Decode steps, and so the captured ones: nothing is selected or copied."""
    probe.reset()
    decode = built(probe, *(fresh(probe, [i], 1) for i in range(6)))
    scored = built(probe, fresh(probe, TOKENS, 90), fresh(probe, [1], 1))
    for batch in (decode, scored):
        ((segment,),) = [s.lanes for s in batch.segments]
        assert segment.onward is None
        assert segment.exits is None
    mixed = built(probe, fresh(probe, TOKENS, 1), fresh(probe, [1], 1)).segments[0].lanes[0]
    assert mixed.exits is None  # the rows that leave are those that need logits


def test_a_step_of_all_kinds_reports_what_each_does_alone(probe: Probe) -> None:
    """Draws, prompt logprobs and both kinds of pooled rows in one step."""
    probe.reset()
    asked = replace(GREEDY, prompt_logprobs=2, logprobs=1)
    spec = SampleSpec(GREEDY, 1, 0, 0, TOKENS, len(TOKENS))

    def runs() -> list[TokenRun]:
        scored = fresh(probe, TOKENS[:50], 20)
        return [
            replace(fresh(probe, TOKENS, 1), sample=spec),
            replace(
                scored,
                prompt_targets=(*TOKENS[31:50], -1),
                prompt_params=asked,
                sample=replace(spec, params=asked),
            ),
            replace(fresh(probe, STRANGERS[2], len(STRANGERS[2])), pooling="mean"),
            replace(fresh(probe, STRANGERS[3], 1), pooling="last"),
            fresh(probe, STRANGERS[1], 0),
        ]

    def outcome(*chosen: TokenRun) -> tuple[RunResult, ...]:
        probe.reset()
        return probe.runner.execute(Plan(1, chosen)).runs

    apart = [outcome(run)[0] for run in runs()]
    assert outcome(*runs()) == tuple(apart)
    assert outcome(*reversed(runs())) == tuple(reversed(apart))
    assert len(apart[1].prompt_logprobs) == 19
    assert apart[2].pooled
    assert apart[3].pooled
    # A mean over a part of the rows is another one: no row of it may be left out.
    short = replace(fresh(probe, STRANGERS[2], len(STRANGERS[2]) - 1), pooling="mean")
    assert outcome(short)[0].pooled != apart[2].pooled


@st.composite
def row_sets(draw: st.DrawFn) -> list[tuple[int, tuple[int, int], int | None, int]]:
    """Up to seven runs: (length, layers, source, logits); copies stand behind their source."""
    found: list[tuple[int, tuple[int, int], int | None, int]] = []
    for _ in range(draw(st.integers(1, 4))):
        length = draw(st.sampled_from([1, 2, 5, 17, 40]))
        end = draw(st.integers(1, 3))
        source = len(found)
        found.append((length, (0, end), None, draw(st.integers(0, length))))
        for _ in range(draw(st.integers(0, 2))):
            first = draw(st.integers(1, end))
            if first < 3:
                layers = (first, draw(st.integers(first + 1, 3)))
                found.append((length, layers, source, draw(st.integers(0, length))))
    return found[:7]


@given(row_sets())
@settings(max_examples=60, deadline=None)
def test_rows_that_leave_and_double_anywhere(
    probe: Probe, shapes: list[tuple[int, tuple[int, int], int | None, int]]
) -> None:
    """Each run's logits are the last rows of what it gives alone with all of its rows read.

    The model of llama's kind has three layers, the other four: all of that one's runs end early.
    """
    probe.reset()
    runs: list[TokenRun] = []
    for number, (length, layers, source, logits) in enumerate(shapes):
        tokens = TOKENS[number : number + length] if source is None else list(runs[source].tokens)
        runs.append(replace(fresh(probe, tokens, logits), layers=layers, source=source))
    found = probe.step(*runs)
    for run, rows in zip(runs, found, strict=True):
        # A copy that enters at `first` has passed through the layers below in its source.
        whole = replace(run, layers=(0, run.layers[1]), source=None, logits=len(run.tokens))
        (every,) = probe.step(replace(whole, pages=probe.pages(len(run.tokens))))
        assert torch.equal(rows, every[len(every) - run.logits :])
