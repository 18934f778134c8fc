"""What the demo prints about a comparison is what it compared."""

from __future__ import annotations

import importlib.util
import io
import sys
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("lockstep_demo", DEMO)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_the_demo_counts_the_logprobs_it_compared(demo: ModuleType) -> None:
    """The token that ends an answer without text has no logprob in the reply."""
    answers = [
        demo.Answer("q", tokens=[1, 2, 3], logprobs=[-0.5, -0.25], fingerprint="f")
        for _ in range(2)
    ]
    console = Console(file=io.StringIO(), width=200)
    assert demo.compare(console, answers, answers)
    assert isinstance(console.file, io.StringIO)
    assert "6 token ids, 4 logprobs" in console.file.getvalue()
    other = demo.Answer("q", tokens=[1, 2, 3], logprobs=[-0.5, -0.26], fingerprint="f")
    assert not demo.compare(console, answers, [answers[0], other])


def test_the_demo_shows_judge_and_answer(demo: ModuleType) -> None:
    """What was read, every option's probability, and what was written or that nothing was."""
    decision = {"option": "answer", "probabilities": {"answer": 0.75, "search": 0.25}}
    one = demo.Answer("How high?", text="41\n metres", tokens=[1], decision=decision)
    other = demo.Answer("How high?", text="42", tokens=[2])
    for meant, plain, said in (
        ("answer", one, ["answer 0.75 (search 0.25)", "41 metres [the same bits without"]),
        ("answer", other, ["[OTHER BITS without the judge]"]),
        ("search", None, ["(search 0.25); it should be search", "nothing is written"]),
    ):
        console = Console(file=io.StringIO(), width=110)
        console.print(demo.shown(meant, "1. It is 41 metres high.", one, plain))
        assert isinstance(console.file, io.StringIO)
        text = " ".join(console.file.getvalue().split())
        for part in ("1. It is 41 metres high.", "question How high?", *said):
            assert part in text, text
