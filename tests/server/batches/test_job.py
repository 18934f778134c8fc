"""The life of a batch against a scripted sender: cut off anywhere, it ends the same."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.places import Places
from lockstep.server.batches import job as job_module
from lockstep.server.batches.attempts import Sender
from lockstep.server.batches.job import BatchRun
from lockstep.server.batches.lines import Source
from lockstep.server.batches.objects import (
    BatchObject,
    FileObject,
    Job,
    new_batch_id,
    new_file_id,
)
from lockstep.server.batches.store import Store

URL = "/v1/completions"


def request(name: str, **changes: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": URL, "body": {"prompt": name}, **changes}


def rows(*names: str) -> bytes:
    return b"".join(json.dumps(request(name)).encode() + b"\n" for name in names)


class World:
    """A store with one batch, and a route that repeats the prompt."""

    def __init__(self, folder: Path, data: bytes, places: int = 3) -> None:
        self.folder = folder
        self.store = Store(folder)
        self.store._db.execute("PRAGMA synchronous = OFF")  # these tests cut files, not power
        self.places = places
        self.posted: Counter[str] = Counter()
        self.inside = self.most = 0
        self.hold: Callable[[], bool] = lambda: False
        self.input = new_file_id()
        self.store.temporary(self.input).write_bytes(data)
        record = FileObject(
            id=self.input, bytes=len(data), created_at=1, filename="f", purpose="batch"
        )
        self.store.add_file(record, "")
        self.batch_id = self.new_batch()

    def new_batch(self, left: int = 1000) -> str:
        self.batch_id = new_batch_id()
        batch = BatchObject(
            id=self.batch_id,
            endpoint=URL,
            input_file_id=self.input,
            completion_window="24h",
            created_at=1,
            expires_at=int(time.time()) + left,
        )
        self.store.add_batch(Job(batch=batch, owner="", served="m"))
        return self.batch_id

    def change(self, change: Callable[[BatchObject], None]) -> None:
        self.store.change_batch(self.batch_id, "", change)

    @property
    def batch(self) -> BatchObject:
        return self.store.batch(self.batch_id, "")

    async def post(self, path: str, body: bytes, owner: str) -> tuple[int, bytes]:
        assert path == URL
        prompt = json.loads(body).get("prompt")
        self.posted[prompt] += 1
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            await asyncio.sleep(0)
            while self.hold():
                await asyncio.sleep(0.001)
            if prompt == "defect":
                raise RuntimeError("a defect")
            if prompt == "refused":
                return 400, b'{"error":{"code":"invalid_value"}}'
            reply = {"echo": prompt, "usage": {"prompt_tokens": 2, "completion_tokens": 1}}
            return 200, json.dumps(reply).encode()
        finally:
            self.inside -= 1

    def make_run(self, served: str = "m") -> BatchRun:
        (job,) = [j for j in self.store.unfinished(99) if j.batch.id == self.batch_id]
        made = Sender(self.post, lambda: True, Places(self.places), first_pause=0.001)

        async def sender() -> Sender:
            return made

        return BatchRun(self.store, job, sender, served=served, max_body=1000, disk_pause=0.01)

    async def run(self) -> BatchObject:
        await asyncio.wait_for(self.make_run().run(), 20)
        return self.batch

    def output(self) -> list[dict[str, Any]]:
        return self._rows(self.batch.output_file_id)

    def errors(self) -> list[dict[str, Any]]:
        return self._rows(self.batch.error_file_id)

    def _rows(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        record = self.store.file(file_id, "")
        data = self.store.content(file_id).read_bytes()
        assert record.bytes == len(data)
        assert data.endswith(b"\n")
        return [json.loads(line) for line in data.splitlines()]

    def echoes(self) -> list[tuple[str, str]]:
        return [(row["custom_id"], row["response"]["body"]["echo"]) for row in self.output()]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(data: bytes, **kwargs: Any) -> World:
        made.append(World(tmp_path / str(len(made)), data, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.store.close()


MIXED = b"\n".join(
    [
        json.dumps(request("a")).encode(),
        b"{broken",
        json.dumps(request("b")).encode(),
        b"",
        json.dumps(request("a")).encode(),
        json.dumps(request("c", body={"prompt": "refused"})).encode(),
        json.dumps(request("d", body={"prompt": "defect"})).encode(),
        json.dumps(request("e", body={"prompt": "x", "stream": True})).encode(),
        json.dumps(request("f", url="/v1/models")).encode(),
        json.dumps(request("g")).encode(),
    ]
)


async def test_every_line_has_one_row_in_the_order_of_the_input(
    world: Callable[..., World],
) -> None:
    w = world(MIXED)
    batch = await w.run()
    assert batch.status == "completed"
    assert w.echoes() == [("a", "a"), ("b", "b"), ("g", "g")]
    found = [
        (row["custom_id"], row["error"]["code"] if row["error"] else row["response"]["status_code"])
        for row in w.errors()
    ]
    assert found == [
        (None, "invalid_json"),
        ("a", "duplicate_custom_id"),
        ("c", 400),
        ("d", "internal_error"),
        ("e", "unsupported_parameter"),
        ("f", "mismatched_url"),
    ]
    assert "line 1" in w.errors()[1]["error"]["message"]
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (9, 3, 6)
    assert batch.usage is not None
    assert (batch.usage.input_tokens, batch.usage.total_tokens) == (6, 9)
    times = (batch.in_progress_at, batch.finalizing_at, batch.completed_at)
    assert all(times)
    assert w.posted["a"] == 1, "a duplicate is not run"
    assert not w.store.journal(w.batch_id).exists()
    ids = [row["id"] for row in w.output() + w.errors()]
    assert len(set(ids)) == 9


@pytest.mark.parametrize("data", [b"", b"\n \r\n", b"{}\n[]", b"\xff\n", MIXED.split(b"\n")[1]])
async def test_a_file_without_a_request_fails_and_says_why(
    world: Callable[..., World], data: bytes
) -> None:
    w = world(data)
    batch = await w.run()
    assert batch.status == "failed"
    assert batch.failed_at
    assert batch.errors is not None
    assert batch.errors.data
    assert batch.output_file_id is batch.error_file_id is None
    assert batch.request_counts.completed == 0
    assert not w.posted


async def test_no_more_lines_than_places_are_under_way(world: Callable[..., World]) -> None:
    w = world(rows(*map(str, range(50))), places=4)
    assert (await w.run()).status == "completed"
    assert w.most == 4
    assert [name for name, _ in w.echoes()] == list(map(str, range(50)))


async def test_cut_at_every_byte_of_the_journal_the_result_is_the_same(
    world: Callable[..., World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = rows("a", "b") + b"{broken\n" + rows("c")
    w = world(data)
    kept = tmp_path / "kept"
    real = job_module.write_results

    def keeping(store: Store, source: Source, *rest: Any) -> Any:
        shutil.copy(store.journal(source.name), kept)
        return real(store, source, *rest)

    monkeypatch.setattr(job_module, "write_results", keeping)
    await w.run()
    monkeypatch.setattr(job_module, "write_results", real)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    journal = kept.read_bytes()
    broken = journal.index(b"\n") + 1  # the bad line's row was synced before the first request

    def begun(batch: BatchObject) -> None:
        batch.status = "in_progress"
        batch.in_progress_at = 1
        batch.request_counts.total = 4

    for cut in range(broken, len(journal) + 1):
        w.new_batch()
        w.change(begun)
        w.store.journal(w.batch_id).write_bytes(journal[:cut])
        w.posted.clear()
        batch = await w.run()
        assert batch.status == "completed"
        assert w.echoes() == [("a", "a"), ("b", "b"), ("c", "c")]
        assert [row["error"]["line"] for row in w.errors()] == [3]
        done = journal[broken:cut].count(b"\n")
        assert w.posted.total() == 3 - done, "what is in the journal is not computed again"


# Of one process's life: steps of its loop, seconds on top, and whether it is told to cancel.
lives = st.tuples(
    st.integers(0, 60), st.sampled_from([0, 0.002, 0.01]), st.sampled_from([False] * 4 + [True])
)


@given(st.lists(lives, max_size=4), st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_stopped_again_and_again_it_ends_complete(
    tmp_path_factory: pytest.TempPathFactory, plan: list[tuple[int, float, bool]], places: int
) -> None:
    """A stop between any two steps of the loop, as a shutdown would; then a new process."""
    folder = tmp_path_factory.mktemp("data")
    w = World(folder, MIXED, places=places)
    cancelled = False

    async def main() -> None:
        nonlocal cancelled
        for steps, seconds, cancel in plan:
            if w.batch.status in ("completed", "cancelled"):
                return
            run = w.make_run()
            task = asyncio.create_task(run.run())
            for _ in range(steps):
                await asyncio.sleep(0)
            await asyncio.sleep(seconds)
            if cancel and w.batch.status in ("validating", "in_progress"):
                w.change(_cancelling)
                run.cancel()
                cancelled = True
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            w.store.close()
            w.store = Store(folder)
        if w.batch.status not in ("completed", "cancelled"):
            await w.run()

    asyncio.run(main())
    assert w.batch.status == ("cancelled" if cancelled else "completed")
    found = Counter(row["id"].rpartition("_")[2] for row in w.output() + w.errors())
    assert found == Counter(["1", "2", "3", "5", "6", "7", "8", "9", "10"])
    counts = w.batch.request_counts
    assert (counts.total, counts.completed + counts.failed) == (9, 9)
    assert counts.completed == len(w.output())
    if not cancelled:
        assert w.echoes() == [("a", "a"), ("b", "b"), ("g", "g")]
    w.store.close()


def _cancelling(batch: BatchObject) -> None:
    batch.status = "cancelling"
    batch.cancelling_at = int(time.time())


async def test_cancelled_before_it_began(world: Callable[..., World]) -> None:
    w = world(rows("a", "b") + b"{\n")
    w.change(_cancelling)
    batch = await w.run()
    assert batch.status == "cancelled"
    assert not w.posted
    assert [row["error"]["code"] for row in w.errors()] == [
        "batch_cancelled",
        "batch_cancelled",
        "invalid_json",
    ]
    assert batch.request_counts.failed == 3


async def test_cancelled_on_the_way_keeps_what_was_answered(world: Callable[..., World]) -> None:
    w = world(rows(*map(str, range(20))), places=2)
    w.hold = lambda: w.posted.total() > 6
    run = w.make_run()
    task = asyncio.create_task(run.run())
    while w.posted.total() < 8:
        await asyncio.sleep(0.001)
    w.change(_cancelling)
    run.cancel()
    await asyncio.wait_for(task, 5)
    batch = w.batch
    assert batch.status == "cancelled"
    assert w.inside == 0, "lines in the engine were ended"
    assert [name for name, _ in w.echoes()] == list(map(str, range(6)))
    assert {row["error"]["code"] for row in w.errors()} == {"batch_cancelled"}
    assert (batch.request_counts.completed, batch.request_counts.failed) == (6, 14)


async def test_the_window_ends_and_the_rest_says_so(world: Callable[..., World]) -> None:
    w = world(rows("a", "b", "c"), places=1)
    w.new_batch(left=1)
    w.hold = lambda: w.posted.total() == 2
    began = time.monotonic()
    batch = await w.run()
    assert time.monotonic() - began < 3
    assert batch.status == "expired"
    assert batch.expired_at
    assert [name for name, _ in w.echoes()] == ["a"]
    assert [row["error"]["code"] for row in w.errors()] == ["batch_expired"] * 2


async def test_a_server_of_another_model_leaves_it_alone(world: Callable[..., World]) -> None:
    w = world(rows("a"))
    run = w.make_run(served="other")
    task = asyncio.create_task(run.run())
    await asyncio.sleep(0.1)
    shown = w.batch
    run.describe(shown)
    assert shown.status == "in_progress"
    assert shown.errors is not None
    assert shown.errors.data[0].code == "model_not_served"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not w.posted
    assert (await w.run()).status == "completed"


async def test_a_full_disk_stops_the_lines_and_loses_none(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    w = world(rows(*map(str, range(40))), places=3)
    real, full = os.pwrite, True

    def pwrite(descriptor: int, view: memoryview, position: int) -> int:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, view, position)

    monkeypatch.setattr(os, "pwrite", pwrite)
    run = w.make_run()
    task = asyncio.create_task(run.run())
    await asyncio.sleep(0.3)
    shown = w.batch
    run.describe(shown)
    assert shown.status == "in_progress"
    assert shown.errors is not None
    assert shown.errors.data[0].code == "storage_unavailable"
    assert "No space left" in shown.errors.data[0].message
    assert w.posted.total() <= 4 * w.places, "answers wait in memory, but not many"
    posted = w.posted.total()
    await asyncio.sleep(0.1)
    assert w.posted.total() == posted
    full = False
    await asyncio.wait_for(task, 10)
    assert w.batch.status == "completed"
    assert w.batch.errors is None
    assert [name for name, _ in w.echoes()] == list(map(str, range(40)))
    assert max(w.posted.values()) == 1, "what was computed while the disk was full was kept"


async def test_a_disk_that_fills_at_the_end(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    w = world(rows("a", "b"))
    real = job_module.write_results
    failures = 3

    def failing(*args: Any) -> Any:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args)

    monkeypatch.setattr(job_module, "write_results", failing)
    assert (await w.run()).status == "completed"
    assert w.echoes() == [("a", "a"), ("b", "b")]
    assert w.posted.total() == 2


async def test_an_input_that_is_gone_fails_the_batch(world: Callable[..., World]) -> None:
    w = world(rows("a"))
    w.store.content(w.input).unlink()
    batch = await w.run()
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data[0].code == "input_file_missing"


async def test_counts_are_told_on_the_way(world: Callable[..., World]) -> None:
    w = world(b"{\n" + rows(*map(str, range(9))), places=1)
    w.hold = lambda: w.posted.total() == 5
    run = w.make_run()
    task = asyncio.create_task(run.run())
    while w.posted.total() < 5:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    shown = w.batch
    run.describe(shown)
    counts = shown.request_counts
    assert (counts.total, counts.completed, counts.failed) == (10, 4, 1)
    w.hold = lambda: False
    await asyncio.wait_for(task, 5)
