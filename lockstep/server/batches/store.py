"""The data directory: files, an index in SQLite, and the lock that keeps it to one server.

    lock                    held with flock while a server runs
    index.sqlite3           what exists, and whose it is (write-ahead log, synced commits)
    files/<file id>         contents; made whole in tmp/, synced, then renamed
    journals/<batch id>     results of batches under way
    tmp/                    emptied at every start

What the index does not know is removed at the start, so a crash between a rename and its
commit leaves nothing behind. Every method may be called from any thread.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from lockstep.config import ConfigError
from lockstep.durable import sync_folder
from lockstep.server.batches.objects import (
    BATCH_ID,
    ENDED,
    FILE_ID,
    BatchObject,
    FileObject,
    Job,
)
from lockstep.server.errors import NotFound
from lockstep.types import RequestError

T = TypeVar("T")
VERSION = 1
_SCHEMA = """
CREATE TABLE files (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, purpose TEXT NOT NULL, expires_at INTEGER,
    record BLOB NOT NULL
) WITHOUT ROWID;
CREATE TABLE batches (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, input TEXT NOT NULL, ended INTEGER NOT NULL,
    record BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX files_by_owner ON files (owner, id);
CREATE INDEX batches_by_owner ON batches (owner, id);
CREATE INDEX batches_under_way ON batches (id) WHERE NOT ended;
CREATE INDEX batches_by_input ON batches (input) WHERE NOT ended;
"""

Order = Literal["asc", "desc"]


class Store:
    """Files and batches of one directory.

    Args:
        folder: made if missing, readable by its owner only.

    Raises:
        ConfigError: another server holds the directory, or it is not one of this version.
        OSError: it cannot be made or written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        parts = (self._files, self._journals, self._tmp)
        if not (folder / "index.sqlite3").exists():
            _check_unused(parts)
        for part in (folder, *parts):
            part.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock_file = _locked(folder / "lock")
        self._mutex = threading.Lock()
        try:
            self._db = _open_index(folder / "index.sqlite3")
            self._clean()
        except BaseException:
            os.close(self._lock_file)
            raise

    def close(self) -> None:
        """Let go of the directory."""
        with self._mutex:
            self._db.close()
            os.close(self._lock_file)

    # --- files --------------------------------------------------------------------------

    def temporary(self, name: str) -> Path:
        """Where a file is written before it is added."""
        return self._tmp / name

    def add_file(self, record: FileObject, owner: str) -> None:
        """Take over `temporary(record.id)`, which must be synced. Durable on return."""
        self._move_in(record)
        with self._transaction() as db:
            _insert_file(db, record, owner)

    def file(self, file_id: str, owner: str) -> FileObject:
        """A file's record.

        Raises:
            NotFound: no such file of this owner.
        """
        with self._transaction() as db:
            return self._file(db, file_id, owner)

    def content(self, file_id: str) -> Path:
        """Where the bytes of a file that the index knows are."""
        if FILE_ID.fullmatch(file_id) is None:
            raise no_file(file_id)
        return self._files / file_id

    def files(
        self, owner: str, *, after: str | None, limit: int, order: Order, purpose: str | None
    ) -> list[FileObject]:
        """Up to `limit` files behind `after`, by time of making."""
        where, values = "", []
        if purpose is not None:
            where, values = " AND purpose = ?", [purpose]
        sql = f"SELECT record FROM files WHERE owner = ?{where}"
        with self._transaction() as db:
            rows = db.execute(*_paged(sql, [owner, *values], after, limit, order))
            return [msgspec.json.decode(row[0], type=FileObject) for row in rows]

    def delete_file(self, file_id: str, owner: str) -> None:
        """Forget a file and its bytes.

        Raises:
            NotFound: no such file of this owner.
            RequestError: a batch under way still reads it.
        """
        with self._transaction() as db:
            self._file(db, file_id, owner)
            user = db.execute(
                "SELECT id FROM batches WHERE input = ? AND NOT ended", [file_id]
            ).fetchone()
            if user is not None:
                raise RequestError(
                    f"file {file_id!r} is the input of batch {user[0]!r}, which is under way",
                    field="file_id",
                    code="file_in_use",
                )
            db.execute("DELETE FROM files WHERE id = ?", [file_id])
        self.content(file_id).unlink(missing_ok=True)

    def remove_expired(self) -> int:
        """Delete files whose time is over, unless a batch under way reads them."""
        with self._transaction() as db:
            found = db.execute(
                "DELETE FROM files WHERE expires_at <= ? AND id NOT IN"
                " (SELECT input FROM batches WHERE NOT ended) RETURNING id",
                [int(time.time())],
            ).fetchall()
        for (file_id,) in found:
            self.content(file_id).unlink(missing_ok=True)
        return len(found)

    # --- batches ------------------------------------------------------------------------

    def add_batch(self, job: Job) -> None:
        """Accept a batch. Durable on return.

        Raises:
            NotFound: its owner has no such input file.
            RequestError: the file is not for batches.
        """
        batch = job.batch
        with self._transaction() as db:
            found = self._file(db, batch.input_file_id, job.owner, field="input_file_id")
            if found.purpose != "batch":
                raise RequestError(
                    f"file {found.id!r} has purpose {found.purpose!r}, a batch needs 'batch'",
                    field="input_file_id",
                )
            db.execute(
                "INSERT INTO batches VALUES (?, ?, ?, 0, ?)",
                [batch.id, job.owner, batch.input_file_id, msgspec.json.encode(job)],
            )

    def batch(self, batch_id: str, owner: str) -> BatchObject:
        """A batch as last recorded.

        Raises:
            NotFound: no such batch of this owner.
        """
        with self._transaction() as db:
            return self._job(db, batch_id, owner).batch

    def batches(self, owner: str, *, after: str | None, limit: int) -> list[BatchObject]:
        """Up to `limit` batches behind `after`, newest first."""
        sql = "SELECT record FROM batches WHERE owner = ?"
        with self._transaction() as db:
            rows = db.execute(*_paged(sql, [owner], after, limit, "desc"))
            return [msgspec.json.decode(row[0], type=Job).batch for row in rows]

    def unfinished(self, limit: int) -> list[Job]:
        """The oldest batches that have not ended."""
        with self._transaction() as db:
            rows = db.execute(
                "SELECT record FROM batches WHERE NOT ended ORDER BY id LIMIT ?", [limit]
            )
            return [msgspec.json.decode(row[0], type=Job) for row in rows]

    def change_batch(
        self,
        batch_id: str,
        owner: str,
        change: Callable[[BatchObject], None],
        files: Sequence[FileObject] = (),
    ) -> BatchObject:
        """Apply `change` to the recorded batch and add result `files`, all or nothing.

        The files' `temporary` bytes must be synced. Durable on return. When the batch has
        ended its journal is removed.

        Raises:
            NotFound: no such batch of this owner.
            Whatever `change` raises; then nothing is changed.
        """
        for record in files:
            self._move_in(record)
        with self._transaction() as db:
            job = self._job(db, batch_id, owner)
            change(job.batch)
            for record in files:
                _insert_file(db, record, owner)
            db.execute(
                "UPDATE batches SET record = ?, ended = ? WHERE id = ?",
                [msgspec.json.encode(job), job.batch.status in ENDED, batch_id],
            )
        if job.batch.status in ENDED:
            self.journal(batch_id).unlink(missing_ok=True)
        return job.batch

    def journal(self, batch_id: str) -> Path:
        """Where a batch's results are kept while it runs."""
        if BATCH_ID.fullmatch(batch_id) is None:
            raise _no_batch(batch_id)
        return self._journals / batch_id

    def free_bytes(self) -> int:
        """Space left on the directory's file system."""
        return shutil.disk_usage(self.folder).free

    # --- inside -------------------------------------------------------------------------

    @property
    def _files(self) -> Path:
        return self.folder / "files"

    @property
    def _journals(self) -> Path:
        return self.folder / "journals"

    @property
    def _tmp(self) -> Path:
        return self.folder / "tmp"

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """The index, alone; commits, or rolls back what an exception leaves half done.

        Raises:
            OSError: the index cannot be written.
        """
        with self._mutex:
            try:
                with self._db:
                    yield self._db
            except sqlite3.OperationalError as error:
                full = error.sqlite_errorcode == sqlite3.SQLITE_FULL
                number = errno.ENOSPC if full else errno.EIO
                raise OSError(number, f"{self.folder / 'index.sqlite3'}: {error}") from error

    def _file(
        self, db: sqlite3.Connection, file_id: str, owner: str, field: str = "file_id"
    ) -> FileObject:
        if FILE_ID.fullmatch(file_id) is None:  # SQLite takes no half of a surrogate pair
            raise no_file(file_id, field)
        row = db.execute(
            "SELECT record FROM files WHERE id = ? AND owner = ?", [file_id, owner]
        ).fetchone()
        found = None if row is None else msgspec.json.decode(row[0], type=FileObject)
        if found is None or (found.expires_at is not None and found.expires_at <= time.time()):
            raise no_file(file_id, field)
        return found

    def _job(self, db: sqlite3.Connection, batch_id: str, owner: str) -> Job:
        if BATCH_ID.fullmatch(batch_id) is None:
            raise _no_batch(batch_id)
        row = db.execute(
            "SELECT record FROM batches WHERE id = ? AND owner = ?", [batch_id, owner]
        ).fetchone()
        if row is None:
            raise _no_batch(batch_id)
        return msgspec.json.decode(row[0], type=Job)

    def _move_in(self, record: FileObject) -> None:
        target = self.content(record.id)
        if not target.exists():  # a repeated `change_batch` has moved it already
            self.temporary(record.id).rename(target)
        sync_folder(self._files)

    def _clean(self) -> None:
        """Remove what an earlier server left half done."""
        shutil.rmtree(self._tmp)
        self._tmp.mkdir(mode=0o700)
        with self._transaction() as db:
            files = {row[0] for row in db.execute("SELECT id FROM files")}
            running = {row[0] for row in db.execute("SELECT id FROM batches WHERE NOT ended")}
        for folder, known in ((self._files, files), (self._journals, running)):
            for path in folder.iterdir():
                if path.name not in known:
                    path.unlink()


def remove_abandoned(folder: Path, prefix: str) -> None:
    """Remove the directories under `folder` that servers made for themselves and left by dying.

    Their names begin with `prefix`. One that was made this moment has no lock yet, and stays.
    """
    for found in folder.glob(f"{prefix}*"):
        try:
            descriptor = os.open(found / "lock", os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue  # somebody else's
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(found, ignore_errors=True)
        except OSError:
            pass  # its server lives
        finally:
            os.close(descriptor)


def _check_unused(parts: Sequence[Path]) -> None:
    """Refuse to begin where somebody keeps files: what no index knows would be removed."""
    for part in parts:
        if part.is_dir() and any(part.iterdir()):
            raise ConfigError(
                f"data_dir {str(part.parent)!r} holds a folder {part.name!r} that is not a "
                "server's; give the server a directory of its own"
            )


def _locked(path: Path) -> int:
    """A descriptor whose lock the kernel drops with the process, however it ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(descriptor, 32).decode(errors="replace").strip()
        os.close(descriptor)
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise ConfigError(
            f"data_dir {str(path.parent)!r} is in use by another server (process {holder}); "
            "give each server a directory of its own"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _open_index(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version == 0:
            db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
        elif version != VERSION:
            raise ConfigError(f"{path} has version {version}; this is a server for {VERSION}")
    except sqlite3.DatabaseError as error:
        db.close()
        raise ConfigError(f"{path} cannot be used: {error}") from error
    except ConfigError:
        db.close()
        raise
    return db


def _insert_file(db: sqlite3.Connection, record: FileObject, owner: str) -> None:
    db.execute(
        "INSERT INTO files VALUES (?, ?, ?, ?, ?)",
        [record.id, owner, record.purpose, record.expires_at, msgspec.json.encode(record)],
    )


def _paged(
    sql: str, values: Sequence[object], after: str | None, limit: int, order: Order
) -> tuple[str, list[object]]:
    """Ids sort by time, so a cursor works even after its object was deleted."""
    parameters = list(values)
    if after is not None:
        sql += f" AND id {'<' if order == 'desc' else '>'} ?"
        parameters.append(after)
    return f"{sql} ORDER BY id {order.upper()} LIMIT ?", [*parameters, limit]


def no_file(file_id: str, field: str = "file_id") -> NotFound:
    """The error about a file that is not there, or not the caller's."""
    return NotFound(f"there is no file {file_id[:100]!r}", field=field, code="file_not_found")


def _no_batch(batch_id: str) -> NotFound:
    return NotFound(
        f"there is no batch {batch_id[:100]!r}", field="batch_id", code="batch_not_found"
    )
