"""The rows that answer an input's rows: an append-only file in the input's order.

A row counts once it is in the file with its line feed. Each holds the number of its input
line, so a file tells by itself where the work stopped; a torn end, which a kill or a power
failure leaves, is cut off when the file is opened again.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from lockstep.decide_rows.rows import Row
from lockstep.decisions import Decision, GatedCompletion
from lockstep.durable import hold
from lockstep.types import RequestError

SYNC_SECONDS = 1.0


class Failure(msgspec.Struct):
    """Why a row has no decision."""

    code: str
    message: str
    param: str | None = None


class Usage(msgspec.Struct):
    """Tokens of the row's prompt, the question included, and of what was written."""

    prompt_tokens: int
    completion_tokens: int


class Result(msgspec.Struct, omit_defaults=True):
    """One row of the output: a decision and what was written, or an error. Nothing in it
    depends on when, or with which other rows, it was computed.

    Attributes:
        line: number of the input line, from 1. id: the row's own.
        decision: the option that won; true or false of a predicate.
        probabilities: of the options, in their order. confidence, mass: as `Decision`.
        text: the whole reply; a forced prefix and its option are its beginning. "" where the
            gate stayed closed.
        finish_reason: "gate" where it stayed closed, else why the text ended.
    """

    line: int
    id: str | int | None = None
    decision: str | bool | None = None
    probabilities: dict[str, float] | None = None
    confidence: float | None = None
    mass: float | None = None
    source: str | None = None
    text: str | None = None
    finish_reason: str | None = None
    usage: Usage | None = None
    error: Failure | None = None

    @classmethod
    def of(cls, row: Row, answer: GatedCompletion, prompt_tokens: int) -> Self:
        """What came of a row."""
        decision, completion = answer.decision, answer.completion
        return cls(
            line=row.line,
            id=row.id,
            decision=decision.value,
            probabilities=_by_option(decision),
            confidence=decision.confidence,
            mass=decision.mass,
            source=decision.source,
            text=completion.text,
            finish_reason=str(completion.finish_reason),
            usage=Usage(prompt_tokens, len(completion.token_ids)),
        )

    @classmethod
    def failed(cls, line: int, own: str | int | None, error: Exception, code: str) -> Self:
        """What went wrong with a row."""
        param = getattr(error, "field", "") or None
        return cls(line=line, id=own, error=Failure(code, str(error), param))


def _by_option(decision: Decision) -> dict[str, float]:
    options = decision.question.options
    return {o.text: p for o, p in zip(options, decision.probabilities, strict=True)}


@dataclass(slots=True)
class Totals:
    """What the rows of an output add up to.

    Attributes:
        rows: all of them. failed: those with an error, by code.
        decisions: rows by option. wrote: rows with a text.
        prompt_tokens, completion_tokens: of all rows.
    """

    rows: int = 0
    wrote: int = 0
    decisions: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, result: Result) -> None:
        """Count one row."""
        self.rows += 1
        if result.error is not None:
            self.failed[result.error.code] += 1
            return
        decision = result.decision
        self.decisions[str(decision).lower() if isinstance(decision, bool) else str(decision)] += 1
        self.wrote += result.finish_reason != "gate"
        if result.usage is not None:
            self.prompt_tokens += result.usage.prompt_tokens
            self.completion_tokens += result.usage.completion_tokens


class Results:
    """An output under way, held by one call at a time.

    Args:
        path: made if missing.

    Attributes:
        last: number of the input line of the last row; 0 for none.
        totals: of the rows so far.

    Raises:
        RequestError: another call holds it, or its rows are not in order (not such a file).
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.last = 0
        self.totals = Totals()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            hold(self._file, path)
            self._size = self._recover()
            os.ftruncate(self._file, self._size)
        except BaseException:
            os.close(self._file)
            raise
        self._synced = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            os.fsync(self._file)
        finally:
            os.close(self._file)

    def append(self, result: Result) -> None:
        """Write a row; it survives the end of this process at once, and a loss of power after
        `SYNC_SECONDS`.

        Raises:
            OSError: the row is not in the file.
        """
        assert result.line > self.last
        view = memoryview(msgspec.json.encode(result) + b"\n")
        position = self._size
        try:
            while view:  # one call may write less than it was given
                written = os.pwrite(self._file, view, position)
                view, position = view[written:], position + written
        except OSError as error:
            os.ftruncate(self._file, self._size)
            error.filename = str(self._path)
            raise
        self._size, self.last = position, result.line
        self.totals.add(result)
        if time.monotonic() - self._synced > SYNC_SECONDS:
            os.fsync(self._file)
            self._synced = time.monotonic()

    def _recover(self) -> int:
        """Count the whole rows; where the last of them ends."""
        end = 0
        with self._path.open("rb") as file:
            for raw in file:
                try:
                    result = _decode(raw) if raw.endswith(b"\n") else None
                except msgspec.DecodeError:
                    result = None
                if result is None:
                    break
                if result.line <= self.last:
                    raise RequestError(
                        f"{self._path} holds rows out of order (line {result.line} after "
                        f"{self.last}); remove it, or choose another output",
                        field="out",
                    )
                self.last = result.line
                self.totals.add(result)
                end += len(raw)
        return end


_decode: Any = msgspec.json.Decoder(Result).decode
