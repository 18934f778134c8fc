"""The application that is fuzzed, in this process, and what must hold whatever it was sent.

Requests go to the ASGI application itself, many at once, past no client library that would
put them right on the way; behind it runs a real engine process around a scripted executor.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from fastapi import FastAPI
from starlette.types import Message, Scope

from lockstep.async_llm import AsyncLLM
from lockstep.config import ServerConfig
from lockstep.engine.client import EngineState
from lockstep.server.app import create_app
from tests.branch_fake import make_branch
from tests.server.support import fake_llm

MODEL = "parrot"
AT_ONCE = 24
LONGEST_MESSAGE = 4_000  # characters of an error's message, whatever it is about
REQUEST_SECONDS = 30.0
TERMINAL_EVENTS = ("response.completed", "response.incomplete", "response.failed")
JSON = (b"content-type", b"application/json")
GOOD = {
    "/v1/chat/completions": {
        "model": MODEL,
        "messages": [{"role": "user", "content": "the quick brown fox"}],
        "seed": 7,
        "max_tokens": 12,
        "logprobs": True,
        "top_logprobs": 3,
    },
    "/v1/completions": {"model": MODEL, "prompt": "one two three", "seed": 3, "logprobs": 2},
    "/v1/score": {"model": MODEL, "text_1": "one two", "text_2": ["three", "four"]},
    "/v1/embeddings": {"model": MODEL, "input": "one two"},
}


@dataclass(frozen=True)
class Sent:
    """One request. `path` is as on the wire, percent-encoded, with its query if any.

    Attributes:
        pieces: the body as it arrives.
        leaves: messages of the reply after which the client hangs up; None stays to the end.
        breaks: hangs up while it still sends, before the last piece.
    """

    method: str
    path: str
    pieces: tuple[bytes, ...] = (b"",)
    headers: tuple[tuple[bytes, bytes], ...] = (JSON,)
    leaves: int | None = None
    breaks: bool = False


def post(path: str, body: Any, **how: Any) -> Sent:
    """A JSON body, written as Python's `json` writes it: NaN, surrogates and all."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Sent("POST", path, (content,), **how)


@dataclass
class Answer:
    """What came back."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""
    ended: bool = False

    def header(self, name: str) -> str:
        return next((v.decode("latin-1") for k, v in self.headers if k.decode() == name), "")

    def json(self) -> Any:
        return json.loads(self.body)


_OWN_TASKS = ("Target._settle", "Event.wait")  # the second: of the supervisor of batches


class Target:
    """An application over a fake engine, on a loop that runs only while requests do.

    Args:
        key: what good requests show.
        settings: of the server.
    """

    def __init__(self, model: str = MODEL, key: str = "", **settings: Any) -> None:
        self.headers = (JSON, (b"authorization", f"Bearer {key}".encode()))
        self.loop = asyncio.new_event_loop()
        self._folder = tempfile.TemporaryDirectory()
        at = Path(self._folder.name)
        branches = {
            "judge": make_branch(at, "judge"),
            "codes": make_branch(at, "codes", head="codes", options=("Yes", "No", "A", "B")),
        }
        self.llm: AsyncLLM = fake_llm(f"judged-{model}", branches=branches)
        self.loop.run_until_complete(self.llm.start())
        config = ServerConfig(access_log=False, served_name=model, **settings)
        self.app: FastAPI = create_app(self.llm, config)
        self.pid = self.llm.client.pid
        self.sent = 0
        self.statuses: dict[int, int] = {}
        self._stopping = asyncio.Event()
        self._started = asyncio.Event()
        self._lifespan = self.loop.create_task(self._live())
        self.loop.run_until_complete(self._started.wait())
        self._residents = asyncio.all_tasks(self.loop)
        self._good = self.good_answers()

    async def _live(self) -> None:
        async with self.app.router.lifespan_context(self.app):
            self._started.set()
            await self._stopping.wait()

    def close(self) -> None:
        self._stopping.set()
        self.loop.run_until_complete(self._lifespan)
        self.loop.run_until_complete(self.llm.close())
        self.loop.close()
        self._folder.cleanup()

    # --- sending ----------------------------------------------------------------------------

    def send(self, requests: Iterable[Sent], *, draining: bool = False) -> list[Answer]:
        """The answers, in order; each is checked.

        Args:
            draining: the server turns work away, with 503.
        """
        requests = list(requests)
        answers = self.loop.run_until_complete(self._send(requests))
        for request, answer in zip(requests, answers, strict=True):
            check(request, answer, draining=draining)
            self.statuses[answer.status] = self.statuses.get(answer.status, 0) + 1
        self.sent += len(requests)
        return answers

    async def _send(self, requests: Sequence[Sent]) -> list[Answer]:
        places = asyncio.Semaphore(AT_ONCE)

        async def one(request: Sent) -> Answer:
            async with places:
                return await asyncio.wait_for(self._one(request), REQUEST_SECONDS)

        return await asyncio.gather(*map(one, requests))

    async def _one(self, request: Sent) -> Answer:
        answer, gone = Answer(), asyncio.Event()
        incoming = [
            {"type": "http.request", "body": piece, "more_body": index + 1 < len(request.pieces)}
            for index, piece in enumerate(request.pieces)
        ]
        if request.breaks:
            incoming.pop()
        left = request.leaves

        async def receive() -> Message:
            await asyncio.sleep(0)
            if incoming:
                return incoming.pop(0)
            if not request.breaks:
                await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal left
            if message["type"] == "http.response.start":
                answer.status, answer.headers = message["status"], list(message["headers"])
            else:
                answer.body += message.get("body", b"")
                answer.ended = not message.get("more_body", False)
            if left is not None:
                left -= 1
                if left < 0:
                    gone.set()

        if left == 0:
            gone.set()
        # Starlette raises what a route raised again behind the reply, for the server to log.
        try:
            await self.app(_scope(request), receive, send)
        except Exception:
            if not answer.status:
                raise
        return answer

    # --- what must hold ---------------------------------------------------------------------

    def good_answers(self) -> dict[str, Any]:
        """Answers to good requests, without what differs from call to call by design."""
        answers = self.send(post(path, body, headers=self.headers) for path, body in GOOD.items())
        found = {}
        for path, answer in zip(GOOD, answers, strict=True):
            assert answer.status == 200, answer.body
            reply = answer.json()
            for name in ("id", "created"):
                reply.pop(name, None)
            reply["usage"].pop("prompt_tokens_details", None)
            found[path] = reply
        return found

    def check_health(self) -> None:
        """The engine is the one that was started, idle, and answers as it did at first."""
        self.loop.run_until_complete(self._settle())
        client = self.llm.client
        assert client.state is EngineState.READY
        assert client.restarts == 0
        assert client.pid == self.pid
        assert self.good_answers() == self._good
        self.loop.run_until_complete(self._settle())

    async def _settle(self) -> None:
        """Wait until nothing runs; fail if something stays."""
        for _ in range(400):
            if not (left := self.left()):
                return
            await asyncio.sleep(0.025)
        raise AssertionError(f"still there: {left}")

    def left(self) -> dict[str, object]:
        """Whatever requests have left behind, by name; empty when all is as it should be."""
        client, operations = self.llm.client, self.app.state.operations
        stats = self.llm.stats()
        tasks = [
            repr(task.get_coro())
            for task in asyncio.all_tasks(self.loop) - self._residents
            if not any(name in repr(task.get_coro()) for name in _OWN_TASKS)
        ]
        found: dict[str, object] = {
            "queues": len(client._queues),
            "admissions": len(client._admissions),
            "live": len(operations.live),
            "in flight": operations.metrics.in_flight,
            "entered": sum(a.running for a in operations.allowances._of_key.values()),
            "running": stats.running,
            "waiting": stats.waiting,
            "pages": stats.pages_used,
            "unaccounted": stats.submitted - stats.finished - stats.cancelled - stats.failed,
            "batches": operations.metrics.batches(),
            "tasks": tasks,
        }
        return {name: value for name, value in found.items() if value}


def _scope(request: Sent) -> Scope:
    raw, _, query = request.path.partition("?")
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": unquote(raw),
        "raw_path": raw.encode("ascii", "replace"),
        "query_string": query.encode("ascii", "replace"),
        "root_path": "",
        "headers": [(b"host", b"fuzz"), *((k.lower(), v) for k, v in request.headers)],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }


def check(request: Sent, answer: Answer, *, draining: bool = False) -> None:
    """What holds for every answer to anybody.

    Raises:
        AssertionError: with the request.
    """
    where = f"{request} -> {answer.status} {answer.body[:1000]!r}"
    if not answer.status:  # nobody was there to read it
        assert request.breaks or request.leaves is not None, where
        return
    if answer.status == 503 and draining:
        assert int(answer.header("retry-after")) >= 1, where
        assert answer.json()["error"]["code"] == "draining", where
    else:
        assert answer.status < 500, where
    for name, value in answer.headers:
        assert not set(name + value) & set(b"\r\n\0"), where
    assert answer.header("x-request-id"), where
    if request.leaves is not None or request.breaks:
        return
    assert answer.ended, where
    if answer.status >= 400:
        if request.method != "HEAD":
            check_error(answer.json(), where)
    elif answer.header("content-type").startswith("text/event-stream"):
        check_stream(answer.body, where)
    elif answer.header("content-type") == "application/json":
        json.loads(answer.body, parse_constant=_no_constant)


def check_error(reply: Any, where: str = "") -> None:
    """OpenAI's shape, with a code, in a few lines."""
    assert set(reply) == {"error"}, where
    error = reply["error"]
    assert set(error) == {"message", "type", "param", "code"}, where
    assert error["code"], where
    assert isinstance(error["code"], str), where
    assert isinstance(error["type"], str), where
    assert isinstance(error["message"], str), where
    assert 0 < len(error["message"]) <= LONGEST_MESSAGE, f"{len(error['message'])}: {where}"
    assert error["param"] is None or 0 < len(error["param"]) <= 400, where
    assert "Traceback" not in error["message"], where


def check_stream(body: bytes, where: str) -> None:
    """Whole events, each a JSON object, and an end that says that it is one."""
    assert body.endswith(b"\n\n"), where
    events = [_data(frame, where) for frame in body[:-2].split(b"\n\n")]
    if events[-1] == b"[DONE]":
        events.pop()
        assert events, where
    else:
        assert json.loads(events[-1]).get("type") in TERMINAL_EVENTS, where
    for event in events:
        reply = json.loads(event, parse_constant=_no_constant)
        if "error" in reply and "object" not in reply and "type" not in reply:
            check_error(reply, where)


def _data(frame: bytes, where: str) -> bytes:
    found = [line[6:] for line in frame.split(b"\n") if line.startswith(b"data: ")]
    assert len(found) == 1, where
    return found[0]


def _no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON")


def memory() -> int:
    """Bytes that this process holds."""
    with suppress(FileNotFoundError), open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def open_files() -> int:
    """Descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))
