"""Rows that stop on their way through the trunk and go on later: no bit tells that they did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lockstep.kernels.cpu import make_backend
from lockstep.model import load_model
from lockstep.runner.groups import activations_of, own_groups
from lockstep.runner.plan import Plan, RunResult, SampleSpec, TokenRun
from lockstep.runner.probe import Pages, Probe
from lockstep.runner.runner import Runner
from lockstep.weights import open_checkpoint
from tests.control import RowSplitBackend
from tests.model.branches import describe
from tests.runner.branching import Decision, join, scores_of
from tests.runner.test_branches import (
    CONTEXT,
    DTYPES,
    GREEDY,
    OTHERS,
    SUFFIX,
    World,
    crowd,
    decide,
    ends_of,
    pages_of,
    wipe,
    world,
    writer,
)

STOPS = (1, 2)  # of every small world
# Rows a step below and above the stop; 0 for all.
CHUNKS = ((0, 0), (17, 30), (25, 7), (1, 0))


@pytest.fixture(
    scope="module",
    params=[(name, dtype) for name in ("llama", "gemma3") for dtype in DTYPES],
    ids=lambda value: f"{value[0]}-{value[1]}",
)
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    name, dtype = request.param
    return world(name, tmp_path_factory.mktemp(name), dtype)


def part(probe: Probe, pages: Pages, start: int, end: int, layers: tuple[int, int]) -> TokenRun:
    """Rows of the context through some layers, with the pages that these write and no others,
    and those of the activations where the rows stop or go on."""
    begin, stop = layers
    groups = probe.runner.groups
    wanted = {
        index
        for index, group in enumerate(own_groups(groups))
        if any(begin <= layer < stop for layer in group.layers)
    } | {activations_of(groups, layer) for layer in layers}
    tables = tuple(table if index in wanted else [] for index, table in enumerate(pages))
    last = stop == probe.runner.num_layers
    return TokenRun(
        0, start, CONTEXT[start:end], tables, layers,
        logits=end - start if last else 0, keeps=not last, kept=begin > 0,
    )  # fmt: skip


def through(
    probe: Probe,
    pages: Pages,
    bounds: Sequence[int],
    chunks: Sequence[int],
    company: Sequence[tuple[TokenRun, ...]] = (),
) -> Tensor:
    """Logits [61, V] of the context, which stops at all bounds but the first and the last, and
    goes on in other steps, each beside the company."""
    half = len(company) // 2
    rows = []
    for layers, chunk in zip(pairwise(bounds), chunks, strict=True):
        size = chunk or len(CONTEXT)
        for start in range(0, len(CONTEXT), size):
            run = part(probe, pages, start, min(start + size, len(CONTEXT)), layers)
            runs = join(*company[:half], (run,), *company[half:])
            rows.append(probe.runner.logits(Plan(0, runs))[sum(map(len, company[:half]))])
    return torch.cat([logits for logits in rows if len(logits)])


def fresh(probe: Probe) -> Pages:
    """Pages without anything on them."""
    pages = probe.pages(len(CONTEXT))
    wipe(probe.runner, [probe.run(CONTEXT, 0, pages)])
    return pages


def written(probe: Probe, pages: Pages) -> list[Tensor]:
    """Keys and values of the trunk, as they lie."""
    own = len(own_groups(probe.runner.groups))
    tables = tuple(table if g < own else [] for g, table in enumerate(pages))
    return [page.clone() for page in pages_of(probe.runner, probe.run(CONTEXT, 0, tables))]


def at_once(probe: Probe) -> tuple[Tensor, list[Tensor]]:
    """What rows give, and leave behind, that go through all layers in one step."""
    pages = fresh(probe)
    return probe.score(CONTEXT, pages=pages), written(probe, pages)


def same(probe: Probe, pages: Pages, expected: list[Tensor]) -> bool:
    return all(map(torch.equal, written(probe, pages), expected))


def test_groups_are_cut_at_every_stop(small: World) -> None:
    groups = small.probe.runner.groups
    layers = [layer for group in own_groups(groups) for layer in group.layers]
    assert sorted(layers) == list(range(small.probe.runner.num_layers))
    for group in own_groups(groups):
        assert not any(group.layers[0] < stop <= group.layers[-1] for stop in STOPS)
    assert all(activations_of(groups, stop) is not None for stop in STOPS)


@pytest.mark.parametrize("crowded", [False, True], ids=["alone", "in company"])
def test_rows_that_stop_and_go_on_have_the_bits_of_those_that_do_not(
    small: World, crowded: bool
) -> None:
    probe = small.probe
    probe.reset()
    logits, cells = at_once(probe)
    company = crowd(small) if crowded else []
    for stop in STOPS:
        for chunks in CHUNKS[1:3] if crowded else CHUNKS:
            pages = fresh(probe)
            bounds = (0, stop, probe.runner.num_layers)
            found = through(probe, pages, bounds, chunks, company)
            assert torch.equal(found, logits), (stop, chunks)
            assert same(probe, pages, cells), (stop, chunks)


def test_rows_that_stop_twice(small: World) -> None:
    probe = small.probe
    probe.reset()
    logits, cells = at_once(probe)
    pages = fresh(probe)
    bounds = (0, *STOPS, probe.runner.num_layers)
    assert torch.equal(through(probe, pages, bounds, (20, 33, 9)), logits)
    assert same(probe, pages, cells)


def test_rows_stop_and_go_on_in_one_step(small: World) -> None:
    """The rest reads what its lower part stores in the very same step, beside rows that stop
    where others go on, and behind a layer that nobody enters."""
    probe = small.probe
    probe.reset()
    logits, cells = at_once(probe)
    pages, end = fresh(probe), probe.runner.num_layers
    below, above = (part(probe, pages, 0, len(CONTEXT), layers) for layers in ((0, 2), (2, end)))
    found = probe.runner.logits(Plan(0, (above, below)))[0]
    assert torch.equal(found, logits)
    assert same(probe, pages, cells)
    stranger = replace(probe.run(OTHERS[3], 0, probe.pages(len(OTHERS[3]))), layers=(0, 1))
    (expected,) = probe.step(stranger)
    (left, again) = probe.step(stranger, above)
    assert torch.equal(left, expected)
    assert torch.equal(again, logits)


def test_the_rest_of_a_prompt_may_draw(small: World) -> None:
    """Token and logprobs of a run that goes on are those of one that came from the embedding."""
    probe = small.probe
    probe.reset()
    whole = writer(probe, CONTEXT)
    spec = SampleSpec(replace(GREEDY, logprobs=3), 1, 0, 0, CONTEXT, len(CONTEXT))
    expected: list[RunResult] = list(probe.runner.execute(Plan(0, (whole,))).runs)
    pages, end = fresh(probe), probe.runner.num_layers
    below = part(probe, pages, 0, len(CONTEXT), (0, 2))
    above = part(probe, pages, 0, len(CONTEXT), (2, end))
    assert probe.runner.execute(Plan(0, (below,))).runs == (RunResult(),)
    rest = replace(above, logits=1, sample=spec)
    assert list(probe.runner.execute(Plan(1, (rest,))).runs) == expected
    launched = probe.runner.launch(Plan(1, (replace(rest, sample=replace(spec, params=GREEDY)),)))
    assert launched.result().runs[0].token == expected[0].token


@pytest.mark.parametrize("label", ["context", "short context", "short"])
def test_a_decision_whose_context_stops_and_the_rest_of_it(small: World, label: str) -> None:
    """The rows are stored where they leave the trunk, also where the branch's rows double
    there, and also where its suffix goes on; later the upper layers are made from them."""
    probe, branch = small.probe, small.branches[label]
    probe.reset()
    logits, _ = at_once(probe)
    cold = decide(small, label)
    decision = Decision(
        probe, branch, CONTEXT, SUFFIX, chunk=20, together=True, keep=True, depth=branch.stop
    )
    company = crowd(small)
    alone = [probe.runner.execute(Plan(0, runs)).runs for runs in company]
    assert scores_of(probe, decision, company) == cold
    pages = tuple(table[: -(-len(CONTEXT) // probe.runner.page_tokens)] for table in decision.pages)
    above = part(probe, pages, 0, len(CONTEXT), (branch.stop, probe.runner.num_layers))
    parts = [(above,), *company]
    found = probe.runner.execute(Plan(0, join(*parts))).runs
    for end, own in zip(ends_of(parts)[1:], alone, strict=True):
        assert found[end] == own[-1]  # nobody beside it is moved
    assert torch.equal(probe.step(above)[0], logits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_that_follow_the_batch_fail_the_same_test(tmp_path: Path, dtype: torch.dtype) -> None:
    """The control."""
    place = world("llama", tmp_path, dtype, RowSplitBackend())
    probe = place.probe
    logits, _ = at_once(probe)
    pages = fresh(probe)
    bounds = (0, 2, probe.runner.num_layers)
    assert not torch.equal(through(probe, pages, bounds, (17, 30)), logits)


def test_rows_of_another_stop_are_others(small: World) -> None:
    """The comparison can fail: rows that were stored a layer lower are not taken for these."""
    probe = small.probe
    probe.reset()
    logits, _ = at_once(probe)
    pages, end = fresh(probe), probe.runner.num_layers
    low, high = (activations_of(probe.runner.groups, stop) for stop in STOPS)
    assert low is not None
    assert high is not None
    for layers in ((0, 1), (0, 2)):
        probe.step(part(probe, pages, 0, len(CONTEXT), layers))
    swapped = list(pages)
    swapped[low], swapped[high] = pages[high], pages[low]
    assert not torch.equal(through(probe, tuple(swapped), (2, end), (0,)), logits)
    assert torch.equal(through(probe, pages, (2, end), (0,)), logits)


def test_smollm2_stops_where_its_packaged_branch_does() -> None:
    backend = make_backend("native", 1)
    model = load_model(open_checkpoint("smollm2"), backend, torch.bfloat16, max_context=512)
    branches = [describe(fork=22, exit=26)]
    probe = Probe(Runner(model, backend, memory_bytes=96 << 20, branches=branches))
    assert [group.name for group in probe.runner.groups] == ["full:0-26", "full:26-30", "rows:26"]
    logits, cells = at_once(probe)
    pages = fresh(probe)
    assert torch.equal(through(probe, pages, (0, 26, 30), (25, 40)), logits)
    assert same(probe, pages, cells)
