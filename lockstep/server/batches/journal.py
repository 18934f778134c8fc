"""The results of a batch under way: an append-only file, synced, one JSON object a line.

A line counts once it is on the disk with its line feed. A torn end, which a crash in the
middle of an append leaves, is cut off when the journal is opened; what it held is computed
again.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import add
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from lockstep.durable import sync_folder
from lockstep.server.batches.lines import Row


class Tokens(NamedTuple):
    """What an answer used."""

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0


class Entry(msgspec.Struct):
    """One result.

    Attributes:
        line: number of the input line that it answers.
        ok: whether the row belongs into the output file, and not into the error file.
        row: a `Row`, as JSON.
    """

    line: int
    ok: bool
    row: msgspec.Raw
    tokens: Tokens | None = None

    @classmethod
    def of(cls, line: int, ok: bool, row: Row, tokens: Tokens | None = None) -> Self:
        """A result from its row."""
        return cls(line, ok, msgspec.Raw(msgspec.json.encode(row)), tokens)


_decode = msgspec.json.Decoder(Entry).decode


class Journal:
    """The results so far. Holds one byte for each line of the input, and no rows.

    Args:
        path: made if missing.

    Attributes:
        ok, failed: results by kind. tokens: their sum.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        sync_folder(path.parent)
        self._size = 0  # of what is whole and synced
        self._seen = bytearray()
        self.ok = 0
        self.failed = 0
        self.tokens = Tokens()
        for entry, end in self._entries():
            self._size = end
            self._count(entry)
        os.ftruncate(self._file, self._size)

    def close(self) -> None:
        """Close the file, once."""
        os.close(self._file)

    def __contains__(self, line: int) -> bool:
        return line < len(self._seen) and bool(self._seen[line])

    def append(self, entries: Iterable[Entry]) -> None:
        """Write results and sync them; a line that has one keeps its first.

        Raises:
            OSError: none of them is in the journal.
        """
        new: dict[int, Entry] = {}
        for entry in entries:
            if entry.line not in self:
                new.setdefault(entry.line, entry)
        data = b"".join(msgspec.json.encode(entry) + b"\n" for entry in new.values())
        try:
            view, position = memoryview(data), self._size
            while view:  # one call may write less than it was given
                written = os.pwrite(self._file, view, position)
                view, position = view[written:], position + written
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(data)
        for entry in new.values():
            self._count(entry)

    @contextmanager
    def lookup(self) -> Iterator[Callable[[int], Entry | None]]:
        """A function from a line's number to its result. Nothing is appended meanwhile.

        Holds eight bytes for each line of the input.
        """
        starts = array("q", [-1]) * len(self._seen)
        begin = 0
        for entry, end in self._entries():
            if starts[entry.line] < 0:
                starts[entry.line] = begin
            begin = end
        with self._path.open("rb") as file:

            def find(line: int) -> Entry | None:
                if line not in self:
                    return None
                file.seek(starts[line])
                return _decode(file.readline())

            yield find

    def _entries(self) -> Iterator[tuple[Entry, int]]:
        """Whole entries from the start, each with the offset of its end."""
        end = 0
        with self._path.open("rb") as file:
            for raw in file:
                if not raw.endswith(b"\n"):
                    return
                try:
                    entry = _decode(raw)
                except msgspec.DecodeError:
                    return
                end += len(raw)
                yield entry, end

    def _count(self, entry: Entry) -> None:
        """Take in an entry; a second one of the same line does not count."""
        if entry.line in self:
            return
        if entry.line >= len(self._seen):
            self._seen.extend(bytes(max(1024, entry.line + 1 - len(self._seen))))
        self._seen[entry.line] = 1
        if entry.ok:
            self.ok += 1
        else:
            self.failed += 1
        if entry.tokens is not None:
            self.tokens = Tokens(*map(add, self.tokens, entry.tokens))
