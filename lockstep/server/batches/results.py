"""The last pass: a row for every line of the input, in its order, in two files."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Generator
from contextlib import closing
from typing import BinaryIO

import msgspec

from lockstep.server.batches.checking import Stopped
from lockstep.server.batches.journal import Journal
from lockstep.server.batches.lines import RowError, Source, unanswered
from lockstep.server.batches.objects import FileObject, new_file_id
from lockstep.server.batches.store import Store


def ordered_rows(
    source: Source, journal: Journal, missing: RowError, stop: threading.Event
) -> Generator[tuple[bool, bytes | msgspec.Raw], None, None]:
    """A row for every line, and whether it holds an answer.

    Args:
        missing: why lines without a result have none.

    Raises:
        Stopped: `stop` was set.
        OSError: the disk failed.
    """
    with journal.lookup() as find, closing(source.lines()) as lines:
        for line in lines:
            if stop.is_set():
                raise Stopped
            entry = find(line.number)
            if entry is not None:
                yield entry.ok, entry.row
            else:
                row = unanswered(source.name, line.number, line.custom_id, missing)
                yield False, msgspec.json.encode(row)


def write_results(
    store: Store,
    source: Source,
    journal: Journal,
    missing: RowError,
    keep_seconds: int | None,
    stop: threading.Event,
) -> tuple[FileObject | None, FileObject | None]:
    """Output and error file, synced and not yet added to the store; None for an empty one.

    Raises:
        Stopped, OSError: as `ordered_rows`.
    """
    with (
        _Rows(store, f"{source.name}_output.jsonl") as outputs,
        _Rows(store, f"{source.name}_error.jsonl") as errors,
        closing(ordered_rows(source, journal, missing, stop)) as rows,
    ):
        for ok, row in rows:
            (outputs if ok else errors).add(row)
        return outputs.finish(keep_seconds), errors.finish(keep_seconds)


class _Rows:
    """A result file in the making; opened with its first row, removed if it is not finished."""

    def __init__(self, store: Store, filename: str) -> None:
        self._id = new_file_id()
        self._path = store.temporary(self._id)
        self._filename = filename
        self._file: BinaryIO | None = None
        self._size = 0
        self._finished = False

    def __enter__(self) -> _Rows:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._file is not None:
            self._file.close()
        if not self._finished:
            self._path.unlink(missing_ok=True)

    def add(self, row: bytes | msgspec.Raw) -> None:
        if self._file is None:
            self._file = self._path.open("xb")
        self._size += self._file.write(row) + self._file.write(b"\n")

    def finish(self, keep_seconds: int | None) -> FileObject | None:
        self._finished = True
        if self._file is None:
            return None
        self._file.flush()
        os.fsync(self._file.fileno())
        now = int(time.time())
        return FileObject(
            id=self._id,
            bytes=self._size,
            created_at=now,
            filename=self._filename,
            purpose="batch_output",
            expires_at=None if keep_seconds is None else now + keep_seconds,
        )
