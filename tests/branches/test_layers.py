"""The layers that are trained through compute what the served ones do."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lockstep.branches.activations import activations
from lockstep.branches.layers import Layers
from lockstep.branches.train import outputs, prepare
from lockstep.weights.branch import write_package
from tests.branches.support import Small, examples, small, tokens
from tests.model.branches import describe, random_tensors, reference_scores
from tests.runner.branching import Decision, scores_of

FAMILIES = ["llama", "llama-tied-bias", "qwen3", "mistral-window", "gemma3"]
# float32 on both sides; sums are taken in other orders, over outputs of up to about 10.
TOLERANCE = 2e-4


@pytest.fixture(scope="module", params=FAMILIES)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Small:
    return small(request.param, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("adapt", ["suffix", "context"])
def test_outputs_are_those_that_are_served(world: Small, adapt: str, tmp_path: Path) -> None:
    runner = world.runner
    branch = describe(adapt=adapt, scale=0.5)
    tensors = random_tensors(runner.model, branch, seed=3)
    written = write_package(branch, tensors, tmp_path / "branch")
    asked = tokens(9)
    rows = activations(runner, asked, [branch.fork], folder=tmp_path)[branch.fork]
    layers = Layers(runner.model, branch.fork, branch.exit)
    with ThreadPoolExecutor(1) as pool:
        data = prepare(layers, examples([0] * 9), asked, rows, branch.adapt, pool)
        found = outputs(layers, data, range(9), tensors, branch.scale, pool)
    runner.load_branch(str(tmp_path / "branch"))
    for one, row in zip(asked, found, strict=True):
        context, suffix = list(one.context), list(one.suffix)
        served = scores_of(world.probe, Decision(world.probe, written, context, suffix)).scores
        assert torch.allclose(row, torch.tensor(served), atol=TOLERANCE, rtol=0)
        expected = reference_scores(world.oracle, branch, tensors, context, suffix)
        assert torch.allclose(row, expected, atol=TOLERANCE, rtol=0)
    runner.unload_branch(written.key)


def test_the_check_sees_an_adapter_that_is_not_there(world: Small, tmp_path: Path) -> None:
    """A comparison that a missing adapter passes would prove nothing."""
    runner = world.runner
    branch = describe(scale=0.5)
    tensors = random_tensors(runner.model, branch, seed=3)
    asked = tokens(4)
    rows = activations(runner, asked, [branch.fork], folder=tmp_path)[branch.fork]
    layers = Layers(runner.model, branch.fork, branch.exit)
    with ThreadPoolExecutor(1) as pool:
        data = prepare(layers, examples([0] * 4), asked, rows, "suffix", pool)
        whole = outputs(layers, data, range(4), tensors, branch.scale, pool)
        for target in branch.targets:
            lacking = {n: t for n, t in tensors.items() if f".{target}." not in n}
            gap = (outputs(layers, data, range(4), lacking, branch.scale, pool) - whole).abs().max()
            assert gap > 10 * TOLERANCE


def test_company_and_order_of_a_batch_are_of_no_account_beyond_rounding(
    world: Small, tmp_path: Path
) -> None:
    runner = world.runner
    branch = replace(describe(), adapt="context")
    tensors = random_tensors(runner.model, branch)
    asked = tokens(6)
    rows = activations(runner, asked, [1], folder=tmp_path)[1]
    layers = Layers(runner.model, 1, 3)
    with ThreadPoolExecutor(1) as pool:
        data = prepare(layers, examples([0] * 6), asked, rows, "context", pool)
        together = outputs(layers, data, range(6), tensors, 1.0, pool)
        alone = [outputs(layers, data, [i], tensors, 1.0, pool) for i in range(6)]
    assert torch.allclose(together, torch.cat(alone), atol=1e-5, rtol=1e-5)


def test_a_bfloat16_models_own_matrices_are_multiplied_as_they_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 where the processor does that, else in float32: the same but for rounding."""
    world = small("llama", tmp_path, torch.bfloat16)
    branch = describe(scale=0.5)
    tensors = {name: t.float() for name, t in random_tensors(world.runner.model, branch).items()}
    asked = tokens(6)
    rows = activations(world.runner, asked, [1], folder=tmp_path)[1]
    found = []
    for able in ({"avx512_bf16": True}, {"avx512_bf16": False}):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda able=able: able)
        layers = Layers(world.runner.model, branch.fork, branch.exit)
        kind = torch.bfloat16 if able["avx512_bf16"] else torch.float32
        assert {w.dtype for layer in layers.layers for w in layer.weights.values()} == {kind}
        with ThreadPoolExecutor(1) as pool:
            data = prepare(layers, examples([0] * 6), asked, rows, "suffix", pool)
            found.append(outputs(layers, data, range(6), tensors, branch.scale, pool))
    gap = (found[0] - found[1]).abs().max()
    assert 0 < gap < 0.03 * found[1].abs().max()
