"""The journal: cut at every byte, damaged at its end, on a disk that is full."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.server.batches.journal import Entry, Journal, Tokens
from lockstep.server.batches.lines import Line, answered

BATCH = "batch_0123456789abcdef01234567"


def entry(line: int, text: str = "", ok: bool = True) -> Entry:
    body = json.dumps({"text": text or f"antwort {line} é"}).encode()
    row = answered(BATCH, Line(line, f"id-{line}", b"{}"), 200 if ok else 400, body)
    return Entry.of(line, ok, row, Tokens(line, 1, 2, 0) if ok else None)


ENTRIES = [entry(line, ok=line != 2) for line in (3, 1, 5, 2)]


def whole(path: Path) -> bytes:
    path.unlink(missing_ok=True)
    journal = Journal(path)
    journal.append(ENTRIES)
    journal.close()
    return path.read_bytes()


def contents(journal: Journal, lines: range = range(1, 8)) -> dict[int, bytes]:
    with journal.lookup() as find:
        found = {line: find(line) for line in lines}
    assert all((found[line] is not None) == (line in journal) for line in lines)
    return {line: bytes(e.row) for line, e in found.items() if e is not None}


def test_cut_at_every_byte_nothing_whole_is_lost_and_nothing_is_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # files are cut here, not power
    path = tmp_path / "journal"
    data = whole(path)
    rows = {e.line: bytes(e.row) for e in ENTRIES}
    ends = [i + 1 for i, byte in enumerate(data) if byte == 10]
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        journal = Journal(path)
        kept = [e.line for e, end in zip(ENTRIES, ends, strict=True) if end <= cut]
        assert contents(journal) == {line: rows[line] for line in kept}
        assert path.stat().st_size == max([0, *(end for end in ends if end <= cut)])
        journal.append(ENTRIES)  # whatever was lost is computed again, and more than that
        assert (journal.ok, journal.failed) == (3, 1)
        assert journal.tokens == Tokens(9, 3, 6, 0)
        journal.close()
        again = Journal(path)
        assert contents(again) == rows
        assert path.read_bytes().count(b"\n") == len(ENTRIES)
        again.close()


@given(st.binary(min_size=1, max_size=60), st.booleans())
def test_a_damaged_end_is_cut_off(
    tmp_path_factory: pytest.TempPathFactory, tail: bytes, zeros: bool
) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal"
    data = whole(path)
    path.write_bytes(data + (b"\0" * 300 if zeros else b"\0" + tail))
    journal = Journal(path)
    assert path.read_bytes() == data
    assert (journal.ok, journal.failed) == (3, 1)
    journal.close()


def test_a_full_disk_leaves_the_journal_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    data = whole(path)
    journal = Journal(path)
    real = os.pwrite

    def full(descriptor: int, view: memoryview, position: int) -> int:
        if len(view) <= 40:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, view[:40], position)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        journal.append([entry(6)])
    assert 6 not in journal
    assert path.read_bytes() == data
    monkeypatch.setattr(os, "pwrite", real)
    journal.append([entry(6), entry(6, "another answer")])
    assert json.loads(contents(journal)[6])["response"]["body"]["text"] == "antwort 6 é"
    journal.close()


def test_appends_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "journal")
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    journal.append([entry(1), entry(2)])
    assert synced == [(tmp_path / "journal").stat().st_size]
    journal.close()
