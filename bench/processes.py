"""Engines as process trees: CPU seconds, memory, and standing still while others are measured."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from bench.worker import MARK, Job, Result

_TICKS = os.sysconf("SC_CLK_TCK")


def tree(root: int) -> list[int]:
    """Process ids of `root` and everything below it that is alive."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, ahead = [], [root]
    while ahead:
        process = ahead.pop()
        found.append(process)
        ahead += children.get(process, ())
    return found


def cpu_seconds(root: int) -> float:
    """User and system time of the tree, living processes and reaped children."""
    return sum(map(_ticks, tree(root))) / _TICKS


def _ticks(process: int, *, children: bool = True) -> int:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return sum(int(field) for field in fields[11 : 15 if children else 13])


def pss_bytes(root: int) -> int:
    """Proportional set size of the tree: shared pages are counted once."""
    total = 0
    for process in tree(root):
        try:
            text = Path(f"/proc/{process}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return total * 1024


@dataclass(frozen=True)
class Measured:
    """A job's result beside the CPU seconds that the engine's whole tree used for it."""

    result: Result
    cpu: float


class Engine:
    """A worker in its own process group, stopped (SIGSTOP) whenever it is not measured.

    Args:
        name: for the table.
        command: that starts the worker.
        environment: added to this process's.

    Attributes:
        start_seconds: from the start of the process to its first generated token.
        peak_bytes: largest sum of PSS seen, sampled every quarter second while it runs.

    Raises:
        RuntimeError: it ended before it was ready; carries the end of its output.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: dict[str, str], log: Path
    ) -> None:
        self.name = name
        self.peak_bytes = 0
        self._running = threading.Event()
        self._log = log.open("w")
        began = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        self._running.set()
        threading.Thread(target=self._watch, daemon=True).start()
        try:
            self._receive()
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{log.read_text()[-2000:]}") from None
        self.start_seconds = time.perf_counter() - began
        self._signal(signal.SIGSTOP)

    def run(self, job: Job) -> Measured:
        """Run one job while every other engine stands still."""
        self._signal(signal.SIGCONT)
        time.sleep(0.3)  # threads that were spinning when they were stopped settle
        before = cpu_seconds(self._process.pid)
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(json.dumps(asdict(job)) + "\n")
        stdin.flush()
        result = Result(**self._receive())
        cpu = cpu_seconds(self._process.pid) - before
        self._signal(signal.SIGSTOP)
        return Measured(result, cpu)

    def close(self) -> None:
        """End the worker and everything it started."""
        self._running.clear()
        self._signal(signal.SIGCONT)
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            for process in tree(self._process.pid):
                os.kill(process, signal.SIGKILL)
        self._log.close()

    def _receive(self) -> dict[str, Any]:
        stdout: IO[str] | None = self._process.stdout
        assert stdout is not None
        for line in stdout:
            if line.startswith(MARK):
                message: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return message
        raise RuntimeError(f"{self.name} ended with status {self._process.wait()}")

    def _signal(self, number: int) -> None:
        for process in tree(self._process.pid):
            try:
                os.kill(process, number)
            except ProcessLookupError:
                continue

    def _watch(self) -> None:
        while self._running.is_set():
            self.peak_bytes = max(self.peak_bytes, pss_bytes(self._process.pid))
            time.sleep(0.25)


@dataclass(frozen=True)
class ServerCPU:
    """CPU seconds so far: of the server's own process, and of the engine's below it."""

    server: float
    engine: float


class Served:
    """A server of ours on a free port, ready when the constructor returns.

    Use as a context manager.

    Args:
        arguments: of Python, with "{port}" where the port belongs.
        log: file for all that it says.

    Raises:
        RuntimeError: it ended before it was ready; carries the end of its log.
    """

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = log.open("w")
        command = [sys.executable, *(each.format(port=port) for each in arguments)]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        while not self._ready():
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended\n{log.read_text()[-2000:]}")
            time.sleep(0.2)

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def cpu(self) -> ServerCPU:
        """As it stands, in steps of a clock tick."""
        below = tree(self._process.pid)[1:]
        return ServerCPU(
            server=_ticks(self._process.pid, children=False) / _TICKS,
            engine=sum(map(_ticks, below)) / _TICKS,
        )

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()
