"""All batches of a server: the oldest few run side by side, the rest wait."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from fastapi import FastAPI

from lockstep.config import ConfigError, ServerConfig
from lockstep.engine.client import EngineState, EngineUnavailable
from lockstep.places import Places
from lockstep.server.batches.attempts import READY_POLL, Sender
from lockstep.server.batches.inprocess import InProcess
from lockstep.server.batches.job import BatchRun
from lockstep.server.batches.objects import BatchObject, Job
from lockstep.server.batches.store import Store, remove_abandoned
from lockstep.server.batches.threads import to_the_end
from lockstep.server.generation import Service

log = logging.getLogger("lockstep.server")

SIDE_BY_SIDE = 4  # they share the places, so a short batch does not wait for a long one
SWEEP_SECONDS = 60.0
TEMPORARY = "lockstep-data-"


class Batches:
    """Files and batches of an application; stands at `app.state.batches`."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._service: Service = app.state.service
        self._config: ServerConfig = self._service.config
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._store: Store | None = None
        self._active: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._wake = asyncio.Event()
        self._sender: Sender | None = None

    @property
    def in_progress(self) -> int:
        """Batches that are being checked or answered, or that wait for what they need."""
        return len(self._active)

    @property
    def store(self) -> Store:
        """The directory.

        Raises:
            EngineUnavailable: the application has not started.
        """
        if self._store is None:
            raise EngineUnavailable("files and batches are not ready yet", retry_after=1.0)
        return self._store

    def open(self) -> None:
        """Take the data directory; calling again does nothing.

        Raises:
            ConfigError: as `Store`; a directory that cannot be made or written.
        """
        if self._store is not None:
            return
        folder = self._config.data_dir
        if not folder:
            remove_abandoned(Path(tempfile.gettempdir()), TEMPORARY)
            self._temporary = tempfile.TemporaryDirectory(prefix=TEMPORARY)
            folder = self._temporary.name
        try:
            self._store = Store(Path(folder).expanduser())
        except OSError as error:
            raise ConfigError(f"data_dir {folder!r} cannot be used: {error}") from error

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Work on batches inside the block; what has not ended then stays for the next time."""
        self.open()
        supervisor = asyncio.create_task(self._supervise())
        try:
            yield
        finally:
            tasks = [supervisor, *(task for _, task in self._active.values())]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.store.close()
            self._store = None
            if self._temporary is not None:
                self._temporary.cleanup()

    def wake(self) -> None:
        """There is a new batch."""
        self._wake.set()

    def cancel(self, batch_id: str) -> None:
        """Stop a batch that the store already calls cancelling."""
        if batch_id in self._active:
            self._active[batch_id][0].cancel()

    def describe(self, batch: BatchObject) -> BatchObject:
        """The same with what only memory knows: counts of this moment, why it stands still."""
        if batch.id in self._active:
            self._active[batch.id][0].describe(batch)
        return batch

    async def _supervise(self) -> None:
        while True:
            self._wake.clear()
            try:
                await to_the_end(self.store.remove_expired)
                for job in await to_the_end(self.store.unfinished, SIDE_BY_SIDE):
                    self._begin(job)
            except OSError as error:
                log.error("files and batches: %s", error)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), SWEEP_SECONDS)

    def _begin(self, job: Job) -> None:
        batch_id = job.batch.id
        if batch_id in self._active or len(self._active) == SIDE_BY_SIDE:
            return
        run = BatchRun(
            self.store,
            job,
            self._ready_sender,
            served=self._service.model_name,
            max_body=self._config.max_body_bytes,
        )

        def ended(task: asyncio.Task[None]) -> None:
            del self._active[batch_id]
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("batch %s: %r", batch_id, error)
            self.wake()

        task = asyncio.create_task(run.run())
        task.add_done_callback(ended)
        self._active[batch_id] = (run, task)

    async def _ready_sender(self) -> Sender:
        """What all batches share; made when the engine is there for the first time.

        As many lines at once as the engine runs sequences: it is full, its queue is not.
        """
        while not self._is_ready():
            await asyncio.sleep(READY_POLL)
        if self._sender is None:
            client = self._service.llm.client
            scheduler = client.config.scheduler.resolved(client.info.device)
            places = Places(self._config.batch_concurrency or scheduler.max_sequences)
            self._sender = Sender(InProcess(self._app).post, self._is_ready, places)
        return self._sender

    def _is_ready(self) -> bool:
        draining: bool = self._app.state.operations.draining
        return self._service.llm.client.state is EngineState.READY and not draining
