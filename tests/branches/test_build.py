"""From rows to a served branch on SmolLM2: the folder, its record, its decisions, its bits."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep import LLM
from lockstep.branch import TENSORS, BranchError, read_branch
from lockstep.branches import plots
from lockstep.branches.build import Aim, Built, Plan, Trunk, build, default_suffix
from lockstep.branches.data import Dataset, read_rows
from lockstep.branches.evaluate import agreement, check_served, compare
from lockstep.branches.sweep import default_exits, sweep
from lockstep.branches.train import Recipe
from lockstep.config import CacheConfig, SchedulerConfig
from lockstep.decisions import Choice
from lockstep.engine.loop import Engine
from tests.branches.support import SETTINGS, written

ANIMALS = ("cat", "dog", "horse", "cow", "sheep", "goat", "pig", "hen")
TOOLS = ("hammer", "saw", "drill", "wrench", "chisel", "plane", "file", "axe")
PLAN = Plan(
    Recipe(
        26, 28, "options", ("animal", "tool"),
        rank=2, targets=("q_proj", "o_proj"), epochs=8, batch=8, learning_rate=3e-3,
    ),
    suffix="\nAnimal or tool?",
    aim=Aim(precision=("tool=0.9",)),
    share=0.25,
    threads=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def llm(trunk: Trunk) -> LLM:
    """A door on the same loaded model."""
    engine = Engine(
        trunk.runner, SchedulerConfig(), CacheConfig().resolved("cpu"), trunk.runner.info()
    )
    return LLM.from_engine(engine, trunk.tokenizer, progress=False)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    lines = [
        {"input": f"I have {article} {word}.", "label": label, "case": label, "group": pair}
        for pair, words in zip("abcdefgh", zip(ANIMALS, TOOLS, strict=True), strict=True)
        for word, label in zip(words, ("animal", "tool"), strict=True)
        for article in ("a", "an old")
    ]
    return read_rows(written(tmp_path_factory.mktemp("data"), *lines), "options")


@pytest.fixture(scope="module")
def built(
    trunk: Trunk, rows: Dataset, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Built]:
    folder = tmp_path_factory.mktemp("out") / "judge"
    return folder, build(trunk, rows, PLAN, folder)


def test_the_folder_says_what_it_is(built: tuple[Path, Built], trunk: Trunk, rows: Dataset) -> None:
    folder, made = built
    branch = read_branch(folder)
    assert branch == made.branch
    assert branch.base == trunk.runner.info().weights_hash
    assert (branch.fork, branch.exit, branch.options) == (26, 28, ("animal", "tool"))
    assert branch.training["data_sha256"] == rows.digest
    assert branch.training["rows"] + branch.calibration["rows"] == len(rows.examples)
    assert branch.training["seed"] == 0
    assert len(branch.training["losses"]) == 8
    assert branch.calibration["aim"] == {"precision": ["tool=0.9"], "costs": []}
    groups = {example.group for example in made.calibration}
    assert len(made.calibration) == 4 * len(groups), "a group is on one side"


def test_training_twice_gives_the_same_branch(
    built: tuple[Path, Built], trunk: Trunk, rows: Dataset, tmp_path: Path
) -> None:
    folder, made = built
    again = build(trunk, rows, replace(PLAN, threads=2), tmp_path / "again").branch
    assert (tmp_path / "again" / TENSORS).read_bytes() == (folder / TENSORS).read_bytes()
    assert again == made.branch
    other = replace(PLAN, recipe=replace(PLAN.recipe, seed=5))
    assert build(trunk, rows, other, tmp_path / "again").branch.key != made.branch.key


def test_what_is_served_decides_as_training_did(built: tuple[Path, Built]) -> None:
    folder, made = built
    found = asyncio.run(
        check_served("smollm2", SETTINGS, folder, made.branch, made.calibration, made.outputs)
    )
    assert found.rows == len(made.calibration)
    assert found.dtype == "bfloat16"
    assert found.flipped == 0
    assert found.largest < 0.05
    assert found.record()["flipped"] == 0


def test_a_report_and_a_comparison_that_sees_flips(built: tuple[Path, Built], llm: LLM) -> None:
    folder, made = built
    llm.load_branch("judge", folder)
    decisions = [llm.decide(e.given, branch="judge") for e in made.calibration]
    question = Choice("Animal or tool?", list(made.branch.options))
    trunk = [llm.decide(e.given, question) for e in made.calibration]
    turned = made.outputs[:, ::-1]
    assert agreement(made.branch, made.calibration, decisions, turned, "").flipped >= 7
    report = compare(made.branch, made.calibration, decisions, trunk)
    assert report.branch["rows"] == len(made.calibration)
    assert set(report.cases) == {"animal", "tool"}
    for one in report.cases.values():
        assert 0 <= one["branch"] <= 1
        assert "trunk" in one
    assert report.majority["accuracy"] < 1
    assert report.branch["accuracy"] > report.majority["accuracy"]


def test_a_sweep_measures_every_exit(trunk: Trunk, rows: Dataset) -> None:
    plan = replace(PLAN, recipe=replace(PLAN.recipe, epochs=1))
    points = sweep(trunk, rows, plan, [4, 28])
    assert [(point.fork, point.exit) for point in points] == [(2, 4), (26, 28)]
    assert points[0].share == pytest.approx(4 / 30)
    assert all(0 <= point.accuracy <= 1 for point in points)
    with pytest.raises(BranchError, match=r"exit 31: must be in \[2, 30\]"):
        sweep(trunk, rows, plan, [31])


def test_codes_start_from_the_trunks_own_head(trunk: Trunk, llm: LLM, tmp_path: Path) -> None:
    question = {
        "type": "choice",
        "instructions": "What is it?",
        "choices": [{"value": "animal"}, {"value": "tool"}],
    }
    lines = [
        {"input": f"I have a {word}.", "question": question, "label": label}
        for words, label in ((ANIMALS, "animal"), (TOOLS, "tool"))
        for word in words
    ]
    data = read_rows(written(tmp_path, *lines), "codes")
    recipe = replace(PLAN.recipe, head="codes", options=data.options, epochs=1)
    made = build(trunk, data, Plan(recipe, share=0.25, threads=1), tmp_path / "codes")
    assert made.branch.suffix == ("<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
    finite = np.isfinite(made.outputs)
    assert finite.sum(axis=1).tolist() == [2] * len(made.calibration)
    llm.load_branch("codes", tmp_path / "codes")
    asked = [(e.given, [e.question]) for e in made.calibration if e.question is not None]
    decisions = [llm.decide(given, own, branch="codes")[0] for given, own in asked]
    found = agreement(made.branch, made.calibration, decisions, made.outputs, "bfloat16")
    assert found.largest < 0.05


def test_the_default_question(trunk: Trunk) -> None:
    shown = default_suffix(trunk.tokenizer, replace(PLAN, instructions="What is it"))
    assert shown == (
        "<|im_start|>user\nWhat is it: animal or tool?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_what_cannot_be_built(trunk: Trunk, rows: Dataset, tmp_path: Path) -> None:
    def plan(**changes: Any) -> Plan:
        return replace(PLAN, recipe=replace(PLAN.recipe, **changes))

    with pytest.raises(BranchError, match=r"fork 28 and exit 31 must be"):
        build(trunk, rows, plan(fork=28, exit=31), tmp_path / "x")
    with pytest.raises(BranchError, match=r"'hammer=0.9': 'hammer' is none of animal, tool"):
        build(trunk, rows, replace(PLAN, aim=Aim(("hammer=0.9",))), tmp_path / "x")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(BranchError, match="exists and is no branch"):
        build(trunk, rows, PLAN, tmp_path)
    long = written(tmp_path, {"input": "a", "label": "x"}, {"input": "b " * 900, "label": "y"})
    with pytest.raises(BranchError, match=r"rows.jsonl:2: \d+ tokens, the model holds 512"):
        build(trunk, read_rows(long, "options"), PLAN, tmp_path / "x")
    assert {entry.name for entry in tmp_path.iterdir()} == {"notes.txt", "rows.jsonl"}


def test_default_exits() -> None:
    assert default_exits(30, 4) == [4, 8, 13, 17, 21, 26, 30]
    assert default_exits(3, 2) == [2, 3]
    assert default_exits(3, 3) == [3]


def test_plots(built: tuple[Path, Built], tmp_path: Path) -> None:
    _, made = built
    bins = json.loads(json.dumps(made.branch.calibration["reliability"]))
    assert plots.reliability({"branch": bins}, tmp_path / "r.png")
    assert (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"
