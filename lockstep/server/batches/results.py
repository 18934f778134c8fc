"""The last pass: a row for every line of the input, in its order, in two files."""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack
from typing import BinaryIO

import msgspec

from lockstep.server.batches.checking import Stopped
from lockstep.server.batches.journal import Journal
from lockstep.server.batches.lines import (
    ENVELOPE_BYTES,
    RowError,
    check_line,
    read_lines,
    unanswered,
)
from lockstep.server.batches.objects import FileObject, Job, new_file_id
from lockstep.server.batches.store import Store


def write_results(
    store: Store,
    job: Job,
    journal: Journal,
    missing: RowError,
    max_body: int,
    stop: threading.Event,
) -> tuple[FileObject | None, FileObject | None]:
    """Output and error file, synced and not yet added to the store; None for an empty one.

    Args:
        missing: why lines without a result have none.

    Raises:
        Stopped: `stop` was set.
        OSError: the disk failed.
    """
    batch = job.batch
    with ExitStack() as stack:
        outputs = stack.enter_context(_Rows(store, f"{batch.id}_output.jsonl"))
        errors = stack.enter_context(_Rows(store, f"{batch.id}_error.jsonl"))
        find = stack.enter_context(journal.lookup())
        file = stack.enter_context(store.content(batch.input_file_id).open("rb"))
        for number, text in read_lines(file, max_body + ENVELOPE_BYTES):
            if stop.is_set():
                raise Stopped
            entry = find(number)
            if entry is not None:
                (outputs if entry.ok else errors).add(entry.row)
                continue
            line = check_line(number, text, batch.endpoint, max_body)
            row = unanswered(batch.id, number, line.custom_id, missing)
            errors.add(msgspec.json.encode(row))
        return outputs.finish(job.keep_seconds), errors.finish(job.keep_seconds)


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
