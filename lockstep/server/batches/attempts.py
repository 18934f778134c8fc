"""One line answered, with patience: an engine that dies or is full does not spoil a batch.

A line whose engine died under it, or whose step failed, may be the cause or a bystander.
It is tried again in company, then alone, with no other line of any batch in the engine; a
line that fails alone as often as it may is the cause, and its error is its answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from lockstep.places import Places

IN_COMPANY = 2  # attempts
ALONE = 2
FULL_QUEUE = 30
FIRST_PAUSE = 0.25  # seconds; doubles
LONGEST_PAUSE = 60.0
READY_POLL = 0.1

Post = Callable[[str, bytes, str], Awaitable[tuple[int, bytes]]]  # of path, body and owner


@dataclass(frozen=True, slots=True)
class Sender:
    """What answers lines: `post` a request, `ready` to take one, `places` for them."""

    post: Post
    ready: Callable[[], bool]
    places: Places
    first_pause: float = FIRST_PAUSE

    async def answer(self, endpoint: str, body: bytes, owner: str) -> tuple[int, bytes]:
        """Status and body of the last attempt."""
        failures = refusals = 0
        while True:
            async with self.places.take(alone=failures >= IN_COMPANY):
                await self.until_ready()
                status, reply = await self.post(endpoint, body, owner)
            if status == 429:
                refusals += 1
            elif status not in (500, 503):
                return status, reply
            elif _code(reply) != "draining":  # being turned away is no failure
                failures += 1
            if failures == IN_COMPANY + ALONE or refusals == FULL_QUEUE:
                return status, reply
            exponent = min(max(0, failures + refusals - 1), 16)
            await asyncio.sleep(min(LONGEST_PAUSE, self.first_pause * 2**exponent))

    async def until_ready(self) -> None:
        """Wait while there is no engine; that is nobody's failure."""
        while not self.ready():
            await asyncio.sleep(READY_POLL)


class _Error(msgspec.Struct):
    code: str | None = None


class _ErrorReply(msgspec.Struct):
    error: _Error


def _code(reply: bytes) -> str | None:
    """The code of an error reply."""
    try:
        return msgspec.json.decode(reply, type=_ErrorReply).error.code
    except msgspec.DecodeError:
        return None
