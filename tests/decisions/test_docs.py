"""The examples of docs/decisions.md and docs/branches.md in Python run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def blocks(page: str, kind: str) -> list[str]:
    """The page's blocks of a kind: "python" needs nothing but a model, "python server" a server."""
    text = (DOCS / page).read_text("utf-8")
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.M | re.S)


def run(page: str, count: int) -> dict[str, object]:
    """Run the page's blocks in Python; the names that they leave."""
    found = blocks(page, "python")
    assert len(found) == count
    names: dict[str, object] = {}
    for code in found:
        exec(code, names)
    return names


def test_gates(capsys: pytest.CaptureFixture[str]) -> None:
    names = run("branches.md", 1)
    *decided, begun = capsys.readouterr().out.strip().splitlines()
    assert len(decided) >= 2
    assert begun
    names["llm"].close()  # type: ignore[attr-defined]


def test_the_python_door(capsys: pytest.CaptureFixture[str]) -> None:
    names = run("decisions.md", 3)
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 5
    assert 0 < float(shown[0]) < 1
    names["llm"].close()  # type: ignore[attr-defined]
