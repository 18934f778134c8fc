"""Runs that leave early or double half-way, bit by bit against the same runs apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lockstep.runner.plan import Plan, TokenRun
from lockstep.runner.probe import Probe
from lockstep.weights import Checkpoint
from tests.model.tiny import TINY, build_oracle, probe_of, save

FIRST = [(3 * i + 1) % 131 for i in range(21)]
SECOND = [(5 * i + 2) % 131 for i in range(13)]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    name = f"two-layer-{request.param}"
    model_type, changes = TINY[request.param]
    two = {**changes, "num_hidden_layers": 2}
    if "layer_types" in two:
        two["layer_types"] = ["sliding_attention", "full_attention"]
    TINY[name] = (model_type, two)
    try:
        return save(build_oracle(name), tmp_path_factory.mktemp(name))
    finally:
        del TINY[name]


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def probe(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Probe:
    return probe_of(checkpoint, request.param)


def trunk(probe: Probe, tokens: list[int]) -> TokenRun:
    return probe.run(tokens, 0, probe.pages(len(tokens)))


def alone(probe: Probe, run: TokenRun) -> torch.Tensor:
    """The run's logits in a step of its own, on fresh pages."""
    return probe.step(replace(run, pages=probe.pages(len(run.tokens))))[0]


def test_rows_that_leave_early_change_nobody(probe: Probe) -> None:
    early = replace(trunk(probe, FIRST), layers=(0, 1))
    whole = trunk(probe, SECOND)
    expected = [alone(probe, early), alone(probe, whole)]
    for runs in ((early, whole), (whole, early)):
        found = probe.step(*runs)
        for run, logits in zip(runs, found, strict=True):
            assert torch.equal(logits, expected[0 if run is early else 1])
    assert not torch.equal(expected[0], alone(probe, replace(early, layers=(0, 2))))


def test_all_rows_may_leave_early(probe: Probe) -> None:
    early = replace(trunk(probe, FIRST), layers=(0, 1))
    assert torch.equal(probe.step(early, early)[1], alone(probe, early))


def test_doubled_rows_equal_their_source(probe: Probe) -> None:
    whole, other = trunk(probe, FIRST), trunk(probe, SECOND)
    double = replace(whole, pages=probe.pages(len(FIRST)), layers=(1, 2), source=0)
    expected, expected_other = alone(probe, whole), alone(probe, other)
    for runs in ((whole, double, other), (whole, other, double)):
        found = dict(zip(map(id, runs), probe.step(*runs), strict=True))
        assert torch.equal(found[id(whole)], expected)
        assert torch.equal(found[id(double)], expected)
        assert torch.equal(found[id(other)], expected_other)


def test_rows_double_where_their_source_leaves(probe: Probe) -> None:
    early = replace(trunk(probe, FIRST), layers=(0, 1), logits=2)
    double = replace(early, pages=probe.pages(len(FIRST)), layers=(1, 2), source=0, logits=3)
    apart = alone(probe, replace(early, layers=(0, 2), logits=3))
    left, went_on = probe.step(early, double)
    assert torch.equal(went_on, apart)
    assert torch.equal(left, alone(probe, early))


def test_a_doubled_run_decodes_on_its_own_pages(probe: Probe) -> None:
    """The copy's second layer reads only what the copy wrote."""
    whole = trunk(probe, FIRST)
    double = replace(whole, pages=probe.pages(len(FIRST) + 1), layers=(1, 2), source=0)
    probe.step(whole, double)
    more = probe.run(
        [9], len(FIRST), tuple(p + q for p, q in zip(whole.pages, probe.pages(1), strict=True))
    )
    copy = replace(more, pages=double.pages, layers=(1, 2), source=0)
    found = probe.step(more, copy)
    assert torch.equal(found[0], found[1])
    other = probe.step(probe.run([9], len(FIRST), whole.pages), replace(copy, pages=double.pages))
    assert torch.equal(other[1], found[1])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"layers": (0, 3)}, "layers"),
        ({"layers": (1, 2)}, "without a source"),
        ({"layers": (1, 2), "source": 1}, "no rows"),
        ({"layers": (1, 2), "source": 0, "start": 1}, "stands elsewhere"),
        ({"logits": 99}, "logits"),
        ({"pages": ()}, "groups"),
    ],
)
def test_a_senseless_run_is_refused(
    probe: Probe, change: dict[str, object], complaint: str
) -> None:
    good = trunk(probe, FIRST)
    bad = replace(trunk(probe, FIRST), **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=complaint):
        probe.runner.logits(Plan(1, (good, bad)))


def test_a_row_without_a_page_is_refused(probe: Probe) -> None:
    run = trunk(probe, FIRST)
    missing = tuple([-1] * len(pages) for pages in run.pages)
    with pytest.raises(ValueError, match="stands on no page"):
        probe.step(replace(run, pages=missing))
