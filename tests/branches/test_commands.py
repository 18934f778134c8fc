"""`lockstep branch`: train, eval and show, and errors of one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from lockstep.branch import BranchError, read_branch
from lockstep.branches.build import Trunk
from lockstep.cli.branch import app
from tests.branches.support import SETTINGS, written
from tests.branches.test_build import ANIMALS, TOOLS

ENGINE = [
    *("--threads", "1", "--max-context", str(SETTINGS["max_context"])),
    *("--cache-mb", str(SETTINGS["cache_bytes"] >> 20)),
]
SHORT = ["--fork", "28", "--exit", "29", "--rank", "2", "--targets", "q_proj", "--epochs", "2"]


def run(*arguments: Any) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, BranchError):
        raise result.exception
    return result


@pytest.fixture
def loaded(trunk: Trunk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training takes the trunk that is there already."""
    monkeypatch.setattr("lockstep.branches.build.Trunk", lambda config, progress: trunk)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(
        tmp_path_factory.mktemp("rows"),
        *(
            {"input": f"I have a {word}.", "label": label, "case": f"{label} alone"}
            for words, label in ((ANIMALS, "animal"), (TOOLS, "tool"))
            for word in words
        ),
    )


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("loaded")
def test_train_eval_show(rows: Path, tmp_path: Path) -> None:
    folder = tmp_path / "judge"
    common = ["--data", rows, "--calibrate", rows, *SHORT, *ENGINE, "--options", "tool,animal"]
    result = run("train", *common, "-o", folder, "--cost", "tool:animal=3", "--no-check")
    assert result.exit_code == 0, result.output
    branch = read_branch(folder)
    assert branch.options == ("tool", "animal")
    assert branch.targets == ("q_proj",)
    assert branch.calibration["aim"]["costs"] == ["tool:animal=3"]
    assert "calibrated on 16 rows" in result.output
    assert (folder / "reliability.png").exists()

    report = tmp_path / "report.json"
    result = run("eval", folder, "--data", rows, *ENGINE, "--json", report)
    assert result.exit_code == 0, result.output
    for text in ("the branch", "the trunk's own head", "always", "animal alone"):
        assert text in result.output
    found = json.loads(report.read_text())
    assert found["branch"]["rows"] == 16
    assert found["branch"]["accuracy"] == branch.calibration["accuracy"]
    assert set(found["cases"]["tool alone"]) == {"rows", "branch", "trunk"}

    shown = run("show", folder)
    assert shown.exit_code == 0
    for text in ("smollm2", "28 to 29, adapters on the suffix", branch.key, "tool, animal"):
        assert text in shown.output


@pytest.mark.usefixtures("loaded")
def test_a_sweep_writes_no_branch(rows: Path, tmp_path: Path) -> None:
    common = ["--data", rows, *SHORT, *ENGINE, "--sweep-exit", "--exits", "2,29"]
    result = run("train", *common)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert [line[:3] for line in lines if line and line[0].isdigit()] == [
        ["1", "2", "7%"],
        ["28", "29", "97%"],
    ]
    assert not list(tmp_path.iterdir())


def test_what_is_wrong_is_said_before_a_model_is_loaded(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("lockstep.branches.build.Trunk", refuse)
    good = ["train", "--data", rows, *SHORT]
    with pytest.raises(BranchError, match="name the branch's folder with --out"):
        run(*good)
    with pytest.raises(BranchError, match="head must be one of options, codes, value, got 'x'"):
        run(*good, "-o", tmp_path / "j", "--head", "x")
    with pytest.raises(BranchError, match="adapt must be one of suffix, context, got 'x'"):
        run(*good, "-o", tmp_path / "j", "--adapt", "x")
    with pytest.raises(BranchError, match="label 'animal' is none of tool, car"):
        run(*good, "-o", tmp_path / "j", "--options", "tool,car")
    with pytest.raises(BranchError, match="rank must be at least 1, got 0"):
        run(*good, "-o", tmp_path / "j", "--rank", "0")
    aims = ["--cost", "tool:animal=2", "--target-precision", "tool=0.9"]
    with pytest.raises(BranchError, match="not for both"):
        run(*good, "-o", tmp_path / "j", *aims)
    with pytest.raises(BranchError, match="exists and is no branch"):
        run(*good, "-o", rows.parent)
    with pytest.raises(BranchError, match=r"branch.json: No such file"):
        run("show", tmp_path / "none")
    with pytest.raises(BranchError, match=r"branch.json: No such file"):
        run("eval", tmp_path / "none", "--data", rows)
