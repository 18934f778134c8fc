"""The door's side of an engine process: start it, feed it, notice its death, restart it.

Everything here runs on one asyncio loop and imports no torch.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from lockstep import messages
from lockstep.branch import Branch, BranchError
from lockstep.config import ConfigError, EngineConfig
from lockstep.engine.link import Link
from lockstep.engine.mailbox import OutputQueue
from lockstep.engine.process import LENGTH
from lockstep.engine.remote import RemoteBranches
from lockstep.types import (
    EngineInfo,
    EngineStats,
    LockstepError,
    ModelError,
    Request,
    RequestError,
)

log = logging.getLogger("lockstep.engine")

DEFAULT_FACTORY = "lockstep.engine.loop:Engine.from_config"
MAX_BACKOFF_SECONDS = 30.0
CLOSE_SECONDS = 5.0
HANG_SECONDS = 600.0  # of a large model, a step on a few cores takes minutes
LISTEN_SECONDS = 1.0  # between looks at the watchdog
START_SECONDS = 600.0  # for one stage of a start, such as reading the weights from a network

ProgressCallback = Callable[[str, float], None]


class EngineUnavailable(LockstepError):
    """No engine can take or finish a request now.

    Attributes:
        retry_after: seconds after which trying again makes sense; None when it does not.
    """

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineStartError(LockstepError):
    """The engine process ended before it was ready."""


class EngineState(StrEnum):
    """Where the engine process stands."""

    NEW = "not started yet"
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    CLOSED = "closed"


class EngineClient:
    """One engine process as seen from a door.

    `submit` returns once the engine has queued the request; its outputs then arrive
    on the queue that `submit` returned, ended by one with `finish` set for every
    choice, or by one exception. When the process dies, each queue gets an
    `EngineUnavailable` and the process is started again.

    Args:
        config: what to start.
        factory: "module:name" of the callable that builds the engine in the child.
        hang_seconds: an engine that says nothing for so long is killed and restarted;
            0 waits for ever. It speaks after every step or once in `heartbeat_seconds`, so
            the longest step must fit in. While it starts, it has `START_SECONDS` at least.

    Attributes:
        restarts: how often a new process has taken the place of one that died.
        silent: seconds for which the running process has said nothing, in steps of
            `LISTEN_SECONDS`.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        factory: str = DEFAULT_FACTORY,
        hang_seconds: float = HANG_SECONDS,
        heartbeat_seconds: float = 1.0,
    ) -> None:
        self.config = config
        self.state = EngineState.NEW
        self.stats = EngineStats()
        self._branches = RemoteBranches(config.branches.load)
        self.restarts = 0
        self.silent = 0.0
        self._factory = factory
        self._hang_seconds = hang_seconds
        self._heartbeat_seconds = heartbeat_seconds
        self._info: EngineInfo | None = None
        self._queues: dict[str, OutputQueue] = {}
        self._admissions: dict[str, asyncio.Future[None]] = {}
        self._live_choices: dict[str, int] = {}
        self._context: zmq.asyncio.Context | None = None
        self._link: Link | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._directory: Path | None = None
        self._launches = 0

    @property
    def info(self) -> EngineInfo:
        """What the engine said about itself when it was last ready."""
        if self._info is None:
            raise EngineUnavailable("the engine is not started yet", retry_after=self.retry_after)
        return self._info

    @property
    def branches(self) -> dict[str, Branch]:
        """The loaded branches, by name."""
        return self._branches.named

    @property
    def pid(self) -> int | None:
        """Process id of the running engine, or None."""
        return self._link.process.pid if self._link is not None else None

    @property
    def retry_after(self) -> float | None:
        """Whole seconds a (re)start takes, by the last one; None for an engine that was closed."""
        if self.state is EngineState.CLOSED:
            return None
        return float(max(1, math.ceil(self._info.load_seconds if self._info else 0.0)))

    async def start(self, progress: ProgressCallback | None = None) -> EngineInfo:
        """Start the process and wait until it takes requests.

        Raises:
            ModelError, ConfigError, BranchError: what the engine said about its model, settings
                or branches.
            EngineStartError: any other reason, the process's death included.
        """
        if self.state is not EngineState.NEW:
            raise EngineUnavailable(f"the engine is {self.state}; it cannot be started again")
        self.state = EngineState.STARTING
        self._directory = Path(tempfile.mkdtemp(prefix="lockstep-"))  # mode 0700
        self._context = zmq.asyncio.Context()
        try:
            await self._launch(progress)
        except BaseException:
            await self.close()
            raise
        self._supervisor = asyncio.create_task(self._supervise())
        return self.info

    async def submit(self, request: Request) -> OutputQueue:
        """Queue a request in the engine.

        Raises:
            RequestError: the engine refuses it (code "queue_full" when it is too busy).
            EngineUnavailable: there is no engine now.
        """
        self._check_ready()
        self._check_room()
        if request.id in self._queues:  # two would share one queue
            raise RequestError(
                f"request id {request.id!r} is in use", field="id", code="duplicate_id"
            )
        queue = OutputQueue()
        admission: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues[request.id] = queue
        self._live_choices[request.id] = request.sampling.n
        self._admissions[request.id] = admission
        try:
            self._send(messages.Submit(request=request))
            await admission
        except asyncio.CancelledError:
            self.cancel(request.id)
            raise
        except Exception:  # refused, no engine, or a value that cannot be sent
            self._forget(request.id)
            raise
        return queue

    def cancel(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one choice of it, at the engine's next step.

        The queue of a request that ends as a whole gets nothing more.
        """
        if request_id not in self._queues:
            return
        if choice is None:
            self._forget(request_id)
        if self.state is EngineState.READY:
            self._send(messages.Cancel(request=request_id, choice=choice))

    def abort(self, request_id: str, error: LockstepError) -> bool:
        """End a request in the engine; whoever waits for it gets `error`. False if unknown."""
        queue = self._queues.get(request_id)
        if queue is None:
            return False
        admission = self._admissions.pop(request_id, None)
        if admission is not None and not admission.done():
            admission.set_exception(error)
        self.cancel(request_id)
        queue.put_nowait(error)
        return True

    def flush_cache(self) -> None:
        """Forget cached prefixes before any request that is submitted later."""
        self._check_ready()
        self._send(messages.FlushCache())

    async def load_branch(self, name: str, folder: str) -> Branch:
        """Load a branch; one that had the name is there for requests that began, no longer.

        Raises:
            BranchError: it cannot be used; all is as it was.
            EngineUnavailable: there is no engine now.
        """
        self._check_ready()
        change, done = self._branches.load(name, folder)
        self._send(change)
        branch = await done
        assert branch is not None
        return branch

    async def unload_branch(self, name: str) -> None:
        """Refuse requests that name the branch from now on.

        Raises:
            BranchError: there is no such branch.
            EngineUnavailable: there is no engine now.
        """
        self._check_ready()
        change, done = self._branches.unload(name)
        self._send(change)
        await done

    async def close(self) -> None:
        """Stop the process (kindly, then firmly) and remove the private directory."""
        if self.state is EngineState.CLOSED:
            return
        was_ready = self.state is EngineState.READY
        self.state = EngineState.CLOSED
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        self._fail_all(EngineUnavailable("the engine was closed"))
        if was_ready and self._link is not None:
            self._send(messages.Shutdown())
        await self._reap(CLOSE_SECONDS if was_ready else 0.0)
        if self._context is not None:
            self._context.destroy(linger=0)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    # --- requests ---------------------------------------------------------------------

    def _check_ready(self) -> None:
        if self.state is EngineState.READY:
            return
        raise EngineUnavailable(f"the engine is {self.state}", retry_after=self.retry_after)

    def _check_room(self) -> None:
        """Refuse here what the engine's own queue limit would certainly refuse.

        At most `max_sequences` of the live requests run, so the others wait.
        """
        scheduler = self.config.scheduler.resolved(self._info.device if self._info else "cpu")
        limit = scheduler.max_queue
        if limit and len(self._queues) >= limit + scheduler.max_sequences:
            raise RequestError(
                f"the queue is full: {limit} requests are waiting", code="queue_full"
            )

    def _forget(self, request_id: str) -> None:
        self._queues.pop(request_id, None)
        self._live_choices.pop(request_id, None)
        admission = self._admissions.pop(request_id, None)
        if admission is not None and not admission.done():
            admission.cancel()

    def _fail_all(self, error: LockstepError) -> None:
        for admission in self._admissions.values():
            if not admission.done():
                admission.set_exception(error)
        self._branches.fail(error)
        for queue in self._queues.values():
            queue.put_nowait(error)
        self._admissions.clear()
        self._queues.clear()
        self._live_choices.clear()

    def _send(self, message: messages.Message) -> None:
        assert self._link is not None
        self._link.send(message)

    def _deliver(self, report: messages.StepReport) -> None:
        for request_id in report.accepted:
            admission = self._admissions.pop(request_id, None)
            if admission is not None and not admission.done():
                admission.set_result(None)
        for rejection in report.rejected:
            admission = self._admissions.pop(rejection.request, None)
            if admission is not None and not admission.done():
                admission.set_exception(_rejection_error(rejection))
        for output in report.outputs:
            queue = self._queues.get(output.request)
            if queue is None:
                continue
            queue.put_nowait(output)
            if output.finish is not None:
                self._live_choices[output.request] -= 1
                if not self._live_choices[output.request]:
                    self._forget(output.request)

    # --- the process ------------------------------------------------------------------

    async def _launch(self, progress: ProgressCallback | None) -> None:
        """Start a process and wait for `Ready`; on return the state is READY."""
        assert self._context is not None
        assert self._directory is not None
        self._launches += 1
        path = self._directory / f"engine-{self._launches}"
        socket = self._context.socket(zmq.PAIR)
        try:
            for option in (zmq.SNDHWM, zmq.RCVHWM):
                socket.setsockopt(option, 0)
            socket.bind(f"ipc://{path}")
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # the same import path as the parent's, and nothing from the current folder
                "-m",
                "lockstep.engine.process",
                stdin=asyncio.subprocess.PIPE,
                stdout=2,  # standard output belongs to the parent's own answers
                env=self._environment(),
            )
        except BaseException:
            socket.close(linger=0)
            path.unlink(missing_ok=True)
            raise
        self._link = Link(process, socket, path)
        start = messages.Start(
            address=f"ipc://{path}",
            factory=self._factory,
            config=replace(
                self.config,
                branches=self._branches.options(self.config.branches),
            ),
            heartbeat_seconds=self._heartbeat_seconds,
        )
        payload = messages.encode(start)
        assert process.stdin is not None
        process.stdin.write(LENGTH.pack(len(payload)) + payload)
        await self._wait_ready(self._link, progress)
        self.state = EngineState.READY

    def _environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in sys.path)
        threads = self.config.model.threads
        if threads:
            for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
                environment[name] = str(threads)
        return environment

    async def _wait_ready(self, link: Link, progress: ProgressCallback | None) -> None:
        stage = "starting"
        while True:
            try:
                message = await self._next(link, START_SECONDS)
            except TimeoutError:
                raise EngineStartError(
                    f"the engine process said nothing for {self.silent:.0f} s while {stage}"
                ) from None
            match message:
                case messages.Progress(stage=stage, fraction=fraction):
                    if progress is not None:
                        progress(stage, fraction)
                case messages.Ready(info=info, branches=branches):
                    self._info = info
                    self._branches.found(branches)
                    return
                case messages.StartFailed(kind=kind, message=text):
                    raise _start_error(kind, text)
                case None:
                    raise EngineStartError(f"the engine process {link.ending()} while {stage}")
                case _:
                    pass

    async def _supervise(self) -> None:
        """Read until the process dies, fail what was in flight, start it again; for ever."""
        while True:
            try:
                reason = await self._read_until_death()
            except msgspec.DecodeError as error:
                reason = f"the engine process sent what cannot be read: {error}"
            except Exception as error:  # whatever it was, nobody may wait for ever
                log.exception("reading from the engine process failed")
                reason = f"reading from the engine process failed ({type(error).__name__}: {error})"
            self.state = EngineState.RESTARTING
            self.stats = EngineStats()
            log.error("%s; restarting it", reason)
            self._fail_all(
                EngineUnavailable(f"{reason}; it is being restarted", retry_after=self.retry_after)
            )
            await self._reap(0.0)
            await self._relaunch()

    async def _relaunch(self) -> None:
        backoff = 1.0
        self._branches.forget_lost()
        while True:
            try:
                await self._launch(None)
            except Exception as error:  # no file left, no memory, ...: all of it may pass
                if isinstance(error, BranchError):  # rather none of them than no engine
                    log.error("all branches are lost")
                    self._branches.folders.clear()
                text = str(error) or type(error).__name__
                log.error("restarting the engine failed: %s; next try in %.0f s", text, backoff)
                await self._reap(0.0)
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)
            else:
                self.restarts += 1
                log.info("the engine is back")
                return

    async def _read_until_death(self) -> str:
        """Deliver reports while the process lives; returns how it ended."""
        assert self._link is not None
        fatal = ""
        while True:
            try:
                message = await self._next(self._link)
            except TimeoutError:
                return f"the engine process said nothing for {self.silent:.0f} s"
            match message:
                case messages.StepReport():
                    self.stats = message.stats
                    self._deliver(message)
                case messages.BranchReply():
                    self._branches.take(message)
                case messages.Heartbeat(stats=stats):
                    self.stats = stats
                case messages.Fatal(message=fatal):
                    pass
                case None:
                    ending = f"the engine process {self._link.ending()}"
                    return f"{ending} ({fatal})" if fatal else ending
                case _:
                    pass

    async def _next(self, link: Link, least: float = 0.0) -> messages.FromEngine | None:
        """As `Link.receive`, for as long as the watchdog allows.

        Silence is what was waited for: while this process is stopped, none is counted.

        Raises:
            TimeoutError: nothing came within `hang_seconds`, or `least` if that is more.
        """
        self.silent = 0.0
        limit = max(least, self._hang_seconds) if self._hang_seconds > 0 else math.inf
        while True:
            try:
                message = await link.receive(timeout=LISTEN_SECONDS)
            except TimeoutError:
                self.silent += LISTEN_SECONDS
                if self.silent >= limit:
                    raise
            else:
                self.silent = 0.0
                return message

    async def _reap(self, patience: float) -> None:
        """End the process if it still runs, and let go of its socket."""
        link, self._link = self._link, None
        if link is not None:
            await link.close(patience)


def _start_error(kind: str, text: str) -> LockstepError:
    for error in (ModelError, ConfigError, BranchError):
        if kind == error.__name__:
            return error(text)
    return EngineStartError(f"the engine failed to start: {text}")


def _rejection_error(rejection: messages.Rejection) -> LockstepError:
    if rejection.code == "engine_error":
        return LockstepError(f"the engine failed to take the request: {rejection.message}")
    return RequestError(rejection.message, field=rejection.field, code=rejection.code)
