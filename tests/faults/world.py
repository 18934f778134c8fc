"""Servers as processes of their own, which a test may hurt, and a crowd of clients.

Around the command's own main stands the scripted engine of `tests.server.support`; what a
server leaves in its temporary folder can be looked at, for each has one of its own.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.server.support import alive, wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = """
import asyncio, json, sys
from lockstep.cli.serve import _serve
from lockstep.config import ServerConfig
from tests.server.support import fake_llm
name, hang, engine, server = json.loads(sys.argv[1])
config = ServerConfig(port=0, log_format="json", **server)
sys.exit(7 if asyncio.run(_serve(fake_llm(name, hang, **engine), config)) else 0)
"""


class Served:
    """A server's process, its engine, its log and its temporary folder."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        hang_seconds: float = 600.0,
        files: int = 0,
        engine: dict[str, int] | None = None,
        **settings: Any,
    ) -> None:
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        self._log = folder / "log"
        arguments = json.dumps([name, hang_seconds, engine or {}, settings])

        def prepare() -> None:
            # As under a terminal, also where the suite runs under nohup: a server leaves a
            # SIGHUP alone that whoever started it ignores.
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            if files:
                resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

        with self._log.open("wb") as log:
            self.child = subprocess.Popen(
                [sys.executable, "-c", SCRIPT, arguments],
                stderr=log,
                cwd=REPOSITORY,
                env={**os.environ, "TMPDIR": str(self.temporary)},
                preexec_fn=prepare,
            )
        self.pid = self.child.pid

    @property
    def log(self) -> list[dict[str, Any]]:
        """Its log so far; what is no record is one with nothing but a message."""
        records: list[dict[str, Any]] = []
        for line in self._log.read_text().splitlines():
            try:
                records.append(json.loads(line))
            except ValueError:
                records.append({"level": "none", "message": line})
        return records

    def said(self, text: str) -> list[str]:
        """The messages of its log with `text` in them."""
        return [each["message"] for each in self.log if text in each["message"]]

    @property
    def url(self) -> str:
        (message,) = self.said("serving ")
        return str(message).split(" at ")[1].split("/v1")[0]

    def wait_ready(self) -> Served:
        wait_until(lambda: bool(self.said("serving ")) or self.child.poll() is not None, 60)
        assert self.child.poll() is None, self._log.read_text()
        return self

    def engines(self) -> list[int]:
        """Ids of its children that live."""
        try:
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        except FileNotFoundError:
            return []
        return [pid for pid in map(int, children.split()) if alive(pid)]

    @property
    def engine(self) -> int:
        (pid,) = self.engines()
        return pid

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, seconds: float = 30.0) -> int:
        return self.child.wait(seconds)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=20)

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=20)

    def metrics(self) -> dict[str, float]:
        """Values by name; of those with labels, `name{label="..."}` without the model's name."""
        found: dict[str, float] = {}
        for line in self.get("/metrics").text.splitlines():
            if line.startswith("lockstep:"):
                name, _, value = line.removeprefix("lockstep:").rpartition(" ")
                label = name.partition("{")
                plain = label[0] if label[2].startswith("model_name") else name
                found[plain] = float(value)
        return found

    def counted(self) -> tuple[int, int]:
        """Requests that the engine took, and those whose end or presence is accounted for."""
        metrics = self.metrics()
        outcomes = sum(v for k, v in metrics.items() if k.startswith("requests_outcome_total"))
        return (
            int(metrics["requests_accepted_total"]),
            int(outcomes + metrics["requests_in_flight"]),
        )

    def memory(self) -> int:
        """Bytes of its resident set."""
        pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize()

    def cpu_seconds(self) -> float:
        """Processor time that it has used, in both modes."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def leftovers(self) -> list[str]:
        return sorted(str(path.relative_to(self.temporary)) for path in self.temporary.rglob("*"))

    def end(self) -> None:
        for pid in (*self.engines(), self.pid):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.child.wait(10)


@contextmanager
def served(folder: Path, name: str = "parrot", **settings: Any) -> Iterator[Served]:
    """A server that takes requests."""
    server = Served(folder, name, **settings)
    try:
        yield server.wait_ready()
    finally:
        server.end()


class Asking(threading.Thread):
    """One client of a crowd, and all that it was told.

    Attributes:
        status: 0 until the head of the reply came. lines: those that are not empty.
        failure: of the connection, if it broke.
    """

    def __init__(self, url: str, path: str, body: dict[str, Any], timeout: float = 40) -> None:
        super().__init__(daemon=True)
        self._url, self.path, self.body, self._timeout = url, path, body, timeout
        self.status = 0
        self.lines: list[str] = []
        self.failure: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream(
                "POST", self._url + self.path, json=self.body, timeout=self._timeout
            ) as reply:
                self.status = reply.status_code
                self.lines.extend(line for line in reply.iter_lines() if line)
        except httpx.HTTPError as error:
            self.failure = error

    @property
    def streamed(self) -> bool:
        return bool(self.body.get("stream"))

    def last_event(self) -> dict[str, Any]:
        """What stands last in the reply, in front of the `[DONE]` that some routes write."""
        lines = [line for line in self.lines if line != "data: [DONE]"]
        found: dict[str, Any] = json.loads(lines[-1].removeprefix("data: "))
        return found

    def error(self) -> dict[str, Any] | None:
        """The error that the client was told, wherever its route puts it."""
        event = self.last_event()
        if event.get("type") == "response.failed":
            event = event["response"]
        found: dict[str, Any] | None = event.get("error")
        return found


def join(crowd: Sequence[Asking], seconds: float = 40.0) -> None:
    """Wait for all; nobody's connection may break or stay silent."""
    for asking in crowd:
        asking.join(seconds)
        assert not asking.is_alive(), (asking.path, asking.body)
        assert asking.failure is None, (asking.path, asking.body, asking.failure)
