"""The engine in a process of its own: the child's side of `client.py`.

Run as `python -m lockstep.engine.process`; the `Start` record comes in on standard
input (length-prefixed), everything else over one zmq pair socket. Standard input
stays open for the life of the parent, so its end means that the parent is gone.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import select
import shutil
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

import msgspec
import zmq

from lockstep import logs, messages
from lockstep.branch import BranchError
from lockstep.config import EngineConfig
from lockstep.text.grammar_matcher import COMPILE_SECONDS
from lockstep.types import LockstepError, RequestError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from lockstep.engine.loop import Engine
    from lockstep.text.grammar_matcher import CompiledGrammar

    EngineFactory = Callable[[EngineConfig, Callable[[str, float], None]], Engine]

log = logging.getLogger("lockstep.engine")

LENGTH = struct.Struct("<I")
EXIT_START_FAILED = 3
EXIT_FATAL = 4
EXIT_ORPHANED = 5
LINGER_MS = 2_000
PARKED_MS = 2  # between looks at a grammar under way
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def main() -> int:
    """Serve one engine until told to stop; returns the exit status."""
    # Ctrl-C, service managers and terminals that close reach the whole group; the parent decides
    # when to end, and until then this process finishes what the parent's clients wait for.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logs.configure()
    _set_up_process("lockstep-engine")
    start = _read_start(sys.stdin.buffer)
    arguments = (os.getppid(), Path(start.address.removeprefix("ipc://")).parent)
    threading.Thread(target=_exit_with_parent, args=arguments, daemon=True).start()
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.connect(start.address)
    try:
        return _serve(start, socket)
    finally:
        socket.close()
        context.term()


def resolve_factory(path: str) -> EngineFactory:
    """The callable that "module:qualified.name" stands for."""
    module, _, name = path.partition(":")
    value: object = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return cast("EngineFactory", value)


def _serve(start: messages.Start, socket: zmq.Socket[bytes]) -> int:
    def progress(stage: str, fraction: float) -> None:
        socket.send(messages.encode(messages.Progress(stage=stage, fraction=float(fraction))))

    try:
        engine = resolve_factory(start.factory)(start.config, progress)
    except Exception as error:
        if not isinstance(error, LockstepError):
            log.exception("the engine failed to start")
        text = str(error) or type(error).__name__
        if not isinstance(error, LockstepError):
            text = f"{type(error).__name__}: {text}"
        failed = messages.StartFailed(kind=type(error).__name__, message=text)
        socket.send(messages.encode(failed))
        return EXIT_START_FAILED
    socket.send(messages.encode(messages.Ready(info=engine.info, branches=engine.branches)))
    try:
        _loop(engine, socket, start.heartbeat_seconds)
    except Exception as error:
        log.exception("the engine loop failed")
        fatal = messages.Fatal(message=f"{type(error).__name__}: {error}")
        socket.send(messages.encode(fatal))
        return EXIT_FATAL
    finally:
        engine.close()
    return 0


def _loop(engine: Engine, socket: zmq.Socket[bytes], heartbeat_seconds: float) -> None:
    """Drain the inbox, run one step, report; until `Shutdown`."""
    parked: dict[str, _Parked] = {}
    spoken = time.monotonic()
    while True:
        idle = not engine.has_work() and not _wait(socket, parked, heartbeat_seconds)
        # A long prompt takes many steps that have nothing to report.
        if idle or time.monotonic() - spoken >= heartbeat_seconds:
            socket.send(messages.encode(messages.Heartbeat(stats=engine.stats())))
            spoken = time.monotonic()
        if idle:
            continue
        inbox = _drain(socket)
        if any(isinstance(message, messages.Shutdown) for message in inbox):
            return
        inbox = _park(engine, inbox, parked)
        accepted, rejected = _take(engine, inbox)
        for reply in _change_branches(engine, inbox):
            socket.send(messages.encode(reply))
        outputs = engine.step() if engine.has_work() else []
        if inbox or outputs:
            report = messages.StepReport(
                accepted=tuple(accepted),
                rejected=tuple(rejected),
                outputs=tuple(outputs),
                stats=engine.stats(),
            )
            socket.send(messages.encode(report))
            spoken = time.monotonic()


@dataclass(frozen=True, slots=True)
class _Parked:
    """A request that waits for its grammar: nobody else waits meanwhile."""

    message: messages.Submit
    grammar: Future[CompiledGrammar]
    until: float

    @property
    def ready(self) -> bool:
        """Whether there is a grammar or a complaint, or there has been time enough for one."""
        return self.grammar.done() or time.monotonic() >= self.until


def _wait(socket: zmq.Socket[bytes], parked: dict[str, _Parked], seconds: float) -> bool:
    """Whether a message came, or a parked request became ready, within a heartbeat."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if any(entry.ready for entry in parked.values()):
            return True
        left = end - time.monotonic()
        if socket.poll(PARKED_MS if parked else max(1, int(left * 1000))):
            return True
    return False


def _park(
    engine: Engine, inbox: list[messages.ToEngine], parked: dict[str, _Parked]
) -> list[messages.ToEngine]:
    """The messages to act on now: requests whose grammar is under way stay parked."""
    now: list[messages.ToEngine] = []
    for message in inbox:
        match message:
            case messages.Submit(request=request):
                grammar = engine.prepare(request)
                if grammar is not None and not grammar.done():
                    until = time.monotonic() + COMPILE_SECONDS
                    parked[request.id] = _Parked(message, grammar, until)
                    continue
            case messages.Cancel(request=request_id, choice=choice) if request_id in parked:
                # Its choices have not begun; one that is cancelled alone runs in vain.
                if choice is None:
                    del parked[request_id]
                continue
            case _:
                pass
        now.append(message)
    for request_id in [name for name, entry in parked.items() if entry.ready]:
        entry = parked.pop(request_id)
        engine.give_up(entry.grammar)
        now.append(entry.message)
    return now


def _drain(socket: zmq.Socket[bytes]) -> list[messages.ToEngine]:
    inbox: list[messages.ToEngine] = []
    while True:
        try:
            inbox.append(messages.decode_to_engine(socket.recv(zmq.NOBLOCK)))
        except zmq.Again:
            return inbox
        except msgspec.DecodeError:
            # The client checks what it sends; one message that slipped through ends no other.
            log.exception("dropped a message that cannot be read")


def _take(
    engine: Engine, inbox: list[messages.ToEngine]
) -> tuple[list[str], list[messages.Rejection]]:
    """Apply messages in their order; a request that fails here ends nothing else."""
    accepted: list[str] = []
    rejected: list[messages.Rejection] = []
    for message in inbox:
        match message:
            case messages.Submit(request=request):
                try:
                    engine.submit(request)
                except RequestError as error:
                    rejected.append(
                        messages.Rejection(
                            request=request.id,
                            message=str(error),
                            field=error.field,
                            code=error.code,
                        )
                    )
                except Exception as error:
                    log.exception("submitting request %s failed", request.id)
                    rejected.append(
                        messages.Rejection(
                            request=request.id,
                            message=f"{type(error).__name__}: {error}",
                            field="",
                            code="engine_error",
                        )
                    )
                else:
                    accepted.append(request.id)
            case messages.Cancel(request=request_id, choice=choice):
                engine.cancel(request_id, choice)
            case messages.FlushCache():
                engine.flush_cache()
    return accepted, rejected


def _change_branches(engine: Engine, inbox: list[messages.ToEngine]) -> list[messages.BranchReply]:
    """Load and unload what the messages say, in their order. A request that comes with such
    a message names the branches of before."""
    replies: list[messages.BranchReply] = []
    for message in inbox:
        if not isinstance(message, messages.LoadBranch | messages.UnloadBranch):
            continue
        branch, error = None, ""
        try:
            if isinstance(message, messages.LoadBranch):
                branch = engine.load_branch(message.name, message.folder)
            else:
                engine.unload_branch(message.name)
        except BranchError as refused:
            error = str(refused)
        except Exception as failure:
            log.exception("changing branch %s failed", message.name)
            error = f"{type(failure).__name__}: {failure}"
        reply = messages.BranchReply(ticket=message.ticket, branch=branch, error=error)
        replies.append(reply)
    return replies


def _read_start(stream: BinaryIO) -> messages.Start:
    (length,) = LENGTH.unpack(stream.read(LENGTH.size))
    return messages.decode_start(stream.read(length))


def _exit_with_parent(parent: int, folder: Path) -> None:
    """End the process as soon as the parent's end of standard input closes.

    The parent's id is looked at too: a process that it forked may hold the pipe open.

    Args:
        folder: private to the two, and removed for a parent that could not.
    """
    while os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], 1.0)
        if readable and not os.read(0, 4096):
            time.sleep(0.5)  # an orderly shutdown closes both; let it finish
            break
    if os.getppid() != parent:  # else it has only ended this process, and starts another
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(EXIT_ORPHANED)


def _set_up_process(name: str) -> None:
    """What Linux alone can do (elsewhere nothing).

    The name that `ps` and `top` show for the main thread; and when the parent dies, a process
    that somebody has stopped goes on, to find itself orphaned.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
