"""A file answered without a server: rows as a server's, stopped and taken up again."""

from __future__ import annotations

import asyncio
import fcntl
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fastapi import FastAPI

from lockstep.config import ServerConfig
from lockstep.server import create_app
from lockstep.server.batches.local import Summary, answer_file
from lockstep.types import RequestError
from tests.server.support import fake_llm

URL = "/v1/completions"


def write(path: Path, count: int, model: str = "slow", url: str = URL) -> Path:
    rows = [
        {
            "custom_id": f"r{number}",
            "method": "POST",
            "url": url,
            "body": {"model": model, "prompt": f"{number} one two", "max_tokens": 20},
        }
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
async def app() -> AsyncIterator[FastAPI]:
    async with fake_llm("slow") as llm:
        yield create_app(llm, ServerConfig(batch_concurrency=4))


async def answer(app: FastAPI, file: Path, out: Path, endpoint: str = "") -> Summary:
    return await answer_file(app, file, out, endpoint=endpoint, progress=lambda done, total: None)


def texts(out: Path) -> list[str]:
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    return [row["response"]["body"]["choices"][0]["text"] for row in rows if row["response"]]


async def test_stopped_and_taken_up_again(app: FastAPI, tmp_path: Path) -> None:
    file, out = write(tmp_path / "in", 14), tmp_path / "out"
    with file.open("a") as more:
        more.write("bad\n")
    task = asyncio.create_task(answer(app, file, out))
    parts: list[Path] = []
    while not parts or parts[0].read_bytes().count(b"\n") < 5:
        await asyncio.sleep(0.01)
        parts = list(tmp_path.glob("out.*.part"))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not out.exists()
    (part,) = parts
    kept = part.read_bytes().count(b"\n")
    with part.open("ab") as torn:
        torn.write(b'{"line": 1')
    summary = await answer(app, file, out)
    assert summary == Summary(answered=14, failed=1, resumed=kept)
    assert texts(out) == [f"{number} one two" for number in range(14)]
    assert json.loads(out.read_text().splitlines()[-1])["error"]["line"] == 15
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out"}
    with pytest.raises(RequestError, match="exists"):
        await answer(app, file, out)


async def test_a_changed_input_begins_anew(app: FastAPI, tmp_path: Path) -> None:
    out = tmp_path / "out"
    task = asyncio.create_task(answer(app, write(tmp_path / "in", 12), out))
    while not any(part.stat().st_size for part in tmp_path.glob("out.*.part")):
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    summary = await answer(app, write(tmp_path / "in", 3), out)
    assert summary == Summary(answered=3, failed=0, resumed=0)


async def test_what_cannot_be_answered_is_told(app: FastAPI, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    for file, endpoint, message in (
        (empty, "", "has a url"),
        (empty, URL, "no lines"),
        (write(tmp_path / "in", 2), "/v1/chat/completions", "line 1: url must be"),
        (write(tmp_path / "models", 2, url="/v1/models"), "", "endpoint must be one of"),
    ):
        with pytest.raises(RequestError, match=message):
            await answer(app, file, tmp_path / "out", endpoint)
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "in", "models"}


async def test_two_calls_do_not_write_one_file(app: FastAPI, tmp_path: Path) -> None:
    file, out = write(tmp_path / "in", 12), tmp_path / "out"
    task = asyncio.create_task(answer(app, file, out))
    parts: list[Path] = []
    while not parts:
        await asyncio.sleep(0.01)
        parts = list(tmp_path.glob("out.*.part"))
    with parts[0].open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with pytest.raises(RequestError, match="another call"):
        await answer(app, file, out)
    assert (await task).answered == 12
