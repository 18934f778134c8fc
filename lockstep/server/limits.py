"""How much a caller may ask for: requests and tokens a minute, requests at once.

Buckets refill continuously: one of 60 a minute gives one back each second, and holds at
most a minute's worth. Requests are paid for when they come; tokens when they are known,
so that a bucket can go below zero, and then the next request waits until it is above.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from lockstep.config import ServerConfig
from lockstep.server.auth import Key

MINUTE = 60.0


class Bucket:
    """An allowance that refills continuously.

    Args:
        limit: a minute's worth, and the most that it holds; 0 never refuses.
    """

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self.limit = limit
        self._clock = clock
        self._level = float(limit)
        self._seen = clock()

    def level(self) -> float:
        """What is left; below zero after more was taken than there was."""
        now = self._clock()
        refill = (now - self._seen) * self.limit / MINUTE
        self._level = min(float(self.limit), self._level + refill)
        self._seen = now
        return self._level

    def take(self, amount: float) -> None:
        """Take without asking."""
        self._level = self.level() - amount

    def wait(self, amount: float) -> float:
        """Seconds until `amount` is there; 0 when it is."""
        if not self.limit:
            return 0.0
        return max(0.0, (amount - self.level()) * MINUTE / self.limit)

    def full_in(self) -> float:
        """Seconds until it is full."""
        return self.wait(self.limit)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request has to wait.

    Attributes:
        kind: "requests", "tokens" or "concurrent".
        seconds: when trying again makes sense.
    """

    kind: str
    message: str
    seconds: float


class Allowance:
    """What one caller has left.

    Args:
        name: for messages: whose it is.
        requests, tokens: a minute. concurrent: at once. 0 is no limit.
    """

    def __init__(
        self,
        name: str,
        requests: int,
        tokens: int,
        concurrent: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._requests = Bucket(requests, clock)
        self._tokens = Bucket(tokens, clock)
        self._concurrent = concurrent
        self.running = 0

    def enter(self) -> Refusal | None:
        """Begin a request, to be followed by `leave`; or why it cannot begin."""
        if self._concurrent and self.running >= self._concurrent:
            text = f"{self._name} has {self.running} requests running (limit {self._concurrent})"
            return Refusal("concurrent", text, 1.0)
        wait = self._requests.wait(1.0)
        if wait > 0:
            text = f"{self._name} has sent its {self._requests.limit} requests a minute"
            return Refusal("requests", text, wait)
        # A whole token, so that a bucket that is just not empty does not admit a crowd.
        wait = self._tokens.wait(1.0)
        if wait > 0:
            text = f"{self._name} has used its {self._tokens.limit} tokens a minute"
            return Refusal("tokens", text, wait)
        self._requests.take(1.0)
        self.running += 1
        return None

    def leave(self) -> None:
        """A request that entered has ended."""
        self.running -= 1

    def charge(self, tokens: int) -> None:
        """Tokens that were read or written for it."""
        if self._tokens.limit:
            self._tokens.take(tokens)

    def headers(self) -> dict[str, str]:
        """The `x-ratelimit-*` headers of the limits that there are."""
        headers: dict[str, str] = {}
        for kind, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket.limit:
                headers[f"x-ratelimit-limit-{kind}"] = str(bucket.limit)
                headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(bucket.level())))
                headers[f"x-ratelimit-reset-{kind}"] = f"{bucket.full_in():.3f}s"
        return headers


class Allowances:
    """The allowance of every key, made when it first calls."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._of_key: dict[Key | None, Allowance] = {}

    def of(self, key: Key | None) -> Allowance:
        """The key's allowance; all callers without a key share one."""
        allowance = self._of_key.get(key)
        if allowance is None:
            allowance = self._of_key[key] = self._make(key)
        return allowance

    def _make(self, key: Key | None) -> Allowance:
        config = self._config
        if key is None:
            return Allowance(
                "this server",
                config.requests_per_minute,
                config.tokens_per_minute,
                config.max_concurrent,
            )
        return Allowance(
            f"the key {key.name!r}",
            _own(key.requests_per_minute, config.requests_per_minute),
            _own(key.tokens_per_minute, config.tokens_per_minute),
            _own(key.max_concurrent, config.max_concurrent),
        )


def _own(own: int | None, common: int) -> int:
    return common if own is None else own
