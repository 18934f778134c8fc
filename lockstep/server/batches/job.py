"""The life of one batch: its lines checked, answered, and put into files.

Every stage can be cut off at any moment and begun again. What has happened is read from the
recorded batch (has checking ended? was it cancelled?) and from the journal (which lines have
a result?), never from memory.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from typing import Any, ParamSpec, TypeVar

from lockstep.server.batches.attempts import Sender
from lockstep.server.batches.checking import Checked, check_file
from lockstep.server.batches.journal import Entry, Journal, Tokens
from lockstep.server.batches.lines import (
    ENVELOPE_BYTES,
    Line,
    RowError,
    answered,
    check_line,
    read_lines,
    tokens_used,
    unanswered,
)
from lockstep.server.batches.objects import (
    BatchObject,
    BatchUsage,
    CachedTokens,
    Counts,
    Job,
    Problem,
    Problems,
    ReasoningTokens,
    Status,
)
from lockstep.server.batches.results import write_results
from lockstep.server.batches.store import Store

log = logging.getLogger("lockstep.server")
P = ParamSpec("P")
T = TypeVar("T")

DISK_PAUSE = 5.0  # seconds between tries to write
FLUSH_SECONDS = 5.0
READ_AHEAD_LINES = 64
READ_AHEAD_BYTES = 1 << 20

_MISSING: dict[Status, RowError] = {
    "cancelled": RowError(
        "batch_cancelled", "the batch was cancelled before this line was answered"
    ),
    "expired": RowError(
        "batch_expired", "the completion window ended before this line was answered"
    ),
}


class BatchRun:
    """One batch under way. `run` ends when the batch has; cancelling `run` leaves it for later.

    Args:
        sender: waits for an engine, and gives what answers lines.
        state: what routes find in `request.state`.
        served: the model of this server.

    Attributes:
        trouble: why nothing moves, or None.
    """

    def __init__(
        self,
        store: Store,
        job: Job,
        sender: Callable[[], Awaitable[Sender]],
        *,
        state: Mapping[str, Any],
        served: str,
        max_body: int,
        disk_pause: float = DISK_PAUSE,
    ) -> None:
        self.trouble: Problem | None = None
        self._store = store
        self._job = job
        self._sender = sender
        self._state = state
        self._served = served
        self._max_body = max_body
        self._disk_pause = disk_pause
        self._cancelled = asyncio.Event()
        self._journal: Journal | None = None

    @property
    def id(self) -> str:
        return self._job.batch.id

    def cancel(self) -> None:
        """Answer no more lines; the store has been told already."""
        self._cancelled.set()

    def describe(self, batch: BatchObject) -> None:
        """Add to a recorded batch what only memory knows."""
        if self._journal is not None and batch.in_progress_at is not None:
            batch.request_counts = self._counts(self._journal, batch.request_counts.total)
        if self.trouble is not None:
            batch.errors = Problems(data=[self.trouble])

    async def run(self) -> None:
        """Until the batch has ended, whatever the disk does."""
        while True:
            try:
                await self._stages()
            except OSError as error:
                self._stand_still(error)
            except Exception as error:  # a defect; the batch is not lost to it
                log.exception("batch %s failed", self.id)
                self.trouble = Problem(
                    code="internal_error", message=f"trying again after {error!r}"
                )
            else:
                return
            await asyncio.sleep(self._disk_pause)

    async def _stages(self) -> None:
        if not self._store.content(self._job.batch.input_file_id).exists():
            missing = Problem(code="input_file_missing", message="the input file is gone")
            await self._fail([missing], Counts())
            return
        journal = await to_the_end(Journal, self._store.journal(self.id))
        self._journal = journal
        try:
            batch = await self._refreshed()
            if batch.in_progress_at is None and not await self._check(journal):
                return
            if (await self._refreshed()).cancelling_at is None:
                await self._answer(journal)
            await self._finish(journal)
        finally:
            self._journal = None
            journal.close()

    # --- checking -----------------------------------------------------------------------

    async def _check(self, journal: Journal) -> bool:
        """Whether there is anything to answer."""
        batch = self._job.batch
        path = self._store.content(batch.input_file_id)
        checked = await stoppable(
            lambda stop: check_file(path, journal, batch.id, batch.endpoint, self._max_body, stop)
        )
        if not checked.good:
            problems = checked.problems or [
                Problem(code="empty_file", message="the input file has no lines")
            ]
            await self._fail(problems, Counts(total=checked.total, failed=checked.total))
            return False
        await self._change(lambda batch: _begin(batch, checked))
        self.trouble = None
        return True

    async def _fail(self, problems: list[Problem], counts: Counts) -> None:
        def fail(batch: BatchObject) -> None:
            batch.status = "failed"
            batch.failed_at = int(time.time())
            batch.errors = Problems(data=problems)
            batch.request_counts = counts

        await self._change(fail)

    # --- answering ----------------------------------------------------------------------

    async def _answer(self, journal: Journal) -> None:
        """Answer lines until all are, or the batch is cancelled, or its time is over."""
        if self._job.served == self._served:
            work = asyncio.create_task(self._answer_lines(journal))
        else:
            text = f"waiting for a server of {self._job.served!r}; this one serves {self._served!r}"
            self.trouble = Problem(code="model_not_served", message=text)
            work = asyncio.create_task(asyncio.Event().wait())  # type: ignore[arg-type]
        cancelled = asyncio.create_task(self._cancelled.wait())
        left = max(0.0, self._job.batch.expires_at - time.time())
        try:
            await asyncio.wait({work, cancelled}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            work.cancel()
            cancelled.cancel()
            await asyncio.gather(work, cancelled, return_exceptions=True)

    async def _answer_lines(self, journal: Journal) -> None:
        sender = await self._sender()
        most = sender.places.count
        results: asyncio.Queue[Entry] = asyncio.Queue(most)
        writer: asyncio.Task[None] = asyncio.create_task(self._write(journal, results))
        running: set[asyncio.Task[None]] = set()

        async def some_end() -> None:
            done, _ = await asyncio.wait({writer, *running}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            running.difference_update(done)

        try:
            async with aclosing(self._open_lines(journal)) as lines:
                async for line in lines:
                    while len(running) >= most:
                        await some_end()
                    running.add(asyncio.create_task(self._answer_line(sender, line, results)))
            while running:
                await some_end()
            await results.join()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            flushed = asyncio.create_task(results.join())  # what is computed is worth keeping
            if self.trouble is None:
                await asyncio.wait(
                    {writer, flushed}, timeout=FLUSH_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
            flushed.cancel()
            writer.cancel()
            await asyncio.gather(writer, flushed, return_exceptions=True)

    async def _open_lines(self, journal: Journal) -> AsyncGenerator[Line, None]:
        """The requests that have no result yet."""
        path = self._store.content(self._job.batch.input_file_id)
        with path.open("rb") as file:
            reader = read_lines(file, self._max_body + ENVELOPE_BYTES)
            while group := await to_the_end(self._read_ahead, reader, journal):
                for line in group:
                    yield line

    def _read_ahead(
        self, reader: Iterator[tuple[int, bytes | None]], journal: Journal
    ) -> list[Line]:
        group: list[Line] = []
        size = 0
        for number, text in reader:
            if number in journal:
                continue
            checked = check_line(number, text, self._job.batch.endpoint, self._max_body)
            if isinstance(checked, Line):  # the others have their row since the first pass
                group.append(checked)
                size += len(checked.body)
            if len(group) == READ_AHEAD_LINES or size >= READ_AHEAD_BYTES:
                break
        return group

    async def _answer_line(self, sender: Sender, line: Line, results: asyncio.Queue[Entry]) -> None:
        tokens: Tokens | None = None
        ok = False
        try:
            status, reply = await sender.answer(self._job.batch.endpoint, line.body, self._state)
            ok = 200 <= status < 300
            row = answered(self.id, line, status, reply)
            tokens = Tokens(*tokens_used(reply)) if ok else None
        except Exception:  # a defect; the line still gets its row
            log.exception("batch %s, line %d", self.id, line.number)
            error = RowError("internal_error", "the server met an unexpected error")
            row = unanswered(self.id, line.number, line.custom_id, error)
        await results.put(Entry.of(line.number, ok, row, tokens))

    async def _write(self, journal: Journal, results: asyncio.Queue[Entry]) -> None:
        """Put results into the journal, as many as there are with one sync.

        While the disk takes none, lines wait in the bounded queue, and so do those behind.
        """
        while True:
            entries = [await results.get()]
            while not results.empty():
                entries.append(results.get_nowait())
            while True:
                try:
                    await to_the_end(journal.append, entries)
                    break
                except OSError as error:
                    self._stand_still(error)
                    await asyncio.sleep(self._disk_pause)
            self.trouble = None
            for _ in entries:
                results.task_done()

    # --- finishing ----------------------------------------------------------------------

    async def _finish(self, journal: Journal) -> None:
        batch = await self._change(_finalize)
        counts = self._counts(journal, batch.request_counts.total)
        status: Status = "completed"
        if batch.cancelling_at is not None:
            status = "cancelled"
        elif counts.completed + counts.failed < counts.total:
            status = "expired"
        missing = _MISSING.get(status, RowError("internal_error", "the line has no result"))
        output, errors = await stoppable(
            lambda stop: write_results(
                self._store, self._job, journal, missing, self._max_body, stop
            )
        )
        counts.failed = counts.total - counts.completed

        def end(batch: BatchObject) -> None:
            batch.status = status
            setattr(batch, f"{status}_at", int(time.time()))
            batch.output_file_id = None if output is None else output.id
            batch.error_file_id = None if errors is None else errors.id
            batch.request_counts = counts
            batch.usage = _usage(journal.tokens)

        await self._change(end, [file for file in (output, errors) if file is not None])

    # --- shared -------------------------------------------------------------------------

    def _counts(self, journal: Journal, total: int) -> Counts:
        return Counts(total=total, completed=journal.ok, failed=journal.failed)

    async def _change(self, change: Callable[[BatchObject], None], files: Any = ()) -> BatchObject:
        self._job.batch = await to_the_end(
            self._store.change_batch, self.id, self._job.owner, change, files
        )
        return self._job.batch

    async def _refreshed(self) -> BatchObject:
        self._job.batch = await to_the_end(self._store.batch, self.id, self._job.owner)
        return self._job.batch

    def _stand_still(self, error: OSError) -> None:
        text = f"waiting for the disk, then going on: {error}"
        if self.trouble is None:
            log.error("batch %s: %s", self.id, text)
        self.trouble = Problem(code="storage_unavailable", message=text)


async def to_the_end(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run blocking work in a thread; a cancelled call waits for it before it gives way."""
    running = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise


async def stoppable(work: Callable[[threading.Event], T]) -> T:
    """As `to_the_end`, for long work: a cancelled call sets the event that `work` looks at."""
    stop = threading.Event()
    running = asyncio.ensure_future(asyncio.to_thread(work, stop))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait({running})
        raise


def _begin(batch: BatchObject, checked: Checked) -> None:
    batch.in_progress_at = int(time.time())
    batch.request_counts.total = checked.total
    batch.model = checked.model
    if batch.status == "validating":
        batch.status = "in_progress"


def _finalize(batch: BatchObject) -> None:
    batch.finalizing_at = int(time.time())
    if batch.status == "in_progress":
        batch.status = "finalizing"


def _usage(tokens: Tokens) -> BatchUsage:
    return BatchUsage(
        input_tokens=tokens.input,
        output_tokens=tokens.output,
        total_tokens=tokens.input + tokens.output,
        input_tokens_details=CachedTokens(cached_tokens=tokens.cached),
        output_tokens_details=ReasoningTokens(reasoning_tokens=tokens.reasoning),
    )
