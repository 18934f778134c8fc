"""The first pass over an input file: which lines are requests, and what is wrong with the rest."""

from __future__ import annotations

import errno
import sqlite3
import threading
from contextlib import closing
from dataclasses import dataclass, field

from lockstep.server.batches.journal import Entry, Journal
from lockstep.server.batches.lines import BadLine, Line, Source, duplicate, refused
from lockstep.server.batches.objects import Problem

SHOWN_PROBLEMS = 50
_GROUP = 1000  # bad lines written at once


class Stopped(Exception):
    """Somebody does not want the rest."""


@dataclass(slots=True)
class Checked:
    """What the pass found.

    Attributes:
        total: lines that are not blank. good: those that are requests.
        problems: of the first bad lines.
        model: named by every request; None when they differ or name none.
    """

    total: int = 0
    good: int = 0
    problems: list[Problem] = field(default_factory=list)
    model: str | None = None


def check_file(source: Source, journal: Journal, stop: threading.Event) -> Checked:
    """Check every line; bad ones get their row in the journal. Doing it again adds nothing.

    Memory does not depend on the number of lines: custom ids are kept on the disk.

    Raises:
        Stopped: `stop` was set.
        OSError: the disk failed.
    """
    found = Checked()
    models: set[str | None] = set()
    waiting: list[Entry] = []
    with closing(_Seen()) as seen, closing(source.lines()) as lines:
        for line in lines:
            if stop.is_set():
                raise Stopped
            checked = seen.distinct(line)
            found.total += 1
            if isinstance(checked, Line):
                found.good += 1
                if len(models) < 2:
                    models.add(checked.model)
                continue
            waiting.append(Entry.of(line.number, False, refused(source.name, checked)))
            if len(found.problems) < SHOWN_PROBLEMS:
                problem = Problem(
                    code=checked.code,
                    message=checked.message,
                    param=checked.param,
                    line=line.number,
                )
                found.problems.append(problem)
            if len(waiting) == _GROUP:
                journal.append(waiting)
                waiting.clear()
    journal.append(waiting)
    found.model = models.pop() if len(models) == 1 else None
    return found


class _Seen:
    """The custom ids so far, in a private database that SQLite keeps in a temporary file."""

    def __init__(self) -> None:
        self._db = sqlite3.connect("", isolation_level=None)
        self._db.execute("CREATE TABLE seen (id TEXT PRIMARY KEY, line INTEGER) WITHOUT ROWID")
        self._db.execute("BEGIN")

    def close(self) -> None:
        self._db.close()

    def distinct(self, checked: Line | BadLine) -> Line | BadLine:
        """The same, or what is wrong with a request whose custom id an earlier one has."""
        if isinstance(checked, BadLine):
            return checked
        try:
            added = self._db.execute(
                "INSERT OR IGNORE INTO seen VALUES (?, ?)", [checked.custom_id, checked.number]
            )
            if added.rowcount:
                return checked
            (first,) = self._db.execute(
                "SELECT line FROM seen WHERE id = ?", [checked.custom_id]
            ).fetchone()
        except sqlite3.OperationalError as error:
            raise OSError(errno.ENOSPC, f"SQLite's temporary file: {error}") from error
        return duplicate(checked, first)
