"""Watching without asking: rates in the counters that a server keeps of its own traffic.

Each rate learns from its first `LEARN` events, then is tested. Null hypothesis: every later event
is bad with at most the probability that it had while learning, independently given the past.
That probability is not known, so it is bounded from above (Clopper and Pearson's exact bound, at
half of the rate's share of alpha); the likelihood ratio of a larger probability against that bound
is, for every probability up to the bound, a martingale that is bounded as in `sequential` (the
ratio grows with the number of bad events, so the bound is the worst case), with the other half.
So the chance that a clean server ever causes an alarm is at most alpha, over all rates and
servers. The limit of this: another mix of requests is another rate, without any change of the
model; only probes hold the questions fixed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx
import numpy as np

from lockstep.verify.drift.baseline import BaselineError, read_json, write_json
from lockstep.verify.drift.counters import Count, read_counts
from lockstep.verify.drift.monitor import ALPHA, Alarm, Replica, State, Status
from lockstep.verify.drift.publish import Publisher
from lockstep.verify.drift.routing import Routing
from lockstep.verify.drift.sequential import Wealth
from lockstep.verify.drift.watch import now
from lockstep.verify.endpoint import MAX_REPLY_BYTES
from lockstep.verify.statistics import upper_bound

FORMAT = "lockstep-passive-1"
LEARN = 500  # events
MOST_RATES = 1000
PATIENCE = 30.0  # seconds for a page, to its last byte
# Alternatives: this far from the bound to 1.
_TOWARDS_ONE = np.array([0.003, 0.01, 0.03, 0.1, 0.25, 0.5, 0.9])


class Rate:
    """One rate of one server. Mutable.

    Args:
        share: of alpha.
    """

    def __init__(self, share: float, learn: int) -> None:
        self.share = share
        self.learned = Count(0.0, 0.0)
        self.wealth = Wealth(components=len(_TOWARDS_ONE))
        self.last: Count | None = None
        self._learn = learn

    def observe(self, now: Count) -> float:
        """Take the counters' next values; returns how many events were new.

        Counters that fell began again from zero: their server was restarted.
        """
        last, self.last = self.last, now
        if last is None:
            return 0.0
        if now.total < last.total or now.bad < last.bad:
            last = Count(0.0, 0.0)
        bad, total = now.bad - last.bad, now.total - last.total
        if total <= 0:
            return 0.0
        if self.learned.total < self._learn:
            self.learned = Count(self.learned.bad + bad, self.learned.total + total)
        else:
            self._bet(bad, total)
        return total

    @property
    def bound(self) -> float:
        """The most that the probability can have been while learning."""
        learned = self.learned
        return upper_bound(int(learned.bad), int(learned.total), 1.0 - self.share / 2)

    def _bet(self, bad: float, total: float) -> None:
        bound = self.bound
        if bound >= 1.0:
            return  # nothing can be worse than all
        rates = bound + (1.0 - bound) * _TOWARDS_ONE
        log_ratio = bad * np.log(rates / bound) + (total - bad) * np.log1p(-_TOWARDS_ONE)
        self.wealth.bet([log_ratio])

    @property
    def changed(self) -> bool:
        """Whether the evidence is enough."""
        return self.wealth.log_value >= -math.log(self.share / 2)

    def to_json(self) -> dict[str, Any]:
        """For the state file."""
        return {
            "share": self.share,
            "learned": asdict(self.learned),
            "last": None if self.last is None else asdict(self.last),
            "rounds": self.wealth.rounds,
            "peak": self.wealth.peak,
            "log_sums": self.wealth.log_sums,
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any], learn: int) -> Rate:
        """What `to_json` gave."""
        rate = cls(float(body["share"]), learn)
        rate.learned = Count(**body["learned"])
        rate.last = None if body["last"] is None else Count(**body["last"])
        rate.wealth = Wealth(
            body["log_sums"],
            int(body["rounds"]),
            float(body["peak"]),
            components=len(_TOWARDS_ONE),
        )
        return rate


class PassiveMonitor:
    """Takes pages of counters, gives states. Mutable.

    The r-th rate that appears gets 1/(r (r + 1)) of `alpha`, so that rates need not be known
    beforehand.

    Args:
        alpha: the chance that clean servers are ever called changed.
        learn: events from which each rate learns what is normal.
    """

    def __init__(self, *, alpha: float = ALPHA, learn: int = LEARN) -> None:
        if not 0.0 < alpha < 1.0:
            raise BaselineError(f"alpha must be in (0, 1), got {alpha!r}")
        self.alpha = alpha
        self.learn = learn
        self.rates: dict[str, Rate] = {}
        self.alarms: dict[str, Alarm] = {}
        self.rounds = 0
        self.answered = 0  # events seen
        self.unread_total = 0
        self.replicas: dict[str, Replica] = {}  # none: servers are named by their streams
        self.routing = Routing()
        self._last = (0, 0)
        self._known: set[str] = set()  # servers whose page was read before

    def observe(self, pages: Mapping[str, str | None]) -> Status:
        """Take a page of each server; None stands for one that could not be read."""
        self.rounds += 1
        unread = 0
        for server, page in pages.items():
            counts = _counts(page)
            if not counts:
                unread += 1
            for name, count in counts.items():
                whole = f"{server} {name}" if len(pages) > 1 else name
                self._take(whole, count, new=server in self._known)
            if counts:
                self._known.add(server)
        self._last = (unread, len(pages))
        self.unread_total += unread
        return self.status()

    def _take(self, name: str, count: Count, *, new: bool) -> None:
        """Take a rate's counters; those that are `new` on a known page began at zero."""
        rate = self.rates.get(name)
        if rate is None:
            if len(self.rates) == MOST_RATES:
                return
            rank = len(self.rates) + 1
            rate = self.rates[name] = Rate(self.alpha / (rank * (rank + 1)), self.learn)
            if new:
                rate.last = Count(0.0, 0.0)
        self.answered += int(rate.observe(count))
        if rate.changed and name not in self.alarms:
            e_value = math.exp(min(700.0, rate.wealth.log_value))
            self.alarms[name] = Alarm(name, self.rounds, self.answered, e_value)

    @property
    def unreadable(self) -> bool:
        """Whether a server's page was missing in the last round."""
        return self._last[0] > 0

    @property
    def learning(self) -> list[str]:
        """Rates that are not tested yet."""
        return [n for n, rate in self.rates.items() if rate.learned.total < self.learn]

    def wealths(self) -> dict[str, Wealth]:
        """Each rate's wealth."""
        return {name: rate.wealth for name, rate in self.rates.items()}

    def status(self) -> Status:
        """The state as of the last round."""
        state = State.UNREADABLE if self.unreadable else State.OK
        servers = {name.partition(" ")[0] for name in self.alarms if " " in name}
        return Status(
            state=State.CHANGED if self.alarms else state,
            round=self.rounds,
            probes=self.answered,
            changed=tuple(self.alarms.values()),
            replicas=tuple(sorted(servers)),
            unread=self._last[0],
            asked=self._last[1],
            suspicious=False,
            new_fingerprints=(),
        )

    def save(self, path: Path) -> None:
        """Write what is known, to go on from after a restart."""
        write_json(
            path,
            {
                "format": FORMAT,
                "alpha": self.alpha,
                "rounds": self.rounds,
                "answered": self.answered,
                "unread": self.unread_total,
                "last": list(self._last),
                "servers": sorted(self._known),
                "rates": {name: rate.to_json() for name, rate in self.rates.items()},
                "alarms": [asdict(alarm) for alarm in self.alarms.values()],
            },
        )

    def load(self, path: Path) -> None:
        """Go on from a file that `save` wrote.

        Raises:
            BaselineError: no such file, or one of another rate of alarms.
        """
        body = read_json(path, FORMAT)
        if body.get("alpha") != self.alpha:
            raise BaselineError(f"{path} was written with alpha {body.get('alpha')!r}")
        try:
            self.rounds, self.answered = int(body["rounds"]), int(body["answered"])
            self.unread_total = int(body["unread"])
            self._last = (int(body["last"][0]), int(body["last"][1]))
            self._known = set(body["servers"])
            self.rates = {n: Rate.from_json(r, self.learn) for n, r in body["rates"].items()}
            self.alarms = {one["stream"]: Alarm(**one) for one in body["alarms"]}
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise BaselineError(f"{path} is damaged: {error!r}") from None


@dataclass
class PassiveWatch:
    """A passive monitor at work.

    Attributes:
        servers: urls, see `metrics_url`.
        tell: as `Watch.tell`.
    """

    servers: Sequence[str]
    client: httpx.AsyncClient
    monitor: PassiveMonitor
    interval: float
    state_file: Path | None = None
    publisher: Publisher | None = None
    tell: Callable[[Status, str], None] = lambda status, failure: None

    async def run(self, count: int = 0) -> Status:
        """Watch for so many scrapes; 0 never ends."""
        done = 0
        while True:
            pages = await asyncio.gather(*(scrape(self.client, url) for url in self.servers))
            status = self.monitor.observe(dict(zip(self.servers, pages, strict=True)))
            if self.state_file is not None:
                self.monitor.save(self.state_file)
            failure = "" if self.publisher is None else await self.publisher.tell(status, now())
            self.tell(status, failure)
            done += 1
            if done == count:
                return status
            await asyncio.sleep(self.interval)


def _counts(page: str | None) -> dict[str, Count]:
    try:
        return {} if page is None else read_counts(page)
    except ValueError:
        return {}


async def scrape(client: httpx.AsyncClient, url: str) -> str | None:
    """A server's page; None where it could not be read."""
    content = bytearray()
    try:
        async with (
            asyncio.timeout(PATIENCE),
            client.stream("GET", metrics_url(url)) as reply,
        ):
            reply.raise_for_status()
            async for piece in reply.aiter_bytes():
                content += piece
                if len(content) > MAX_REPLY_BYTES:
                    return None
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError):
        return None
    return content.decode("utf-8", "replace")


def metrics_url(url: str) -> str:
    """Where a server has its page: at /metrics of its root, unless the url says so itself."""
    parts = urlsplit(url)
    if parts.path.endswith("/metrics"):
        return url
    return urlunsplit((parts.scheme, parts.netloc, "/metrics", "", ""))
