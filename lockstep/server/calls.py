"""One HTTP request as operators see it, and how to find the one being worked for."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field

from lockstep.server.auth import Key


@dataclass(slots=True)
class Call:
    """What is known of one HTTP request; filled in while it runs.

    Attributes:
        id: of the request: the client's `x-request-id`, or one made here.
        route: the path's pattern, e.g. "/v1/models/{name}"; "" where nothing matches.
        client: address, as told by the connection or a trusted proxy.
        key: who asks; None where no key was needed or shown.
        began: seconds of the monotonic clock.
        status: of the reply; 0 before one is sent.
        ended: nothing more is sent. Work that it has started may go on behind it.
        error: code of the last error that the reply carries.
        requests: to the engine; submitted: when the first of them was, on the same clock.
        prompt_tokens, cached_tokens, generated_tokens: of the engine's requests so far.
        first_token: seconds of the monotonic clock; 0 before.
        finishes: finish reasons of choices, and what became of requests that did not finish.
        trace: its span, if there are traces.
    """

    id: str
    method: str
    path: str
    client: str = ""
    route: str = ""
    key: Key | None = None
    began: float = field(default_factory=time.monotonic)
    status: int = 0
    ended: bool = False
    error: str = ""
    requests: int = 0
    submitted: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    first_token: float = 0.0
    finishes: list[str] = field(default_factory=list)
    trace: object = None


current: ContextVar[Call | None] = ContextVar("call", default=None)


def owner() -> str:
    """Whose files, batches and stored responses the request may see: the name of its key; ""
    stands for everybody, where there are no keys."""
    call = current.get()
    return call.key.name if call is not None and call.key is not None else ""
