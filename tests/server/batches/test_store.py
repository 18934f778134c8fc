"""The data directory: one server, nobody else's files, nothing outside, nothing half done."""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config import ConfigError
from lockstep.server.batches.objects import (
    BatchObject,
    FileObject,
    Job,
    new_batch_id,
    new_file_id,
)
from lockstep.server.batches.store import Store
from lockstep.server.errors import NotFound
from lockstep.types import RequestError


def add(store: Store, owner: str = "", data: bytes = b"x", expires_at: int | None = None) -> str:
    file_id = new_file_id()
    store.temporary(file_id).write_bytes(data)
    record = FileObject(
        id=file_id,
        bytes=len(data),
        created_at=1,
        filename="f",
        purpose="batch",
        expires_at=expires_at,
    )
    store.add_file(record, owner)
    return file_id


def start(store: Store, file_id: str, owner: str = "") -> str:
    batch = BatchObject(
        id=new_batch_id(),
        endpoint="/v1/completions",
        input_file_id=file_id,
        completion_window="24h",
        created_at=1,
        expires_at=int(time.time()) + 100,
    )
    store.add_batch(Job(batch=batch, owner=owner, served="m"))
    return batch.id


def end(batch: BatchObject) -> None:
    batch.status = "completed"


def test_what_is_accepted_is_there_after_a_restart(tmp_path: Path) -> None:
    store = Store(tmp_path / "new" / "data")
    file_id = add(store, data=b"hello")
    batch_id = start(store, file_id)
    store.close()
    assert (tmp_path / "new" / "data").stat().st_mode & 0o777 == 0o700
    store = Store(tmp_path / "new" / "data")
    assert store.content(file_id).read_bytes() == b"hello"
    assert store.file(file_id, "").bytes == 5
    assert [job.batch.id for job in store.unfinished(9)] == [batch_id]
    store.change_batch(batch_id, "", end)
    assert store.unfinished(9) == []
    store.close()


def test_a_second_server_is_refused_until_the_first_has_gone(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(ConfigError, match=rf"in use by another server \(process {os.getpid()}\)"):
        Store(tmp_path)
    store.close()
    Store(tmp_path).close()


ids = st.text(st.characters(), max_size=40)  # halves of surrogate pairs, too


@given(ids | st.sampled_from(["../index.sqlite3", "/etc/passwd", "file-..", "."]))
@settings(max_examples=50)
def test_no_id_leaves_the_directory(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    store = Store(tmp_path_factory.mktemp("data"))
    try:
        with pytest.raises(NotFound):
            store.content(text)
        with pytest.raises(NotFound):
            store.journal(text)
        with pytest.raises(NotFound):
            store.file(text, "")
        with pytest.raises(NotFound):
            store.batch(text, "")
        with pytest.raises(NotFound):
            store.delete_file(text, "")
        with pytest.raises(NotFound):
            start(store, text)
    finally:
        store.close()


def test_owners_see_their_own_only(tmp_path: Path) -> None:
    store = Store(tmp_path)
    mine = add(store, "me")
    batch_id = start(store, mine, "me")
    for other in ("you", ""):
        for ask in (
            lambda other=other: store.file(mine, other),
            lambda other=other: store.delete_file(mine, other),
            lambda other=other: store.batch(batch_id, other),
            lambda other=other: store.change_batch(batch_id, other, end),
            lambda other=other: start(store, mine, other),
        ):
            with pytest.raises(NotFound):
                ask()
        assert store.files(other, after=None, limit=9, order="desc", purpose=None) == []
        assert store.batches(other, after=None, limit=9) == []
    assert store.file(mine, "me").id == mine
    assert store.batch(batch_id, "me").status == "validating"
    store.close()


@given(st.integers(1, 4), st.sampled_from(["asc", "desc"]), st.sets(st.integers(0, 6)))
@settings(max_examples=20)
def test_pages_follow_each_other_even_when_files_go(
    tmp_path_factory: pytest.TempPathFactory,
    limit: int,
    order: Literal["asc", "desc"],
    removed: set[int],
) -> None:
    store = Store(tmp_path_factory.mktemp("data"))
    made = sorted(add(store, str(number % 2)) for number in range(14))
    mine = [f.id for f in store.files("1", after=None, limit=99, order="asc", purpose="batch")]
    assert len(mine) == 7
    assert mine == [file_id for file_id in made if file_id in mine]
    ids = mine if order == "asc" else mine[::-1]
    seen: list[str] = []
    after = None
    while page := store.files("1", after=after, limit=limit, order=order, purpose=None):
        for record in page:
            if ids.index(record.id) in removed:
                store.delete_file(record.id, "1")
        seen += [record.id for record in page]
        after = page[-1].id
    assert seen == ids
    assert store.files("1", after=None, limit=9, order=order, purpose="batch_output") == []
    store.close()


def test_an_input_in_use_cannot_be_deleted_and_does_not_expire(tmp_path: Path) -> None:
    store = Store(tmp_path)
    used = add(store, expires_at=int(time.time()) + 1000)
    over = add(store, expires_at=int(time.time()) - 1)
    batch_id = start(store, used)
    with pytest.raises(RequestError, match=batch_id) as caught:
        store.delete_file(used, "")
    assert caught.value.code == "file_in_use"
    with pytest.raises(NotFound):
        store.file(over, "")
    with pytest.raises(NotFound):
        start(store, over)
    assert store.remove_expired() == 1
    assert not store.content(over).exists()
    store._db.execute("UPDATE files SET expires_at = 1")
    store._db.commit()
    assert store.remove_expired() == 0, "a batch under way reads it"
    store.change_batch(batch_id, "", end)
    assert store.remove_expired() == 1
    assert not store.content(used).exists()
    store.close()


def test_only_an_uploaded_file_is_an_input(tmp_path: Path) -> None:
    store = Store(tmp_path)
    batch_id = start(store, add(store))
    result = new_file_id()
    store.temporary(result).write_bytes(b"{}\n")
    record = FileObject(id=result, bytes=3, created_at=1, filename="o", purpose="batch_output")
    store.change_batch(batch_id, "", end, [record])
    assert store.content(result).read_bytes() == b"{}\n"
    with pytest.raises(RequestError, match="purpose 'batch_output'"):
        start(store, result)
    store.close()


def test_leftovers_of_a_crash_are_removed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    file_id = add(store)
    running, ended = start(store, file_id), start(store, file_id)
    for batch_id in (running, ended):
        store.journal(batch_id).write_bytes(b"{}")
    store.change_batch(ended, "", end)
    assert not store.journal(ended).exists()
    store.temporary("half").write_bytes(b"x")
    orphan = store.content(new_file_id())
    orphan.write_bytes(b"renamed, never committed")
    store.journal(new_batch_id()).write_bytes(b"x")
    store.close()
    store = Store(tmp_path)
    assert {path.name for path in (tmp_path / "files").iterdir()} == {file_id}
    assert {path.name for path in (tmp_path / "journals").iterdir()} == {running}
    assert list((tmp_path / "tmp").iterdir()) == []
    store.close()


def test_a_change_that_raises_changes_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    batch_id = start(store, add(store))

    def change(batch: BatchObject) -> None:
        batch.status = "cancelled"
        raise RequestError("no")

    with pytest.raises(RequestError):
        store.change_batch(batch_id, "", change)
    assert store.batch(batch_id, "").status == "validating"
    store.close()


def test_a_full_index_is_an_os_error_and_recovers(tmp_path: Path) -> None:
    store = Store(tmp_path)
    file_id = add(store)
    (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    made: list[str] = []

    def fill() -> None:
        for _ in range(1000):
            made.append(start(store, file_id))

    with pytest.raises(OSError) as caught:
        fill()
    assert caught.value.errno == errno.ENOSPC
    store._db.execute("PRAGMA max_page_count = 100000")
    made.append(start(store, file_id))
    assert [job.batch.id for job in store.unfinished(2000)] == sorted(made)
    store.close()


@pytest.mark.parametrize("damage", ["other", "garbage"])
def test_a_directory_of_something_else_is_refused(tmp_path: Path, damage: str) -> None:
    if damage == "garbage":
        (tmp_path / "index.sqlite3").write_bytes(b"no database" * 1000)
    else:
        db = sqlite3.connect(tmp_path / "index.sqlite3")
        db.execute("PRAGMA user_version = 99")
        db.close()
    for _ in range(2):  # and the lock is free again
        with pytest.raises(ConfigError, match=r"index\.sqlite3"):
            Store(tmp_path)
