"""A record of runs that shows when it was tampered with: JSON lines, each sealed to the one before.

Every line is the canonical JSON of one record. It carries its place, the hash of the record
before it and its own hash over all of that, so an edit, a deletion, an insertion or a
reordering anywhere breaks the chain at that place. A chain alone cannot show that its end
was cut off, nor that somebody wrote all of it anew: for that, keep the head's hash somewhere
else (a commit, a CI log, a mail) and give it to `check`.

A run writes two records: one before its first request, which fixes the rule's hash, and one
at its end; one that goes on for months also notes what is new in between. A run that crashed,
or whose verdict nobody liked, has left its first.
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

from lockstep.types import LockstepError
from lockstep.verify.canonical import canonical_bytes, digest
from lockstep.verify.environment import hardware, versions

GENESIS = "0" * 64
STARTED, NOTED, ENDED, REPAIRED = "run.started", "run.noted", "run.ended", "repaired"
ERROR = "error"  # the verdict of a run that an exception ended


class LedgerError(LockstepError):
    """A ledger that cannot be continued: names the file, the line and what is wrong."""


Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Checked:
    """What a ledger holds and what is wrong with it.

    Attributes:
        records: those that could be read, in their order.
        head: the last record's hash, or 64 zeros; worth keeping elsewhere.
        problems: one line each, the first broken place first; empty for an intact chain.
    """

    records: tuple[Record, ...]
    head: str
    problems: tuple[str, ...]


def seal(record: Mapping[str, Any]) -> str:
    """The hash of a record over everything in it but the hash."""
    return digest({name: value for name, value in record.items() if name != "hash"})


def check(path: Path, expected: str = "") -> Checked:
    """Read a ledger and hold every line against the chain.

    Args:
        expected: a hash kept from earlier; that record must still be in the chain. This is
            what shows a cut-off end or a chain written anew.

    Raises:
        OSError: it cannot be read.
    """
    records: list[Record] = []
    problems: list[str] = []
    previous = GENESIS
    lines = path.read_bytes().split(b"\n")
    if lines[-1]:
        problems.append(f"line {len(lines)} is incomplete: the writer was stopped in it")
    for number, line in enumerate(lines[:-1], 1):
        try:
            record = json.loads(line)
            wrong = _wrong(record, line, number - 1, previous)
        except (ValueError, TypeError, KeyError, RecursionError):
            problems.append(f"line {number} is no record")
            continue
        if wrong:
            problems.append(f"line {number}: {wrong}")
        records.append(record)
        previous = record["hash"]
    if expected and expected not in (GENESIS, *(record["hash"] for record in records)):
        problems.append(
            f"no record has the hash {expected}: the end was cut off, or all was written anew"
        )
    problems += _missing_details(path, records)
    return Checked(tuple(records), previous, tuple(problems))


def _wrong(record: Record, line: bytes, place: int, previous: str) -> str:
    """What is wrong with a record at this place; "" if nothing is."""
    if record["seq"] != place:
        return f"record {record['seq']} stands at place {place}: lines were removed or moved"
    if record["previous"] != previous:
        return "it does not follow the line before it: that one was changed, removed or moved"
    if record["hash"] != seal(record) or canonical_bytes(record) != line:
        return "it was changed after it was written"
    return ""


def _missing_details(path: Path, records: list[Record]) -> Iterator[str]:
    for record in records:
        details = record.get("details")
        if isinstance(details, dict):
            file = details_folder(path) / str(details.get("file"))
            if not file.is_file():
                yield f"record {record['seq']}: its details {file} are gone"
            elif sha256(file.read_bytes()).hexdigest() != details.get("sha256"):
                yield f"record {record['seq']}: its details {file} were changed"


def details_folder(path: Path) -> Path:
    """Where the details of a ledger's runs lie."""
    return path.with_name(path.stem + "-runs")


@dataclass(slots=True)
class Run:
    """A run that has begun. `finish` it, or its ledger says that it never ended.

    Attributes:
        id: unique; names the file of details.
        ended: whether the end is on record.
    """

    id: str
    ledger: Ledger
    ended: bool = field(default=False, init=False)

    def finish(
        self, verdict: str, figures: Mapping[str, Any], details: Any = None, reason: str = ""
    ) -> Record:
        """Put the end on record.

        Args:
            verdict: one word.
            figures: JSON values.
            details: any JSON value, kept in a file beside the ledger and sealed by its hash.
            reason: one line for people.
        """
        fields: Record = {
            "run": self.id,
            "verdict": verdict,
            "reason": reason,
            "figures": dict(figures),
        }
        if details is not None:
            fields["details"] = self._write(details)
        self.ended = True
        return self.ledger.append(ENDED, fields)

    def note(self, fields: Mapping[str, Any]) -> Record:
        """Put on record what a long run found before its end; JSON values."""
        return self.ledger.append(NOTED, {"run": self.id, **fields})

    def _write(self, details: Any) -> Record:
        folder = details_folder(self.ledger.path)
        folder.mkdir(parents=True, exist_ok=True)
        content = canonical_bytes(details) + b"\n"
        (folder / f"{self.id}.json").write_bytes(content)
        return {"file": f"{self.id}.json", "sha256": sha256(content).hexdigest()}


class Ledger:
    """An append-only file of runs; several processes may write to it at once.

    A last line that a crash left incomplete is cut off by the next append, which leaves a
    record of that: nothing complete is ever removed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, kind: str, fields: Mapping[str, Any]) -> Record:
        """Seal a record to the end of the chain, on disk when this returns.

        Raises:
            LedgerError: the last line is no record of this chain.
            OSError: it cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # released with the file
            last, torn = _tail(file, self.path)
            if torn:
                file.truncate(file.seek(0, os.SEEK_END) - len(torn))
                lost = {"bytes": len(torn), "sha256": sha256(torn).hexdigest()}
                last = _write(file, last, REPAIRED, lost)
            return _write(file, last, kind, fields)

    @contextmanager
    def run(self, command: str, *, rule: str, subject: str, **fields: Any) -> Iterator[Run]:
        """A run: its beginning goes on record now, its end at the latest when this is left.

        Args:
            command: e.g. "compare".
            rule: hash of what the run was fixed to beforehand.
            subject: what is examined, for people.
            fields: more that is known beforehand.
        """
        run = Run(uuid.uuid4().hex[:12], self)
        self.append(
            STARTED,
            {
                "run": run.id,
                "command": command,
                "rule": rule,
                "subject": subject,
                "versions": versions(),
                "hardware": hardware(),
                **fields,
            },
        )
        try:
            yield run
        except BaseException as error:
            if not run.ended:
                run.finish(ERROR, {}, reason=f"{type(error).__name__}: {error}"[:300])
            raise
        if not run.ended:
            run.finish(ERROR, {}, reason="the run ended without a verdict")


def _tail(file: IO[bytes], path: Path) -> tuple[Record | None, bytes]:
    """The last complete record, and what follows it without an end of line."""
    end = file.seek(0, os.SEEK_END)
    content = b""
    # Backwards in pieces until a whole line before the last piece is there.
    while end > 0 and content.count(b"\n") < 2:
        start = max(0, end - 65536)
        file.seek(start)
        content = file.read(end - start) + content
        end = start
    complete, _, torn = content.rpartition(b"\n")
    if not complete:
        return None, torn
    line = complete.rpartition(b"\n")[2]
    try:
        record: Record = json.loads(line)
        intact = record["hash"] == seal(record) and isinstance(record["seq"], int)
    except (ValueError, TypeError, KeyError):
        intact = False
    if not intact:
        raise LedgerError(f"{path}: its last line is no record of the chain; nothing was added")
    return record, torn


def _write(file: IO[bytes], last: Record | None, kind: str, fields: Mapping[str, Any]) -> Record:
    record: Record = {
        **fields,
        "kind": kind,
        "seq": 0 if last is None else last["seq"] + 1,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "previous": GENESIS if last is None else last["hash"],
    }
    record["hash"] = seal(record)
    file.write(canonical_bytes(record) + b"\n")
    file.flush()
    os.fsync(file.fileno())
    return record


@dataclass(frozen=True, slots=True)
class PastRun:
    """Both records of one run; `verdict` is "" for one that never ended."""

    id: str
    began: str
    command: str
    subject: str
    rule: str
    verdict: str
    reason: str
    figures: Mapping[str, Any]
    started: Record


def past_runs(records: tuple[Record, ...]) -> list[PastRun]:
    """The runs of a ledger in the order of their beginning."""
    # A record that was tampered with may lack any field; it is shown as far as it goes.
    ends = {str(record.get("run")): record for record in records if record.get("kind") == ENDED}
    found = []
    for record in records:
        if record.get("kind") == STARTED:
            began, command, subject, rule = (
                str(record.get(name, "")) for name in ("time", "command", "subject", "rule")
            )
            end = ends.get(str(record.get("run")), {})
            figures = end.get("figures")
            found.append(
                PastRun(
                    str(record.get("run", "")),
                    began,
                    command,
                    subject,
                    rule,
                    str(end.get("verdict", "")),
                    str(end.get("reason", "")),
                    figures if isinstance(figures, dict) else {},
                    record,
                )
            )
    return found
