"""`Runner.execute`: what it answers, in which order, and at what cost."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lockstep.runner.plan import Plan, RunResult, SampleSpec, TokenRun
from lockstep.runner.probe import Probe
from lockstep.types import SamplingParams
from tests.model.tiny import build_oracle, probe_of, save

TOKENS = [(17 * i + 3) % 131 for i in range(60)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=None)


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Probe:
    return probe_of(save(build_oracle("llama"), tmp_path_factory.mktemp("llama")))


def sampled(run: TokenRun, params: SamplingParams = GREEDY, sequence: int = 0) -> TokenRun:
    spec = SampleSpec(params, 1, 0, 0, list(run.tokens), len(run.tokens))
    return replace(run, sequence=sequence, sample=spec, logits=max(run.logits, 1))


def test_only_what_was_asked_for_comes_back(probe: Probe) -> None:
    probe.reset()
    quiet = probe.run(TOKENS[:9], 0, probe.pages(9), logits=0)
    asked = sampled(probe.run(TOKENS, 0, probe.pages(60), logits=1))
    assert probe.runner.execute(Plan(3, (quiet,))).runs == (RunResult(),)
    result = probe.runner.execute(Plan(4, (quiet, asked)))
    assert result.step == 4
    assert result.runs[0] == RunResult()
    expected = int(probe.score(TOKENS)[-1].argmax())
    assert result.runs[1] == RunResult(token=expected)
    assert probe.runner.execute(Plan(5, ())).runs == ()


@pytest.mark.parametrize("chunk_rows", [3, 1000])
def test_prompt_logprobs_in_any_chunks(
    probe: Probe, chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A18: the same values whatever the cut of the head's rows."""
    probe.reset()
    monkeypatch.setattr(probe.runner._reporter, "chunk_rows", chunk_rows)
    params = replace(GREEDY, prompt_logprobs=2, logprob_token_ids=(4,), logprobs=1)
    run = probe.run(TOKENS, 0, probe.pages(60), logits=60)
    targets = (*TOKENS[1:20], -1, *TOKENS[21:], -1)
    run = replace(sampled(run, params), prompt_targets=targets, prompt_params=params)
    result = probe.runner.execute(Plan(1, (run,))).runs[0]
    reference = probe.score(TOKENS).double().log_softmax(1)
    wanted = [(row, target) for row, target in enumerate(targets) if target >= 0]
    assert len(result.prompt_logprobs) == len(wanted) == 58
    for (row, target), score in zip(wanted, result.prompt_logprobs, strict=True):
        assert score.token == target
        assert score.logprob == pytest.approx(float(reference[row, target]), abs=1e-5)
        assert len(score.top) == 2
        assert score.given[0] == pytest.approx(float(reference[row, 4]), abs=1e-5)
    assert result.logprob is not None
    assert result.logprob.top[0][0] == result.token


def test_a_run_that_is_not_finite_says_so_and_spares_the_others(probe: Probe) -> None:
    probe.reset()
    good = sampled(probe.run(TOKENS, 0, probe.pages(60), logits=1))
    expected = probe.runner.execute(Plan(1, (good,))).runs[0]
    bad_pages = probe.pages(60)
    probe.score(TOKENS[:32], pages=bad_pages)
    for layer in probe.runner._pass.kv:
        layer.v[bad_pages[0][0]] = float("nan")
    bad = sampled(probe.run(TOKENS[32:], 32, bad_pages, logits=1), sequence=1)
    found = probe.runner.execute(Plan(2, (bad, good))).runs
    assert "not finite" in found[0].error
    assert found[1] == expected


def test_assembling_a_step_of_64_rows_takes_under_a_millisecond(probe: Probe) -> None:
    probe.reset()
    runs = tuple(sampled(probe.run([5], 200, ([7] * 20,), logits=1), sequence=i) for i in range(64))
    best = 1.0
    for _ in range(30):
        begin = time.perf_counter()
        batch = probe.runner._builder.build(Plan(1, runs))
        best = min(best, time.perf_counter() - begin)
    assert batch.segments[0].lanes[0].gather is None
    assert batch.segments[0].lanes[0].exits is None
    assert best < 1e-3, f"{best * 1e3:.2f} ms"


def test_a_step_with_every_row_in_every_layer_copies_no_rows(probe: Probe, tmp_path: Path) -> None:
    probe.reset()
    runs = tuple(probe.run([i], 0, probe.pages(1)) for i in range(5))
    batch = probe.runner._builder.build(Plan(1, runs))
    assert len(batch.segments) == 1
    assert batch.segments[0].lanes[0].positions.dtype == torch.int32
