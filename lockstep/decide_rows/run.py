"""Many rows in the engine at once, one output in the input's order, whatever stops it.

Work goes on in a part beside the output, under a name made of the input's bytes, the options
and the model: the same call again takes it up behind its last row; another input or other
options are not mixed with it. Finished, the part gets the output's name.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lockstep.decide_rows.results import Result, Results, Totals
from lockstep.decide_rows.rows import BadRow, Row, Rows
from lockstep.decisions import GatedCompletion
from lockstep.durable import sync_folder
from lockstep.engine.client import EngineUnavailable
from lockstep.outputs import GenerationError
from lockstep.places import Places
from lockstep.types import RequestError

log = logging.getLogger("lockstep.decide_rows")

IN_COMPANY = 2  # attempts of a row whose engine died under it, or whose step failed
ALONE = 2  # and then with no other row in the engine
READ_AHEAD = 4  # rows read or waiting for one before them, for each place in the engine
READ_AHEAD_BYTES = 32 << 20
READY_POLL = 0.1
PAUSE = 0.25  # seconds until a full queue is tried again

Progress = Callable[[float, Totals], None]  # part of the input that is done, 0 to 1


@dataclass(frozen=True, slots=True)
class Decided:
    """What came of a row; `prompt_tokens`: read for it, the question included."""

    answer: GatedCompletion
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Run:
    """What is to be done.

    Attributes:
        identity: of what the answers depend on, beside the input: model and options.
        decide: decides about a row and writes. Raises RequestError for a row that cannot be
            served, EngineUnavailable and GenerationError.
        ready: whether the engine takes requests. places: rows in it at once.
    """

    rows: Rows
    out: Path
    identity: str
    decide: Callable[[Row], Awaitable[Decided]]
    ready: Callable[[], bool]
    places: Places


@dataclass(frozen=True, slots=True)
class Summary:
    """`totals` of the whole output, of which an earlier call left `resumed` rows; of this call
    the `cached_tokens` of its prompts, which came from the prefix cache."""

    totals: Totals
    resumed: int
    cached_tokens: int


class _Answered(NamedTuple):
    """A row of the output; of its prompt the tokens that came from the prefix cache."""

    result: Result
    cached_tokens: int = 0


def check_output(out: Path) -> None:
    """Refuse what no finished rows could be put at.

    Raises:
        RequestError: it exists, or its folder does not.
    """
    if out.exists():
        raise RequestError(f"{out} exists; choose another output or remove it", field="out")
    if not out.absolute().parent.is_dir():
        raise RequestError(f"{out}: there is no folder {out.absolute().parent}", field="out")


async def decide_file(run: Run, progress: Progress) -> Summary:
    """Decide about every row of a file into `run.out`, one row each, in the input's order.

    Holds a bounded number of rows. Cancelled, it keeps the rows that are written.

    Raises:
        RequestError: as `check_output`; a part of the output is of other work or in use, or
            the file has no rows.
        OSError: a file cannot be read or written.
    """
    check_output(run.out)
    digest, lines = await _digest(run.rows.path, run.identity)
    part = run.out.with_name(f"{run.out.name}.{digest}.part")
    for other in run.out.absolute().parent.iterdir():
        name = other.name
        if name.startswith(f"{run.out.name}.") and name.endswith(".part") and name != part.name:
            raise RequestError(
                f"{other} holds rows of another input, other options or another model: remove it, "
                "or choose another output",
                field="out",
            )
    with Results(part) as results:
        resumed = results.totals.rows
        cached = await _work(
            run, results, lambda: progress(results.last / max(1, lines), results.totals)
        )
    if not results.totals.rows:
        part.unlink()
        raise RequestError(f"{run.rows.path} has no rows", field="file")
    part.rename(run.out)
    sync_folder(run.out.absolute().parent)
    return Summary(results.totals, resumed, cached)


async def _work(run: Run, results: Results, advanced: Callable[[], None]) -> int:
    """Tokens of the prompts that came from the prefix cache."""
    pending: deque[tuple[int, asyncio.Task[_Answered]]] = deque()  # with the bytes of its line
    done, held, cached = results.last, 0, 0
    with closing(run.rows.lines()) as lines:
        rest = ((number, text) for number, text in lines if number > done)
        try:
            advanced()
            while True:
                while len(pending) < READ_AHEAD * run.places.count and held < READ_AHEAD_BYTES:
                    line = next(rest, None)
                    if line is None:
                        break
                    size = len(line[1] or b"")
                    held += size
                    pending.append((size, asyncio.create_task(_answer(run, *line))))
                if not pending:
                    return cached
                size, first = pending[0]
                await asyncio.wait({first})
                result, more = first.result()
                results.append(result)
                cached += more
                pending.popleft()
                held -= size
                advanced()
        finally:
            tasks = [task for _, task in pending]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(run: Run, line: int, text: bytes | None) -> _Answered:
    """The row of the output, whatever the line holds."""
    own = None
    try:
        row = run.rows.parse(line, text)
        own = row.id
        done = await _patiently(run, row)
        return _Answered(
            Result.of(row, done.answer, done.prompt_tokens), done.answer.completion.cached_tokens
        )
    except BadRow as error:
        return _Answered(Result.failed(line, error.id, error, error.code))
    except RequestError as error:
        return _Answered(Result.failed(line, own, error, error.code))
    except GenerationError as error:
        return _Answered(Result.failed(line, own, error, "engine_error"))
    except EngineUnavailable as error:
        if error.retry_after is None:
            raise
        return _Answered(Result.failed(line, own, error, "engine_error"))
    except Exception as error:  # a defect; the others still get their rows
        log.exception("line %d", line)
        return _Answered(Result.failed(line, own, error, "internal_error"))


async def _patiently(run: Run, row: Row) -> Decided:
    """One row, which may be the cause of what goes wrong or a bystander: see
    `server.batches.attempts`."""
    failures = 0
    while True:
        async with run.places.take(alone=failures >= IN_COMPANY):
            while not run.ready():
                await asyncio.sleep(READY_POLL)
            try:
                return await run.decide(row)
            except RequestError as error:
                if error.code != "queue_full":
                    raise
            except (EngineUnavailable, GenerationError) as error:
                closed = isinstance(error, EngineUnavailable) and error.retry_after is None
                failures += 1
                if closed or failures == IN_COMPANY + ALONE:
                    raise
        await asyncio.sleep(PAUSE)


async def _digest(file: Path, salt: str) -> tuple[str, int]:
    """16 hex digits over the file's bytes and the salt, and its number of lines."""
    stop = threading.Event()

    def read() -> tuple[str, int]:
        found, lines, block = hashlib.sha256(salt.encode() + b"\n"), 0, b"\n"
        with file.open("rb") as content:
            while not stop.is_set() and (more := content.read(1 << 20)):
                found.update(more)
                block = more
                lines += block.count(b"\n")
        return found.hexdigest()[:16], lines + (not block.endswith(b"\n"))

    try:
        return await asyncio.to_thread(read)
    finally:
        stop.set()
