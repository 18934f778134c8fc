"""The examples of docs/decisions.md in Python run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs/decisions.md"
BLOCKS = re.findall(r"^```(\w+)( server)?\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)


def test_the_python_door(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    blocks = [code for kind, server, code in BLOCKS if kind == "python" and not server]
    assert len(blocks) == 3
    for code in blocks:
        exec(code, names)
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 5
    assert 0 < float(shown[0]) < 1
    names["llm"].close()  # type: ignore[attr-defined]
