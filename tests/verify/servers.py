"""Deployments of which the truth is known: in this process, and as another vendor's server."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn

from lockstep.verify.endpoint import Endpoint, ProbeRequest, Reading

WORDS = ("red", "green", "blue", "north", "south", "one", "two", "three", "yes", "no")


def words_of(text: str, count: int) -> list[str]:
    """The answer of an honest deployment: a function of the prompt and of nothing else."""
    source = random.Random(text)
    return [source.choice(WORDS) for _ in range(count)]


def logprob_of(word: str) -> float:
    return -0.1 * (1 + WORDS.index(word)) if word in WORDS else -5.0


def reading(words: list[str], shift: float = 0.0) -> Reading:
    """An answer of these words, a token each; `shift` moves every logprob."""
    values = tuple(logprob_of(word) + shift for word in words)
    return Reading(
        True,
        text=" ".join(words),
        tokens=tuple(words),
        logprobs=values,
        top=tuple(((word, value),) for word, value in zip(words, values, strict=True)),
        finish="stop",
        fingerprint="fake",
        seconds=0.01,
    )


Script = Callable[[str, int], Reading]


@dataclass
class Scripted:
    """A source whose answer is a function of the prompt and of how often it was asked before."""

    script: Script
    name: str = "scripted"
    asked: dict[str, int] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)

    async def ask(self, request: ProbeRequest) -> Reading:
        before = self.asked.get(request.prompt, 0)
        self.asked[request.prompt] = before + 1
        self.order.append(request.prompt)
        await asyncio.sleep(0)
        return self.script(request.prompt, before)


def honest(prompt: str, before: int) -> Reading:
    return reading(words_of(prompt, 6))


def noisy(rate: float, seed: int) -> Script:
    """Honest but for one token, at this rate, anew for each asking."""
    source = random.Random(seed)

    def script(prompt: str, before: int) -> Reading:
        words = words_of(prompt, 6)
        if source.random() < rate:
            words[source.randrange(1, 6)] = "noise"
        return reading(words)

    return script


def changed(prompts: set[str], at: int = 3) -> Script:
    """One differing token, always, on these prompts."""

    def script(prompt: str, before: int) -> Reading:
        words = words_of(prompt, 6)
        if prompt in prompts:
            words[at] = "changed"
        return reading(words)

    return script


async def whole_body(receive: Callable[[], Awaitable[Any]]) -> bytes:
    """The body of an ASGI request."""
    content = b""
    while True:
        message = await receive()
        content += message.get("body", b"")
        if not message.get("more_body"):
            return content


class Vendor:
    """An ASGI application that speaks OpenAI's HTTP as other servers do.

    Args:
        respond: (path, body) -> (status, JSON value or raw bytes).
        models: names at `/v1/models`. adapters: further entries there.
    """

    def __init__(
        self,
        respond: Callable[[str, dict[str, Any]], tuple[int, Any]],
        models: tuple[str, ...] = ("model",),
        delay: float = 0.0,
    ) -> None:
        self.respond = respond
        self.models = models
        self.adapters: list[dict[str, Any]] = []
        self.delay = delay
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []

    async def __call__(
        self,
        scope: dict[str, Any],
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[Any], Awaitable[None]],
    ) -> None:
        if scope["type"] != "http":
            return
        content = await whole_body(receive)
        self.headers.append({k.decode(): v.decode() for k, v in scope["headers"]})
        status, value = 200, {"data": [{"id": name} for name in self.models] + self.adapters}
        if scope["method"] == "POST":
            body = json.loads(content)
            self.bodies.append(body)
            await asyncio.sleep(self.delay)
            status, value = self.respond(scope["path"], body)
        raw = value if isinstance(value, bytes) else json.dumps(value).encode()
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": raw})

    def endpoint(self, **settings: Any) -> Endpoint:
        """An endpoint that reaches it without a socket."""
        transport = httpx.ASGITransport(app=self)  # type: ignore[arg-type]
        return Endpoint("http://vendor", transport=transport, **settings)


def prompt_of(body: dict[str, Any]) -> str:
    return body.get("prompt") or body["messages"][-1]["content"]


def answer(path: str, body: dict[str, Any], words: list[str], **more: Any) -> dict[str, Any]:
    """A reply in either shape, with what the body asked for."""
    text = " ".join(words)
    values = [logprob_of(word) for word in words]
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
    if path.endswith("/chat/completions"):
        choice["message"] = {"role": "assistant", "content": text}
        if body.get("logprobs"):
            entries = [
                {"token": w, "logprob": v, "bytes": list(w.encode()), "top_logprobs": []}
                for w, v in zip(words, values, strict=True)
            ]
            choice["logprobs"] = {"content": entries}
    else:
        choice["text"] = text
        if body.get("logprobs") is not None:
            choice["logprobs"] = {
                "tokens": words,
                "token_logprobs": values,
                "top_logprobs": [{w: v} for w, v in zip(words, values, strict=True)],
            }
    return {
        "choices": [choice],
        "usage": {"prompt_tokens": 3, "completion_tokens": len(words)},
        "system_fingerprint": "vendor-1",
        **more,
    }


def vendor(script: Callable[[str], list[str]] = lambda prompt: words_of(prompt, 6)) -> Vendor:
    return Vendor(lambda path, body: (200, answer(path, body, script(prompt_of(body)))))


@contextmanager
def serving(app: Vendor) -> Iterator[str]:
    """The application on a port of this machine; yields its url."""
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, log_level="error", lifespan="off")  # type: ignore[arg-type]
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
