"""The middle pass: every request of a file that has no result yet gets one, in the journal."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, closing

from lockstep.server.batches.attempts import Sender
from lockstep.server.batches.journal import Entry, Journal, Tokens
from lockstep.server.batches.lines import (
    BadLine,
    Line,
    RowError,
    Source,
    answered,
    tokens_used,
    unanswered,
)
from lockstep.server.batches.threads import to_the_end

log = logging.getLogger("lockstep.server")

DISK_PAUSE = 5.0  # seconds between tries to write
FLUSH_SECONDS = 5.0
READ_AHEAD_LINES = 64
READ_AHEAD_BYTES = 1 << 20


class Answering:
    """One pass over a file. Holds as many requests and results as the sender has places.

    Args:
        owner: whose lines they are.
        disk: told what is wrong with the disk while results wait for it, and None after.
    """

    def __init__(
        self,
        source: Source,
        journal: Journal,
        sender: Sender,
        owner: str,
        disk: Callable[[OSError | None], None],
        disk_pause: float = DISK_PAUSE,
    ) -> None:
        self._source = source
        self._journal = journal
        self._sender = sender
        self._owner = owner
        self._disk = disk
        self._disk_pause = disk_pause
        self._stuck = False
        self._results: asyncio.Queue[Entry] = asyncio.Queue(sender.places.count)

    async def run(self) -> None:
        """Until every request has its result. Cancelled, it ends the requests in the engine
        and keeps the results that are there.

        Raises:
            OSError: the source cannot be read.
        """
        most = self._sender.places.count
        writer: asyncio.Task[None] = asyncio.create_task(self._write())
        running: set[asyncio.Task[None]] = set()

        async def some_end() -> None:
            done, _ = await asyncio.wait({writer, *running}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            running.difference_update(done)

        try:
            async with aclosing(self._open_lines()) as lines:
                async for line in lines:
                    while len(running) >= most:
                        await some_end()
                    running.add(asyncio.create_task(self._answer(line)))
            while running:
                await some_end()
            await self._results.join()
        finally:
            await _ended(running)
            flushed = asyncio.create_task(self._results.join())
            if not self._stuck:
                await asyncio.wait(
                    {writer, flushed}, timeout=FLUSH_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
            await _ended({writer, flushed})

    async def _open_lines(self) -> AsyncGenerator[Line, None]:
        """The requests that have no result yet."""
        with closing(self._source.lines()) as lines:
            while group := await to_the_end(self._read_ahead, lines):
                for line in group:
                    yield line

    def _read_ahead(self, lines: Iterator[Line | BadLine]) -> list[Line]:
        group: list[Line] = []
        size = 0
        for line in lines:
            # Bad lines have had their row since the first pass.
            if isinstance(line, BadLine) or line.number in self._journal:
                continue
            group.append(line)
            size += len(line.body)
            if len(group) == READ_AHEAD_LINES or size >= READ_AHEAD_BYTES:
                break
        return group

    async def _answer(self, line: Line) -> None:
        source = self._source
        tokens: Tokens | None = None
        ok = False
        try:
            status, reply = await self._sender.answer(source.endpoint, line.body, self._owner)
            ok = 200 <= status < 300
            row = answered(source.name, line, status, reply)
            tokens = Tokens(*tokens_used(reply)) if ok else None
        except Exception:  # a defect; the line still gets its row
            log.exception("%s, line %d", source.name, line.number)
            error = RowError("internal_error", "the server met an unexpected error")
            row = unanswered(source.name, line.number, line.custom_id, error)
        await self._results.put(Entry.of(line.number, ok, row, tokens))

    async def _write(self) -> None:
        """Put results into the journal, as many as there are with one sync.

        While the disk takes none, lines wait in the bounded queue, and so do those behind.
        """
        while True:
            entries = [await self._results.get()]
            while not self._results.empty():
                entries.append(self._results.get_nowait())
            while True:
                try:
                    await to_the_end(self._journal.append, entries)
                    break
                except OSError as error:
                    self._stuck = True
                    self._disk(error)
                    await asyncio.sleep(self._disk_pause)
            if self._stuck:
                self._stuck = False
                self._disk(None)
            for _ in entries:
                self._results.task_done()


async def _ended(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
