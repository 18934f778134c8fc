"""Branches on the GPU: decisions right and steady, the trunk's rows untouched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lockstep.kernels.contract import Backend
from lockstep.runner.plan import Plan
from tests.kernels.support import DTYPES
from tests.model.branches import reference_scores
from tests.runner.branching import Decision, join, scores_of
from tests.runner.test_branches import (
    CONTEXT,
    FAMILIES,
    OTHERS,
    SUFFIX,
    WAYS,
    crowd,
    decide,
    ends_of,
    world,
    writer,
)
from tests.runner.test_stops import STOPS, at_once, fresh, same, through


@pytest.mark.parametrize("name", FAMILIES)
def test_scores_against_transformers(name: str, gpu: Backend, tmp_path: Path) -> None:
    place = world(name, tmp_path, torch.float32, gpu)
    for label, branch in place.branches.items():
        place.probe.reset()
        tensors = place.tensors[label]
        expected = reference_scores(place.oracle, branch, tensors, CONTEXT, SUFFIX)
        assert decide(place, label).scores == pytest.approx(expected.tolist(), rel=2e-3, abs=2e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_company_and_chunks_move_no_bit(
    name: str, dtype: torch.dtype, gpu: Backend, tmp_path: Path
) -> None:
    """Every branch alone, in chunks, in a crowd; the crowd's own rows with and without it."""
    place = world(name, tmp_path, dtype, gpu)
    probe = place.probe
    for label, branch in place.branches.items():
        probe.reset()
        alone = decide(place, label)
        assert alone.scores
        assert not alone.error
        for way in WAYS:
            probe.reset()
            assert decide(place, label, **way) == alone, (label, way)
            probe.reset()
            decision = Decision(probe, branch, CONTEXT, SUFFIX, **way)
            assert scores_of(probe, decision, crowd(place)) == alone, (label, way)
    probe.reset()
    trunk = [writer(probe, tokens, number) for number, tokens in enumerate(OTHERS)]
    expected = probe.runner.execute(Plan(0, tuple(trunk))).runs
    decisions = [
        Decision(probe, branch, CONTEXT, SUFFIX, together=True).steps[0]
        for branch in place.branches.values()
    ]
    parts = [decisions[0], *[(run,) for run in trunk], *decisions[1:]]
    found = probe.runner.execute(Plan(1, join(*parts))).runs
    ends = ends_of(parts)
    assert [found[ends[1 + i]] for i in range(len(trunk))] == list(expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kept_activations_stand_for_the_trunk(
    dtype: torch.dtype, gpu: Backend, tmp_path: Path
) -> None:
    place = world("gemma3", tmp_path, dtype, gpu)
    probe = place.probe
    for label in ("context", "short context"):
        probe.reset()
        cold = decide(place, label)
        pages = probe.pages(len(CONTEXT))
        run = replace(probe.run(CONTEXT, 0, pages, logits=0), keeps=True)
        probe.runner.execute(Plan(0, (run,)))
        assert decide(place, label, kept=pages, chunk=10) == cold


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_rows_that_stop_and_go_on(
    name: str, dtype: torch.dtype, gpu: Backend, tmp_path: Path
) -> None:
    """Keys, values and logits of rows that went through all layers at once, alone and beside
    writers and decisions, which nobody moves either."""
    place = world(name, tmp_path, dtype, gpu)
    probe, end = place.probe, place.probe.runner.num_layers
    logits, cells = at_once(probe)
    company = crowd(place)
    alone = [probe.runner.execute(Plan(0, runs)).runs[-1] for runs in company]
    for bounds in ((0, STOPS[0], end), (0, STOPS[1], end), (0, *STOPS, end)):
        for chunk, others in ((0, []), (25, company)):
            pages = fresh(probe)
            chunks = (chunk, 40, 17)[: len(bounds) - 1]
            assert torch.equal(through(probe, pages, bounds, chunks, others), logits)
            assert same(probe, pages, cells)
    found = probe.runner.execute(Plan(1, join(*company))).runs
    assert [found[at] for at in ends_of(company)] == alone
