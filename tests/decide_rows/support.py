"""Rows that are decided without a model, as a pure function of their text."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lockstep.decide_rows import Decided, Row, Rows, Run, Summary, decide_file
from lockstep.decisions import Choice, Decision, GatedCompletion
from lockstep.places import Places
from lockstep.types import Choice as Written
from lockstep.types import Completion, FinishReason, RequestError

QUESTION = Choice("", ["write", "skip"])
LONGEST = 200  # characters; longer rows do not fit the context


def decided(row: Row) -> Decided:
    """What comes of a row, whatever else is in flight."""
    text = row.given if isinstance(row.given, str) else row.given[-1]["content"]
    if len(text) > LONGEST:
        raise RequestError("too long", field="prompt", code="context_length_exceeded")
    number = hashlib.sha256(text.encode()).digest()[0]
    p = number / 255
    chosen = 0 if p >= 0.5 else 1
    decision = Decision(QUESTION, chosen, (p, 1 - p), 0.9, "prefix")
    written = Written(
        index=0,
        text=f"{text} is written" if chosen == 0 else "",
        token_ids=tuple(range(number % 7)) if chosen == 0 else (),
        logprobs=(),
        finish_reason=FinishReason.STOP if chosen == 0 else FinishReason.GATE,
    )
    completion = Completion("id", (1,) * len(text), (written,), cached_tokens=3)
    return Decided(GatedCompletion(decision, completion), len(text))


class Scripted:
    """Decides with a delay of its own for each row; counts what is in flight."""

    def __init__(self, delay: Callable[[Row], int] = lambda row: 0) -> None:
        self.delay = delay
        self.flying = self.most = self.calls = 0

    async def __call__(self, row: Row) -> Decided:
        self.calls += 1
        self.flying += 1
        self.most = max(self.most, self.flying)
        try:
            for _ in range(self.delay(row)):
                await asyncio.sleep(0)
            return decided(row)
        finally:
            self.flying -= 1


def written(path: Path, rows: Sequence[object]) -> Path:
    """A file of rows; bytes stand as they are."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def run(
    source: Path,
    out: Path,
    decide: Any = None,
    *,
    identity: str = "",
    places: int = 4,
    progress: Any = None,
    **rows: Any,
) -> Summary:
    """One call over a file."""

    async def whole() -> Summary:
        work = Run(
            rows=Rows(source, **rows),
            out=out,
            identity=identity,
            decide=decide or Scripted(),
            ready=lambda: True,
            places=Places(places),
        )
        return await decide_file(work, progress or (lambda part, totals: None))

    return asyncio.run(whole())


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
