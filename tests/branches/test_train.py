"""Training learns, and the same seed gives the same bits whatever the number of threads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.branch import BranchError
from lockstep.branches.activations import activations
from lockstep.branches.layers import Layers
from lockstep.branches.train import Prepared, Recipe, Trained, fit, outputs, prepare, workers
from tests.branches.support import Small, examples, small, tokens

COUNT = 40
TASK = Recipe(
    1, 3, "options", ("low", "high"), rank=4, epochs=6, batch=8, learning_rate=3e-3, head_rate=1e-2
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return small("llama", tmp_path_factory.mktemp("model"), torch.bfloat16)


@pytest.fixture(scope="module")
def task(world: Small, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Whether the last id of the suffix is in the upper half of the vocabulary."""
    asked = tokens(COUNT)
    rows = activations(world.runner, asked, [1], folder=tmp_path_factory.mktemp("rows"))[1]
    targets = [int(one.suffix[-1] > 65) for one in asked]
    return asked, rows, examples(targets)


def run(world: Small, task: Any, recipe: Recipe, threads: int = 1) -> tuple[Trained, Tensor]:
    asked, rows, labelled = task
    layers = Layers(world.runner.model, recipe.fork, recipe.exit)
    with workers(threads) as pool:
        data: Prepared = prepare(layers, labelled, asked, rows, recipe.adapt, pool)
        trained = fit(layers, data, range(COUNT), recipe, pool)
        found = outputs(layers, data, range(COUNT), trained.parameters, recipe.scale, pool)
    return trained, found


def bits(trained: Trained) -> dict[str, bytes]:
    return {name: t.numpy().tobytes() for name, t in trained.parameters.items()}


@pytest.mark.parametrize("adapt", ["suffix", "context"])
def test_it_learns_and_its_bits_do_not_depend_on_threads(
    world: Small, task: Any, adapt: Any
) -> None:
    recipe = replace(TASK, adapt=adapt)
    threads = torch.get_num_threads()
    first, found = run(world, task, recipe)
    assert torch.get_num_threads() == threads
    targets = torch.tensor([example.target for example in task[2]])
    assert (found.argmax(1) == targets).float().mean() > 0.9
    assert first.losses[-1] < first.losses[0] / 2
    again, _ = run(world, task, recipe, threads=2)
    assert bits(again) == bits(first)
    assert again.losses == first.losses


def test_another_seed_is_another_branch(world: Small, task: Any) -> None:
    short = replace(TASK, epochs=1)
    one, _ = run(world, task, short)
    other, _ = run(world, task, replace(short, seed=1))
    assert bits(one) != bits(other)


def test_only_targets_have_adapters(world: Small, task: Any) -> None:
    trained, _ = run(world, task, replace(TASK, epochs=1, targets=("q_proj", "down_proj")))
    names = {name for name in trained.parameters if "lora" in name}
    assert names == {
        f"layers.{i}.{t}.lora_{x}" for i in (1, 2) for t in ("q_proj", "down_proj") for x in "AB"
    }
    assert all(bool(tensor.any()) for tensor in trained.parameters.values())


def test_a_value_head_fits_numbers(world: Small, task: Any) -> None:
    asked, rows, labelled = task
    numbers = [
        replace(e, target=one.suffix[-1] / 131) for e, one in zip(labelled, asked, strict=True)
    ]
    recipe = replace(TASK, head="value", options=("value",), epochs=10)
    _trained, found = run(world, (asked, rows, numbers), recipe)
    wanted = torch.tensor([example.target for example in numbers])
    assert (found[:, 0] - wanted).square().mean() < wanted.var() / 4


def test_outputs_that_a_question_does_not_allow_have_no_part(world: Small, task: Any) -> None:
    asked, rows, labelled = task
    fixed = [replace(example, outputs=(0, 1)) for example in labelled]
    recipe = replace(TASK, head="codes", options=("A", "B", "C"), epochs=1)
    trained, _ = run(world, (asked, rows, fixed), recipe)
    assert float(trained.parameters["head.bias"][2]) == 0.0
    assert bool(trained.parameters["head.bias"][:2].any())


def test_a_loss_that_explodes_is_an_error(world: Small, task: Any) -> None:
    with pytest.raises(BranchError, match="lower learning_rate, it is 1e"):
        run(world, task, replace(TASK, learning_rate=1e30, head_rate=1e30))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"rank": 0}, "rank must be at least 1"),
        ({"rank": 300}, "rank must be at most 256, got 300"),
        ({"learning_rate": float("nan")}, "learning_rate must be finite"),
        ({"targets": ("q_proj", "lm_head")}, "targets must be some of"),
        ({"targets": ()}, "targets must be some of"),
    ],
)
def test_a_recipe_is_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BranchError, match=message):
        replace(TASK, **changes)


def test_training_leaves_no_files(
    world: Small, task: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    run(world, task, replace(TASK, epochs=1))
    assert not list(tmp_path.iterdir())
