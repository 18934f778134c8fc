"""The self-test's points of trained branches hold, each planted fault fails its own, and where
the control is not caught the whole fails."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lockstep.branch import BranchError
from lockstep.cli.main import app
from lockstep.config import ModelOptions
from lockstep.engine.gates import GatedRequest
from lockstep.kernels.cpu import make_backend
from lockstep.kernels.cpu.native import NativeBackend
from lockstep.model import load_model
from lockstep.runner.runner import Runner
from lockstep.types import Request
from lockstep.verify.branch_points import branch_points
from lockstep.verify.ledger import check, past_runs
from lockstep.verify.schedules import World, alone, probes
from lockstep.verify.selftest import plan_hash
from lockstep.weights import open_checkpoint
from tests.model.branches import package

pytestmark = pytest.mark.timeout(400)  # each test runs a dozen schedules

BRANCHES: dict[str, dict[str, Any]] = {
    "judge": {"fork": 1, "exit": 3},
    "deep": {"fork": 0, "exit": 2, "adapt": "context"},
    "value": {"fork": 0, "exit": 1, "head": "value", "options": ("value",)},
}
POINTS = [
    "the same again, alone",
    "in a crowd",
    "on cached prefixes",
    "in chunks of at most 7 tokens",
    "contexts that leave at the exit",
    "decisions beside answers",
    "answers beside decisions",
    "a gate is its decision and its answer",
    "control: sums that follow the batch are caught",
]


@pytest.fixture(scope="module")
def folders(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    checkpoint = open_checkpoint(model)
    loaded = load_model(checkpoint, make_backend("native", 1), torch.float32)
    root = tmp_path_factory.mktemp("branches")
    for seed, (name, described) in enumerate(BRANCHES.items()):
        package(loaded, root / name, seed, base=checkpoint.weights_hash(), **described)
    return {name: str(root / name) for name in BRANCHES}


@pytest.fixture(scope="module")
def world(model: str, folders: dict[str, str]) -> World:
    return World(ModelOptions(model, threads=1, dtype="float32"), folders)


def examined(world: World) -> dict[str, bool | None]:
    asked = [request for request in probes(world.info.vocab_size) if request.id != "long"]
    found = list(branch_points(world, alone(world, asked), asked))
    assert len({one.point for one in found}) == len(found)
    return {one.point: one.passed for one in found}


def test_every_point_of_every_branch_holds(world: World) -> None:
    expected: dict[str, bool | None] = {
        f"branch {name}: {point}": True for name in BRANCHES for point in POINTS
    }
    expected["branch value: a gate is its decision and its answer"] = None
    expected["branch deep: on cached prefixes"] = None  # all of its rows are its own
    assert examined(world) == expected


def only(world: World, name: str) -> World:
    """The same world with one branch."""
    found = object.__new__(World)
    found.__dict__.update(world.__dict__, branches={name: world.branches[name]})
    return found


def failed(found: dict[str, bool | None], name: str) -> set[str]:
    return {point.removeprefix(f"branch {name}: ") for point, passed in found.items() if not passed}


def test_adapters_that_follow_the_batch_are_caught(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product with adapters takes another tree where many rows share it; the trunk's rows of
    the same step are as they were."""
    whole = NativeBackend.adapted_linear

    def by_rows(self: Any, x: Any, weight: Any, lora: Any, *rest: Any, **more: Any) -> Any:
        out = whole(self, x, weight, lora, *rest, **more)
        if x.shape[0] > 12:  # more than any question has
            out[lora.index >= 0] *= 1 + 2**-12
        return out

    monkeypatch.setattr(NativeBackend, "adapted_linear", by_rows)
    found = failed(examined(only(world, "judge")), "judge")
    assert {"in a crowd", "decisions beside answers"} <= found
    assert not {"the same again, alone", "answers beside decisions"} & found


def test_a_decision_that_touches_an_answer_is_caught(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with branch rows in it draws other tokens, as if an intermediate value were read."""
    whole = Runner.execute

    def touched(self: Runner, plan: Any) -> Any:
        mixed = any(run.branch for run in plan.runs)
        backend: Any = self.backend
        if mixed:
            logits = backend.logits
            backend.logits = lambda x, weight: logits(x, weight) * (1 + 2**-10)
        try:
            return whole(self, plan)
        finally:
            if mixed:
                del backend.logits

    monkeypatch.setattr(Runner, "execute", touched)
    found = failed(examined(only(world, "deep")), "deep")
    assert "answers beside decisions" in found
    assert "the same again, alone" not in found


def test_a_gate_that_writes_something_else_is_caught(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = GatedRequest.writer

    def other(self: GatedRequest, option: int) -> Request | None:
        found = whole(self, option)
        return found and replace(found, prompt=(*found.prompt[:-1], 1 + found.prompt[-1] % 100))

    monkeypatch.setattr(GatedRequest, "writer", other)
    assert failed(examined(only(world, "judge")), "judge") == {
        "a gate is its decision and its answer"
    }


def test_a_control_that_is_not_caught_fails(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "sums_that_follow_the_batch", lambda self: nullcontext())
    assert failed(examined(only(world, "judge")), "judge") == {
        "control: sums that follow the batch are caught"
    }


def test_the_command_examines_the_branches_that_are_named(
    model: str, folders: dict[str, str], tmp_path: Path
) -> None:
    ledger, page = tmp_path / "ledger.jsonl", tmp_path / "report.md"
    words = ["verify", "self", model, "--threads", "1", "--ledger", str(ledger)]
    named = ["--branch", f"judge={folders['judge']}", "--report", str(page)]
    done = CliRunner().invoke(app, [*words, *named])
    assert done.exit_code == 0, done.output
    assert "branch judge: answers beside decisions" in page.read_text()
    assert "name them with --branch" not in page.read_text()
    (past,) = past_runs(check(ledger).records)
    assert past.figures["branch judge: in a crowd"][0] is True
    options = ModelOptions(model, threads=1)
    assert past.rule == plan_hash(options, {"judge": folders["judge"]}) != plan_hash(options)
    missing = CliRunner().invoke(app, [*words, "--branch", f"judge={tmp_path}/none"])
    assert isinstance(missing.exception, BranchError)
