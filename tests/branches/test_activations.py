"""The trunk's rows: the engine's own bits, computed once, whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.branch import BranchError
from lockstep.branches.activations import Tokens, activations
from lockstep.runner.plan import Plan, TokenRun
from tests.branches.support import Small, small, tokens


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Small:
    return small(request.param, tmp_path_factory.mktemp("model"), torch.bfloat16)


def alone(world: Small, one: Tokens, fork: int) -> torch.Tensor:
    """The same rows by one run of one sequence."""
    probe = world.probe
    pages = probe.pages(len(one.ids))
    run = TokenRun(0, 0, one.ids, pages, (0, fork), logits=len(one.ids))
    return world.runner.rows(Plan(1, (run,)))[0]


@pytest.mark.parametrize("step_tokens", [16, 512])
def test_rows_are_those_of_one_run_bit_for_bit(
    world: Small, tmp_path: Path, step_tokens: int
) -> None:
    asked = tokens(7)
    found = activations(world.runner, asked, [0, 1, 2, 3], folder=tmp_path, step_tokens=step_tokens)
    for index, one in enumerate(asked):
        ids = torch.tensor(one.ids, dtype=torch.int32)
        assert torch.equal(found[0].of(index), world.runner.model.embed(ids))
        for fork in (1, 2, 3):
            assert torch.equal(found[fork].of(index), alone(world, one, fork))


@pytest.mark.parametrize("step_tokens", [16, 512])
@pytest.mark.parametrize("common", [15, 37])
def test_a_common_beginning_is_computed_once_and_moves_no_bit(
    world: Small, tmp_path: Path, monkeypatch: Any, step_tokens: int, common: int
) -> None:
    system = tuple(range(1, common + 1))
    asked = [Tokens(system + one.context, one.suffix) for one in tokens(7)]
    computed = 0
    compute = world.runner.rows

    def counted(plan: Plan) -> list[torch.Tensor]:
        nonlocal computed
        computed += sum(len(run.tokens) for run in plan.runs if run.layers[0] == 0)
        return compute(plan)

    monkeypatch.setattr(world.runner, "rows", counted)
    found = activations(world.runner, asked, [1, 2], folder=tmp_path, step_tokens=step_tokens)
    monkeypatch.undo()
    for index, one in enumerate(asked):
        for fork in (1, 2):
            assert torch.equal(found[fork].of(index), alone(world, one, fork))
    whole_pages = common - common % world.runner.page_tokens
    assert computed == sum(len(one.ids) for one in asked) - whole_pages * (len(asked) - 1)


def test_rows_are_computed_once(world: Small, tmp_path: Path, monkeypatch: Any) -> None:
    asked = tokens(3)
    seen: list[tuple[int, int]] = []
    first = activations(
        world.runner, asked, [1], folder=tmp_path, progress=lambda done, of: seen.append((done, of))
    )[1]
    total = sum(len(one.ids) for one in asked)
    assert seen[-1] == (total, total)
    kept = first.rows.clone()
    monkeypatch.setattr(world.runner, "rows", None)
    again = activations(world.runner, asked, [1], folder=tmp_path)[1]
    assert torch.equal(again.rows, kept)
    with pytest.raises(TypeError):  # other rows, and another fork, are not there
        activations(world.runner, tokens(3, seed=1), [1], folder=tmp_path)
    with pytest.raises(TypeError):
        activations(world.runner, asked, [2], folder=tmp_path)
    assert {entry.name for entry in tmp_path.iterdir()} == {next(tmp_path.iterdir()).name}, (
        "an interrupted computation leaves nothing behind"
    )


def test_a_file_that_was_cut_is_computed_again(world: Small, tmp_path: Path) -> None:
    asked = tokens(3)
    kept = activations(world.runner, asked, [1], folder=tmp_path)[1].rows.clone()
    (file,) = tmp_path.glob("*/rows.bin")
    file.write_bytes(file.read_bytes()[:100])
    assert torch.equal(activations(world.runner, asked, [1], folder=tmp_path)[1].rows, kept)


def test_old_sets_are_forgotten(world: Small, tmp_path: Path) -> None:
    for seed in range(11):
        activations(world.runner, tokens(1, seed=seed), [1], folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 8


def test_an_example_that_is_too_long(world: Small, tmp_path: Path) -> None:
    asked = [*tokens(1), Tokens(tuple([1] * world.runner.max_context), (2,))]
    with pytest.raises(BranchError, match=r"example 1 has \d+ tokens, the context holds"):
        activations(world.runner, asked, [1], folder=tmp_path)
