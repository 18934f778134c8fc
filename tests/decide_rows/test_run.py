"""Rows in, rows out: order, resuming at every byte, bad rows, a failing engine, bounded memory."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.decide_rows import Row, Rows
from lockstep.decide_rows import run as run_module
from lockstep.decide_rows.results import Results
from lockstep.decide_rows.run import READ_AHEAD, Decided
from lockstep.engine.client import EngineUnavailable
from lockstep.outputs import GenerationError
from lockstep.types import RequestError
from tests.decide_rows.support import LONGEST, Scripted, decided, results, run, written

ANYWHERE = settings(
    max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "PAUSE", 0.001)


def rows_of(count: int) -> list[object]:
    return [{"id": f"row-{i}", "text": f"text {i}"} for i in range(count)]


def test_one_row_each_in_order_with_what_came_of_it(tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", [*rows_of(30), {"text": "no id"}])
    summary = run(source, tmp_path / "out.jsonl")
    found = results(tmp_path / "out.jsonl")
    assert [row["line"] for row in found] == list(range(1, 32))
    assert [row.get("id") for row in found] == [*(f"row-{i}" for i in range(30)), None]
    for row in found:
        p = row["probabilities"]
        assert list(p) == ["write", "skip"]
        assert row["decision"] == max(p, key=p.__getitem__)
        assert (row["finish_reason"] == "gate") == (row["decision"] == "skip") == (not row["text"])
    totals = summary.totals
    assert totals.rows == 31
    assert totals.decisions == Counter(row["decision"] for row in found)
    assert totals.wrote == totals.decisions["write"]
    assert totals.prompt_tokens == sum(row["usage"]["prompt_tokens"] for row in found)
    assert totals.completion_tokens == sum(row["usage"]["completion_tokens"] for row in found)
    assert summary.cached_tokens == 3 * 31
    assert not list(tmp_path.glob("*.part"))


@given(data=st.data())
@ANYWHERE
def test_bytes_do_not_depend_on_who_ends_first(tmp_path: Path, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 60))
    delays = data.draw(st.lists(st.integers(0, 40), min_size=count, max_size=count))
    places = data.draw(st.integers(1, 9))
    source = written(tmp_path / "in.jsonl", rows_of(count))
    outs = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for out in outs:
        out.unlink(missing_ok=True)
    run(source, outs[0], places=1)
    scripted = Scripted(lambda row: delays[row.line - 1])
    run(source, outs[1], scripted, places=places)
    assert outs[0].read_bytes() == outs[1].read_bytes()
    assert scripted.most <= places


@given(data=st.data())
@ANYWHERE
def test_stopped_at_any_byte_it_goes_on_there(tmp_path: Path, data: st.DataObject) -> None:
    source = written(tmp_path / "in.jsonl", [*rows_of(12), b"no json", *rows_of(3)])
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    for path in (whole, out):
        path.unlink(missing_ok=True)
    expected = run(source, whole)
    text = whole.read_bytes()
    cut = data.draw(st.integers(0, len(text)))
    tail = data.draw(st.sampled_from([b"", b'{"line', b"\0" * 50, b'{"line": "x"}\n']))
    (part,) = part_of(source, out)
    part.write_bytes(text[:cut] + tail)
    scripted = Scripted()
    summary = run(source, out, scripted)
    assert out.read_bytes() == text
    assert summary.totals == expected.totals
    kept = text[:cut].count(b"\n")
    assert summary.resumed == kept
    assert scripted.calls == 15 - kept + (kept > 12)  # line 13 is no row


def part_of(source: Path, out: Path) -> list[Path]:
    """The part of work that stops at its first row."""

    async def stop(row: Row) -> Decided:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(source, out, stop)
    return list(out.parent.glob(f"{out.name}.*.part"))


_KILLED = """
import asyncio, sys
from pathlib import Path
from tests.decide_rows.support import Scripted, decided, run
async def slow(row):
    await asyncio.sleep(0.002 * (row.line % 5))
    return decided(row)
run(Path(sys.argv[1]), Path(sys.argv[2]), slow, places=8)
"""


def test_killed_again_and_again_no_row_is_lost_or_repeated(tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", rows_of(800))
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    run(source, whole)
    command = [sys.executable, "-c", _KILLED, str(source), str(out)]
    kills, grown = 0, -1
    while not out.exists():
        process = subprocess.Popen(command)
        size = max((part.stat().st_size for part in tmp_path.glob("*.part")), default=0)
        assert size > grown, "a call that made no progress"
        grown = size
        wanted = size + random.Random(kills).randrange(1, whole.stat().st_size // 3)
        while process.poll() is None:
            parts = [part.stat().st_size for part in tmp_path.glob("*.part")]
            if kills < 3 and parts and parts[0] >= wanted:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                kills += 1
                break
            time.sleep(0.002)
        else:
            assert process.returncode == 0
    assert kills >= 2
    assert out.read_bytes() == whole.read_bytes()


def test_a_bad_row_gives_an_error_row_and_never_ends_the_run(tmp_path: Path) -> None:
    bad: list[object] = [
        b"{",
        b"\xff\xfe",
        b"[1]",
        b'"text"',
        {"id": 7},
        {"id": "a", "text": ""},
        {"id": "b", "text": ["x"]},
        {"id": True, "text": "x"},
        {"id": {"x": 1}, "text": "x"},
        {"id": "c", "messages": []},
        {"id": "d", "text": "y" * (LONGEST + 1)},
        b'{"text": "\\ud800"}',
        b"[" * 100_000,
    ]
    mixed: list[object] = []
    for row in bad:
        mixed += [row, {"text": "good"}, b"   "]
    source = written(tmp_path / "in.jsonl", mixed)
    summary = run(source, tmp_path / "out.jsonl")
    found = results(tmp_path / "out.jsonl")
    assert [row["line"] for row in found] == [i + 1 for i in range(3 * len(bad)) if i % 3 != 2]
    codes = [row["error"]["code"] for row in found[::2]]
    assert codes == [
        *["invalid_json"] * 4,
        "missing_parameter",
        "empty_prompt",
        *["invalid_value"] * 4,
        "context_length_exceeded",
        *["invalid_json"] * 2,
    ]
    assert [row.get("id") for row in found[::2]][4:11] == [7, "a", "b", None, None, "c", "d"]
    assert all(set(row["error"]) >= {"code", "message", "param"} for row in found[::2])
    assert all(row["decision"] for row in found[1::2])
    assert summary.totals.failed == Counter(codes)


def test_an_overlong_row_among_a_thousand(tmp_path: Path) -> None:
    """K04: 999 results and one error; a resumed call computes none of them again."""
    rows = rows_of(1000)
    rows[500] = {"id": "long", "text": "y" * (LONGEST + 1)}
    source, out = written(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"

    async def stops(row: Row) -> Decided:
        if row.line == 700:
            raise KeyboardInterrupt
        return decided(row)

    with pytest.raises(KeyboardInterrupt):
        run(source, out, stops)
    scripted = Scripted()
    summary = run(source, out, scripted)
    found = results(out)
    assert len(found) == 1000
    assert [row["line"] for row in found if "error" in row] == [501]
    assert summary.resumed > 501
    assert scripted.calls == 1000 - summary.resumed
    assert summary.totals.failed == {"context_length_exceeded": 1}


def test_a_row_that_takes_the_engine_down_is_found_and_the_others_answered(tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", rows_of(40))
    flying: set[int] = set()
    dying: list[asyncio.Event] = [asyncio.Event()]

    async def frail(row: Row) -> Decided:
        flying.add(row.line)
        death = dying[0]
        try:
            if row.line == 17:
                await asyncio.sleep(0.001)
                dying[0] = asyncio.Event()
                death.set()
            waits = [asyncio.create_task(death.wait()), asyncio.create_task(asyncio.sleep(0.003))]
            done, rest = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in rest:
                task.cancel()
            if waits[0] in done:
                raise EngineUnavailable("the engine died", retry_after=1.0)
            return decided(row)
        finally:
            flying.discard(row.line)

    run(source, tmp_path / "out.jsonl", frail, places=8)
    found = results(tmp_path / "out.jsonl")
    assert [row["line"] for row in found if "error" in row] == [17]
    assert found[16]["error"]["code"] == "engine_error"


def test_full_queues_wait_and_defects_are_rows(tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", rows_of(6))
    tries: Counter[int] = Counter()

    async def moody(row: Row) -> Decided:
        tries[row.line] += 1
        if row.line == 2 and tries[2] < 5:
            raise RequestError("full", code="queue_full")
        if row.line == 3 and tries[3] < 3:
            raise GenerationError("a step failed", [])
        if row.line == 4:
            raise ZeroDivisionError("a defect")
        return decided(row)

    run(source, tmp_path / "out.jsonl", moody)
    found = results(tmp_path / "out.jsonl")
    assert [row.get("error", {}).get("code") for row in found] == [
        *[None] * 3,
        "internal_error",
        *[None] * 2,
    ]


def test_a_closed_engine_ends_the_call_and_keeps_the_rows(tmp_path: Path) -> None:
    source, out = written(tmp_path / "in.jsonl", rows_of(50)), tmp_path / "out.jsonl"

    async def closes(row: Row) -> Decided:
        if row.line > 20:
            raise EngineUnavailable("the engine was closed")
        return decided(row)

    with pytest.raises(EngineUnavailable):
        run(source, out, closes)
    summary = run(source, out)
    assert summary.resumed == 20
    assert len(results(out)) == 50


def test_a_full_disk_ends_the_call_and_keeps_whole_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = written(tmp_path / "in.jsonl", rows_of(50)), tmp_path / "out.jsonl"
    whole = tmp_path / "whole.jsonl"
    run(source, whole)
    room, write = 1000, os.pwrite

    def fills(file: int, data: memoryview, position: int) -> int:
        if position >= room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[: room - position], position)

    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", fills)
        with pytest.raises(OSError, match=r"No space left on device.*out\.jsonl"):
            run(source, out)
    (part,) = tmp_path.glob("*.part")
    kept = part.read_bytes()
    assert kept.endswith(b"\n")
    assert len(kept) < room
    assert 0 < run(source, out).resumed < 50
    assert out.read_bytes() == whole.read_bytes()


def test_other_work_is_not_mixed_in(tmp_path: Path) -> None:
    source, out = written(tmp_path / "in.jsonl", rows_of(50)), tmp_path / "out.jsonl"
    (part,) = part_of(source, out)
    before = part.read_bytes()
    with pytest.raises(RequestError, match="another input, other options"):
        run(source, out, identity="other options")
    written(source, rows_of(51))
    with pytest.raises(RequestError, match="another input, other options"):
        run(source, out)
    assert part.read_bytes() == before
    part.unlink()
    run(source, out)
    with pytest.raises(RequestError, match="exists"):
        run(source, out)


def test_two_calls_do_not_share_an_output(tmp_path: Path) -> None:
    source, out = written(tmp_path / "in.jsonl", rows_of(5)), tmp_path / "out.jsonl"
    (part,) = part_of(source, out)
    with Results(part), pytest.raises(RequestError, match="another call"):
        run(source, out)


def test_an_empty_file_is_said_to_be_empty(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\n  \n")
    with pytest.raises(RequestError, match="no rows"):
        run(source, tmp_path / "out.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_few_rows_are_held_however_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first row takes long, those behind it are not read without end."""
    source = written(tmp_path / "in.jsonl", rows_of(3000))
    read = 0
    lines = Rows.lines

    def counted(self: Rows) -> Generator[tuple[int, bytes | None], None, None]:
        nonlocal read
        for line in lines(self):
            read += 1
            yield line

    monkeypatch.setattr(Rows, "lines", counted)
    done = 0

    async def first_is_slow(row: Row) -> Decided:
        nonlocal done
        if row.line == 1:
            for _ in range(2000):
                await asyncio.sleep(0)
            assert read <= READ_AHEAD * 4 + 1
        done += 1
        assert read - done <= READ_AHEAD * 4 + 1
        return decided(row)

    run(source, tmp_path / "out.jsonl", first_is_slow, places=4)
    assert done == 3000


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    source, seen = written(tmp_path / "in.jsonl", rows_of(20)), []
    run(
        source, tmp_path / "o.jsonl", progress=lambda part, totals: seen.append((part, totals.rows))
    )
    assert seen == sorted(seen)
    assert seen[0] == (0.0, 0)
    assert seen[-1] == (1.0, 20)
