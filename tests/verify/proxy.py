"""A reverse proxy that breaks what passes through it, at a known rate or on one replica.

It stands in front of any OpenAI-compatible server, over a socket or in this process. Which
request meets which replica and which fault is a function of the seed and the request's number.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from lockstep.verify.drift.replica import ReplicaTransport
from lockstep.verify.endpoint import Endpoint
from tests.verify.servers import whole_body

Body = dict[str, Any]
Reply = tuple[int, Any]


@dataclass(kw_only=True)
class Fault:
    """What goes wrong.

    Attributes:
        share: of the requests that could meet it.
        replica: the only one that has it; "" for all.
        met: requests that met it.
    """

    share: float = 1.0
    replica: str = ""
    met: int = 0

    def request(self, path: str, body: Body, source: random.Random) -> tuple[str, Body]:
        """What is sent on."""
        return path, body

    async def reply(self, status: int, value: Any, source: random.Random) -> Reply:
        """What is sent back; bytes go out as they are."""
        return status, value


@dataclass(kw_only=True)
class PerturbedLogits(Fault):
    """Other weights: every alternative's logprob moves by a fixed amount of this size."""

    scale: float = 0.3

    async def reply(self, status: int, value: Any, source: random.Random) -> Reply:
        for entries in _positions(value):
            for index, entry in enumerate(entries):
                top = entry["top_logprobs"]
                if not top:
                    continue
                for one in top:
                    one["logprob"] += self.scale * _fixed(f"{index} {one['token']}")
                total = np.logaddexp.reduce([one["logprob"] for one in top])
                for one in top:
                    one["logprob"] -= max(0.0, float(total))
                top.sort(key=lambda one: -one["logprob"])
                _choose(entry, top[0])
        _rejoin(value)
        return status, value


@dataclass(kw_only=True)
class DroppedTop(Fault):
    """A sampler that misses the best token in a share of the steps."""

    steps: float = 0.01

    async def reply(self, status: int, value: Any, source: random.Random) -> Reply:
        for entries in _positions(value):
            for entry in entries:
                if len(entry["top_logprobs"]) > 1 and source.random() < self.steps:
                    _choose(entry, entry["top_logprobs"][1])
        _rejoin(value)
        return status, value


@dataclass(kw_only=True)
class SwappedTemplate(Fault):
    """The conversation rendered by a template that the model was not trained with."""

    def request(self, path: str, body: Body, source: random.Random) -> tuple[str, Body]:
        if "messages" not in body:
            return path, body
        text = "".join(f"### {m['role'].title()}:\n{m['content']}\n\n" for m in body["messages"])
        return path, {**body, "messages": [{"role": "user", "content": text + "### Assistant:"}]}


@dataclass(kw_only=True)
class TruncatedContext(Fault):
    """Everything but the last words is dropped in silence, whatever the model could read."""

    words: int = 200

    def request(self, path: str, body: Body, source: random.Random) -> tuple[str, Body]:
        if "messages" in body:
            messages = [{**m, "content": self._cut(m["content"])} for m in body["messages"]]
            return path, {**body, "messages": messages}
        return path, {**body, "prompt": self._cut(body["prompt"])}

    def _cut(self, text: str) -> str:
        words = text.split(" ")
        return text if len(words) <= self.words else " ".join(words[-self.words :])


@dataclass(kw_only=True)
class BrokenToolJSON(Fault):
    """The arguments of a call lose their end."""

    async def reply(self, status: int, value: Any, source: random.Random) -> Reply:
        for choice in _choices(value):
            for call in choice.get("message", {}).get("tool_calls") or ():
                call["function"]["arguments"] = call["function"]["arguments"][:-1]
        return status, value


@dataclass(kw_only=True)
class Unreadable(Fault):
    """No answer that can be read: "html", "cut", "status" or "hang"."""

    how: str = "html"

    async def reply(self, status: int, value: Any, source: random.Random) -> Reply:
        match self.how:
            case "html":
                return 200, b"<html><body>Bad gateway</body></html>"
            case "cut":
                return 200, json.dumps(value).encode()[:-20]
            case "hang":
                await asyncio.sleep(3600)
        return 502, {"error": {"message": "no upstream"}}


@dataclass
class FaultProxy:
    """An ASGI application.

    Attributes:
        upstream: the server behind it.
        faults: applied in order.
        replicas: names and weights; the reply's x-replica names the one that was drawn.
        sticky: a prompt always comes to the same replica.
        said: requests by replica.
    """

    upstream: httpx.AsyncClient
    faults: Sequence[Fault] = ()
    replicas: dict[str, float] = field(default_factory=lambda: {"a": 1.0})
    sticky: bool = False
    seed: int = 1
    number: int = 0
    said: dict[str, int] = field(default_factory=dict)

    async def __call__(
        self,
        scope: dict[str, Any],
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[Any], Awaitable[None]],
    ) -> None:
        if scope["type"] != "http":
            return
        content = await whole_body(receive)
        status, value, replica = await self._pass(scope["method"], scope["path"], content)
        raw = value if isinstance(value, bytes) else json.dumps(value).encode()
        headers = [(b"content-type", b"application/json"), (b"x-replica", replica.encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": raw})

    async def _pass(self, method: str, path: str, content: bytes) -> tuple[int, Any, str]:
        if method == "GET":
            reply = await self.upstream.get(path)
            return reply.status_code, reply.content, ""
        self.number += 1
        source = random.Random(f"{self.seed} {self.number}")
        body: Body = json.loads(content)
        drawn = random.Random(content) if self.sticky else source
        names = list(self.replicas)
        (replica,) = drawn.choices(names, [self.replicas[name] for name in names])
        self.said[replica] = self.said.get(replica, 0) + 1
        met = [
            fault
            for fault in self.faults
            if fault.replica in ("", replica) and source.random() < fault.share
        ]
        for fault in met:
            fault.met += 1
            path, body = fault.request(path, body, source)
        reply = await self.upstream.post(path, json=body)
        status, value = reply.status_code, reply.json()
        for fault in met:
            if not isinstance(value, bytes):
                status, value = await fault.reply(status, value, source)
        return status, value, replica

    def endpoint(self, **settings: Any) -> Endpoint:
        """An endpoint that reaches it without a socket and sees its replicas."""
        transport = ReplicaTransport(httpx.ASGITransport(app=self))  # type: ignore[arg-type]
        return Endpoint("http://proxy", transport=transport, **settings)


def before(app: Any, *faults: Fault, **settings: Any) -> FaultProxy:
    """A proxy before an application of this process."""
    transport = httpx.ASGITransport(app=app)
    upstream = httpx.AsyncClient(transport=transport, base_url="http://upstream")
    return FaultProxy(upstream, faults, **settings)


def _choices(value: Any) -> list[Body]:
    choices = value.get("choices")
    return choices if isinstance(choices, list) else []


def _positions(value: Any) -> list[list[Body]]:
    """The logprobs of each chat choice, a position each."""
    found = [choice.get("logprobs") for choice in _choices(value)]
    return [one["content"] for one in found if one and one.get("content")]


def _choose(entry: Body, other: Body) -> None:
    entry.update({key: other[key] for key in ("token", "logprob", "bytes") if key in other})


def _rejoin(value: Any) -> None:
    """The text that the tokens spell."""
    for choice in _choices(value):
        if choice.get("logprobs") and not choice["message"].get("tool_calls"):
            entries = choice["logprobs"]["content"]
            choice["message"]["content"] = "".join(entry["token"] for entry in entries)


def _fixed(text: str) -> float:
    """A number from a normal distribution, always the same for a text."""
    raw = hashlib.sha256(text.encode()).digest()
    return float(np.random.default_rng(int.from_bytes(raw[:8], "big")).normal())
