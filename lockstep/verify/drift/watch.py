"""The loop: ask a round, take it, tell about it, wait."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from lockstep.verify.drift.baseline import Answered, Round
from lockstep.verify.drift.monitor import Monitor, Status
from lockstep.verify.drift.probes import Probe
from lockstep.verify.drift.publish import Publisher
from lockstep.verify.drift.replica import ask
from lockstep.verify.endpoint import Source

CONCURRENCY = 4
INTERVAL = 3600.0
CONFIRM = 30.0


async def ask_round(
    source: Source, probes: tuple[Probe, ...], number: int, concurrency: int = CONCURRENCY
) -> Round:
    """Ask every probe once.

    In an order of the round's own: a router that takes turns would else send each probe to the
    same replica in every round.
    """
    order = list(probes)
    random.Random(number).shuffle(order)
    slots = asyncio.Semaphore(concurrency)

    async def one(probe: Probe) -> Answered:
        async with slots:
            return await ask(source, probe.request)

    answers = await asyncio.gather(*map(one, order))
    found = dict(zip([probe.name for probe in order], answers, strict=True))
    return {probe.name: found[probe.name] for probe in probes}


async def rounds(
    source: Source,
    probes: tuple[Probe, ...],
    concurrency: int = CONCURRENCY,
    first: int = 0,
    pause: float = 0.0,
) -> AsyncIterator[Round]:
    """Round after round with so many seconds between them, for a baseline."""
    while True:
        yield await ask_round(source, probes, first, concurrency)
        await asyncio.sleep(pause)
        first += 1


def now() -> str:
    """The time, as ISO 8601 in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass
class Watch:
    """A monitor at work.

    Attributes:
        interval: seconds between rounds. confirm: the same once a stream is suspicious. When
            to look is free: the false-alarm rate holds however the times are chosen.
        state_file: written after every round, so that a restart goes on.
        tell: called with each round's status and what went wrong in telling others.
    """

    source: Source
    probes: tuple[Probe, ...]
    monitor: Monitor
    interval: float = INTERVAL
    confirm: float = CONFIRM
    concurrency: int = CONCURRENCY
    state_file: Path | None = None
    publisher: Publisher | None = None
    tell: Callable[[Status, str], None] = lambda status, failure: None
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    async def run(self, count: int = 0) -> Status:
        """Watch for so many rounds; 0 never ends."""
        done = 0
        while True:
            status = await self.step()
            done += 1
            if done == count:
                return status
            await self.sleep(self.confirm if status.suspicious else self.interval)

    async def step(self) -> Status:
        """One round: asked, taken, kept, told."""
        number = self.monitor.rounds
        each = await ask_round(self.source, self.probes, number, self.concurrency)
        status = self.monitor.observe(each)
        if self.state_file is not None:
            self.monitor.save(self.state_file)
        failure = "" if self.publisher is None else await self.publisher.tell(status, now())
        self.tell(status, failure)
        return status
