"""Stopping: what runs finishes, what is new is turned away, and nobody waits for ever."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.support import ServerThread, alive, fake_llm, wait_until

WORDS = "one two three four five six seven eight nine ten "
SCRIPT = """
import asyncio, sys
from lockstep import logs
from lockstep.cli.serve import _serve
from lockstep.config import ServerConfig
from tests.server.support import fake_llm
logs.configure("json")
config = ServerConfig(port=0, drain_seconds=int(sys.argv[1]), log_format="json")
sys.exit(7 if asyncio.run(_serve(fake_llm("slow"), config)) else 0)
"""


class Process:
    """The command's own main, around the slow parrot, in a process that can be signalled."""

    def __init__(self, repository: Path, drain_seconds: int) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(drain_seconds)],
            stderr=subprocess.PIPE,
            text=True,
            cwd=repository,
        )
        assert self._child.stderr is not None
        for line in self._child.stderr:
            message = json.loads(line)["message"]
            if message.startswith("serving"):
                self.url = message.split(" at ")[1].split("/v1")[0]
                break

    def running(self) -> int:
        return int(httpx.get(f"{self.url}/stats").json()["running"])

    def signal(self, number: int = signal.SIGTERM) -> None:
        os.kill(self._child.pid, number)

    def engine(self) -> int:
        pid = self._child.pid
        (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(child)

    def wait(self, seconds: float = 40.0) -> int:
        return self._child.wait(seconds)

    def end(self) -> str:
        if self._child.poll() is None:
            self._child.kill()
        return self._child.communicate()[1]


@contextmanager
def running(repository: Path, drain_seconds: int) -> Iterator[Process]:
    process = Process(repository, drain_seconds)
    try:
        yield process
    finally:
        process.end()


def body(words: int, **more: Any) -> dict[str, Any]:
    prompt = (WORDS * 40).split()[:words]
    return {"model": "slow", "prompt": " ".join(prompt), "max_tokens": 400, **more}


class Asking(threading.Thread):
    """A client in a thread; `begun` once the first byte of the answer is there."""

    def __init__(self, url: str, content: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._url, self._content = url, content
        self.begun = threading.Event()
        self.lines: list[str] = []
        self.failure: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream(
                "POST", f"{self._url}/v1/completions", json=self._content, timeout=30
            ) as reply:
                for line in reply.iter_lines():
                    self.begun.set()
                    if line:
                        self.lines.append(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            self.failure = error

    def text(self) -> str:
        self.join(40)
        assert self.failure is None
        chunks = [json.loads(line) for line in self.lines if line != "[DONE]"]
        return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk.get("choices"))


def test_the_first_sigterm_lets_answers_finish(repository: Path) -> None:
    with running(repository, 20) as process:
        engine = process.engine()
        streamed = Asking(process.url, body(120, stream=True))
        whole = Asking(process.url, body(110))
        assert streamed.begun.wait(30)
        wait_until(lambda: process.running() == 2)
        kept = httpx.Client()  # a connection from before, as a balancer keeps it
        assert kept.get(f"{process.url}/ready").status_code == 200
        process.signal()
        os.kill(engine, signal.SIGTERM)  # as service managers do that signal the whole group
        wait_until(lambda: kept.get(f"{process.url}/ready").status_code == 503)
        for reply in (
            kept.post(f"{process.url}/v1/completions", json=body(3)),
            httpx.post(f"{process.url}/v1/completions", json=body(3)),
        ):
            assert reply.status_code == 503
            assert int(reply.headers["retry-after"]) >= 1
            assert reply.json()["error"]["code"] == "draining"
        assert kept.get(f"{process.url}/health").status_code == 200
        assert streamed.text() == body(120)["prompt"]
        assert streamed.lines[-1] == "[DONE]"
        assert whole.text() == body(110)["prompt"]
        assert process.wait() == 0
        assert not alive(engine)


def test_what_is_not_done_in_time_ends_with_an_error(repository: Path) -> None:
    with running(repository, 1) as process:
        streamed = Asking(process.url, body(300, stream=True))
        whole = Asking(process.url, body(300))
        assert streamed.begun.wait(30)
        wait_until(lambda: process.running() == 2)
        began = time.monotonic()
        process.signal()
        assert process.wait() == 0
        assert time.monotonic() - began >= 1.0
        for asking in (streamed, whole):
            asking.join(40)
            assert asking.failure is None
        assert streamed.lines[-1] == "[DONE]"
        for line in (streamed.lines[-2], whole.lines[-1]):
            assert json.loads(line)["error"]["code"] == "draining"


def test_the_second_signal_exits_at_once(repository: Path) -> None:
    with running(repository, 60) as process:
        streamed = Asking(process.url, body(300, stream=True))
        assert streamed.begun.wait(30)
        process.signal(signal.SIGINT)
        time.sleep(0.3)
        began = time.monotonic()
        process.signal(signal.SIGTERM)
        assert process.wait() == 7
        assert time.monotonic() - began < 20.0  # and not the 60 s of the drain


def test_draining_by_the_operator_can_be_taken_back() -> None:
    with ServerThread(lambda: fake_llm("slow"), admin_keys=("boss",)) as server:
        http = httpx.Client(base_url=server.url, headers={"authorization": "Bearer boss"})
        running = threading.Thread(
            target=lambda: http.post("/v1/completions", json=body(60), timeout=30)
        )
        running.start()
        wait_until(lambda: server.llm.stats().running == 1)
        assert http.post("/admin/drain").json() == {"draining": True, "in_flight": 1}
        assert http.get("/ready").status_code == 503
        assert http.get("/health").status_code == 200
        refused = http.post("/v1/completions", json=body(3))
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        running.join(20)
        assert server.llm.stats().finished == 1
        assert http.post("/admin/undrain").json() == {"draining": False, "in_flight": 0}
        assert http.get("/ready").status_code == 200
        assert http.post("/v1/completions", json=body(3)).status_code == 200


async def test_work_of_the_servers_own_is_not_begun_while_draining() -> None:
    from lockstep.config import ServerConfig
    from lockstep.server.errors import Draining
    from lockstep.server.operations import Operations

    llm = fake_llm()
    await llm.start()
    operations = Operations(llm, ServerConfig())
    assert (await llm.generate("hello there")).text == "hello there"
    operations.drain()
    with pytest.raises(Draining):
        await llm.generate("hello there")
    operations.undrain()
    assert (await llm.generate("hello there")).text == "hello there"
    operations.drain(leaving=True)
    with pytest.raises(ValueError, match="shutting down"):
        operations.undrain()
    await llm.close()
