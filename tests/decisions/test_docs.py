"""The examples of docs/decisions.md run as they stand."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.async_llm import AsyncLLM
from tests.server.support import ServerThread

PAGE = Path(__file__).resolve().parents[2] / "docs/decisions.md"
BLOCKS = re.findall(r"^```(\w+)( server)?\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ServerThread(lambda: AsyncLLM("smollm2", max_context=1024)) as server:
        yield server.url


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


def test_the_clients(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [code for _, server, code in BLOCKS if server]
    assert len(blocks) == 2
    for code in blocks:
        exec(code.replace("http://127.0.0.1:8000", url), {})
    assert "'angry'" in capsys.readouterr().out


@pytest.mark.skipif(sys.platform == "win32", reason="a shell's quotes")
def test_the_commands(url: str) -> None:
    for kind, _, code in BLOCKS:
        if kind == "sh":
            command = shlex.split(code.replace("http://127.0.0.1:8000", url))
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
            assert '"probability"' in done.stdout
