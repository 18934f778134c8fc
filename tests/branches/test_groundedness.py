"""The example's rows are what the README says of them, and honest: nothing held out is trained on.

And the demo's part that judges tells the truth about bits.
"""

from __future__ import annotations

import importlib.util
import io
import json
import random
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from lockstep.branch import read_branch
from lockstep.branches.data import read_rows
from tests.branches.support import JUDGE, groundedness


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return groundedness()


def made(generator: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    arguments = ["generate.py", "--train", "300", "--held", "200", "--out", str(folder)]
    monkeypatch.setattr(sys, "argv", arguments)
    generator.main()
    return {
        file.stem: [json.loads(line) for line in file.read_text().splitlines()]
        for file in folder.glob("*.jsonl")
    }


def test_rows_are_the_same_again_and_are_read(
    generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = made(generator, tmp_path / "a", monkeypatch)
    assert first == made(generator, tmp_path / "b", monkeypatch)
    assert {name: len(rows) for name, rows in first.items()} == {
        "train": 300, "calibrate": 100, "held": 100,
    }  # fmt: skip
    found = read_rows(tmp_path / "a" / "train.jsonl", "options", ["answer", "search", "refuse"])
    shares = Counter(found.options[int(example.target)] for example in found.examples)
    assert {name: round(count / 3) for name, count in shares.items()} == {
        "answer": 40, "search": 41, "refuse": 19,
    }  # fmt: skip


def test_no_held_out_row_has_a_place_a_person_or_a_wording_of_training(
    generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = made(generator, tmp_path, monkeypatch)
    held = rows["held"] + rows["calibrate"]
    assert not {r["group"] for r in rows["train"]} & {r["group"] for r in held}
    names = {r["group"].split()[0] for r in rows["train"]}
    assert not names & {r["group"].split()[0] for r in held}
    wordings = [fact.questions for fact in generator.FACTS.values()]
    wordings += [fact.statements for fact in generator.FACTS.values()]
    wordings += [text for pair in generator.PRIVATE.values() for text in pair]
    wordings += [generator.UNKNOWABLE, generator.PERSON, generator.CORRECTIONS]
    for one in wordings:
        assert not set(one.of(True)) & set(one.of(False))
        assert one.of(True)


def watch(writer: Any) -> tuple[list[tuple[str, str, str]], list[tuple[str, str]]]:
    """What the writer says from now on, as (place, fact, value), and asks, as (place, fact)."""
    say, ask = writer.say, writer.ask
    drawn: list[tuple[str, str, str]] = []
    asked: list[tuple[str, str]] = []

    def said(place: Any, key: str, value: str = "") -> Any:
        drawn.append((place.name, key, value or place.values[key]))
        return say(place, key, value)

    def question(place: Any, key: str) -> Any:
        asked.append((place.name, key))
        return ask(place, key)

    writer.say, writer.ask = said, question
    return drawn, asked


def test_labels_follow_from_the_documents(generator: ModuleType) -> None:
    """Checked on the values that the generator drew, not on its own word for it."""
    rng = random.Random(3)
    for case in generator.SHARES:
        for _ in range(20):
            names, surnames = generator.invented(rng, 30), generator.invented(rng, 20)
            writer = generator.Writer(rng, False, names, surnames)
            drawn, asked = watch(writer)
            row = writer.row(case)
            if not asked:  # about a person
                assert case.startswith("refuse") or case.endswith("/person")
                continue
            values = {value for name, key, value in drawn if (name, key) == asked[0]}
            known = {"answer/corrected": 2, "search/contradiction": 2}.get(
                case, 1 if row["label"] == "answer" else 0
            )
            assert len(values) == known, row


def test_the_shipped_branch_is_the_readmes(generator: ModuleType) -> None:
    branch = read_branch(JUDGE)
    readme = (JUDGE.parent / "README.md").read_text()
    assert branch.options == ("answer", "search", "refuse")
    assert f"--fork {branch.fork} --exit {branch.exit}" in readme
    assert f"--rank {branch.rank} " in readme
    assert f"--epochs {branch.training['epochs']} " in readme
    assert branch.suffix.replace("\n", "\\n") in readme
    assert sum(file.stat().st_size for file in JUDGE.iterdir()) < 7 << 20


# --- the demo -------------------------------------------------------------------------


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", JUDGE.parents[1] / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


class FakeServer:
    """Opens the gate of every other question; `moves` changes a bit of what is written then."""

    def __init__(self, moves: bool) -> None:
        self.moves = moves

    def stream(self, answer: Any, body: dict[str, Any]) -> None:
        gated = "gate" in body
        if gated:
            answer.decision = {"option": "answer", "probabilities": {"answer": 0.75}}
        if gated and len(answer.question) % 2:
            answer.finish = "gate"
            return
        answer.text, answer.tokens, answer.finish = "Yes.", [5, 6], "stop"
        answer.logprobs = [-0.5, -0.25 if self.moves and gated else -0.125]


@pytest.mark.parametrize("moves", [False, True])
def test_the_demo_compares_answers_with_and_without_the_judge(
    demo: ModuleType, moves: bool
) -> None:
    console = Console(file=io.StringIO(), width=200)
    assert demo.judge_and_answer(FakeServer(moves), console, 8) is not moves
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert ("OTHER BITS" in shown) is moves
    assert ("the same bits" in shown) is not moves
    assert "nothing is written" in shown
    assert "2 of 6 decisions as they should be" in shown
