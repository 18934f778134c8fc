"""The life of one batch: its lines checked, answered, and put into files.

Every stage can be cut off at any moment and begun again. What has happened is read from the
recorded batch (has checking ended? was it cancelled?) and from the journal (which lines have
a result?), never from memory.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from lockstep.server.batches.answering import DISK_PAUSE, Answering
from lockstep.server.batches.attempts import Sender
from lockstep.server.batches.checking import Checked, check_file
from lockstep.server.batches.journal import Journal, Tokens
from lockstep.server.batches.lines import RowError, Source
from lockstep.server.batches.objects import (
    BatchObject,
    BatchUsage,
    CachedTokens,
    Counts,
    FileObject,
    Job,
    Problem,
    Problems,
    ReasoningTokens,
    Status,
)
from lockstep.server.batches.results import write_results
from lockstep.server.batches.store import Store
from lockstep.server.batches.threads import stoppable, to_the_end

log = logging.getLogger("lockstep.server")

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
        served: str,
        max_body: int,
        disk_pause: float = DISK_PAUSE,
    ) -> None:
        self.trouble: Problem | None = None
        self._store = store
        self._job = job
        self._sender = sender
        self._served = served
        batch = job.batch
        path = store.content(batch.input_file_id)
        self._source = Source(path, batch.id, batch.endpoint, max_body)
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
                self._disk(error)
            except Exception as error:  # a defect; the batch is not lost to it
                log.exception("batch %s failed", self.id)
                self.trouble = Problem(
                    code="internal_error", message=f"trying again after {error!r}"
                )
            else:
                return
            await asyncio.sleep(self._disk_pause)

    async def _stages(self) -> None:
        if not self._source.path.exists():
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
        checked = await stoppable(lambda stop: check_file(self._source, journal, stop))
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
        work = asyncio.create_task(self._answer_lines(journal))
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
        if self._job.served != self._served:
            text = f"waiting for a server of {self._job.served!r}; this one serves {self._served!r}"
            self.trouble = Problem(code="model_not_served", message=text)
            await asyncio.Event().wait()
        sender = await self._sender()
        answering = Answering(
            self._source, journal, sender, self._job.owner, self._disk, self._disk_pause
        )
        await answering.run()

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
                self._store, self._source, journal, missing, self._job.keep_seconds, stop
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

    async def _change(
        self, change: Callable[[BatchObject], None], files: Sequence[FileObject] = ()
    ) -> BatchObject:
        self._job.batch = await to_the_end(
            self._store.change_batch, self.id, self._job.owner, change, files
        )
        return self._job.batch

    async def _refreshed(self) -> BatchObject:
        self._job.batch = await to_the_end(self._store.batch, self.id, self._job.owner)
        return self._job.batch

    def _disk(self, error: OSError | None) -> None:
        if error is None:
            self.trouble = None
            return
        text = f"waiting for the disk, then going on: {error}"
        if self.trouble is None:
            log.error("batch %s: %s", self.id, text)
        self.trouble = Problem(code="storage_unavailable", message=text)


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
