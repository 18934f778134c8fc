"""Who is told: Prometheus, by a port or a text file, and a webhook."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import httpx
from prometheus_client import CollectorRegistry, start_http_server, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from lockstep.types import LockstepError
from lockstep.verify.drift.monitor import Replica, State, Status
from lockstep.verify.drift.routing import Routing
from lockstep.verify.drift.sequential import Wealth

PREFIX = "lockstep_watch_"
KEPT = 100  # messages to a webhook that does not answer
PATIENCE = 30.0  # seconds for one of them


class Watched(Protocol):
    """What a monitor tells, see `Monitor`."""

    rounds: int
    answered: int
    unread_total: int
    replicas: dict[str, Replica]
    routing: Routing

    @property
    def unreadable(self) -> bool:
        """Whether answers are missing now."""

    def wealths(self) -> dict[str, Wealth]:
        """Evidence by stream."""

    def status(self) -> Status:
        """The state as of the last round."""


class Metrics:
    """The monitor as Prometheus reads it.

    Args:
        now: seconds since the epoch.
    """

    def __init__(self, monitor: Watched, now: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        self._monitor = monitor
        self._now = now
        self._asked = 0.0
        self.registry.register(self)

    def observed(self) -> None:
        """A round has ended."""
        self._asked = self._now()

    def serve(self, port: int) -> Callable[[], None]:
        """Answer on a port of all interfaces; returns what stops it.

        Raises:
            LockstepError: the port is taken.
        """
        try:
            server, thread = start_http_server(port, registry=self.registry)
        except OSError as error:
            raise LockstepError(f"metrics-port {port}: {error}") from None

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return stop

    def write(self, path: Path) -> None:
        """Replace a text file that node_exporter collects."""
        write_to_textfile(str(path), self.registry)

    def collect(self) -> Iterator[Metric]:
        """All families; called by prometheus-client."""
        monitor, status = self._monitor, self._monitor.status()
        yield _family(
            GaugeMetricFamily,
            "state",
            "1 at the state of the last round.",
            ("state",),
            (((state.value,), float(status.state is state)) for state in State),
        )
        yield _one(GaugeMetricFamily, "changed", "1 once a change was found.", bool(status.changed))
        yield _one(
            GaugeMetricFamily, "unreadable", "1 while answers are missing.", monitor.unreadable
        )
        for name, text, value in (
            ("rounds", "Rounds asked.", monitor.rounds),
            ("answers", "Probes answered.", monitor.answered),
            ("unread", "Probes whose answer could not be read.", monitor.unread_total),
        ):
            yield _one(CounterMetricFamily, name, text, value)
        yield _one(GaugeMetricFamily, "last_round_timestamp_seconds", "When it ended.", self._asked)
        yield _family(
            GaugeMetricFamily,
            "log_e_value",
            "Evidence for a change, by stream; e-values are 1 or less on average without one.",
            ("stream",),
            (((name,), one.log_value) for name, one in monitor.wealths().items()),
        )
        yield _family(
            GaugeMetricFamily,
            "alarm",
            "The round in which a stream was found to have changed.",
            ("stream",),
            (((alarm.stream,), float(alarm.round)) for alarm in status.changed),
        )
        for name, text in (
            ("readings", "Answers by replica."),
            ("unlike", "Of these, farther from the reference than any of the baseline."),
        ):
            yield _family(
                CounterMetricFamily,
                f"replica_{name}",
                text,
                ("replica",),
                (((r,), float(getattr(one, name))) for r, one in monitor.replicas.items()),
            )
        stickiness = monitor.routing.stickiness
        if stickiness is not None:
            yield _one(
                GaugeMetricFamily,
                "stickiness",
                "0: a probe comes to any replica; 1: always to the same.",
                stickiness,
            )


class Webhook:
    """Posts a message for every change of the state and every new alarm. Mutable.

    A message that cannot be delivered is tried again with the next round, in order.
    """

    def __init__(self, url: str, source: str, client: httpx.AsyncClient) -> None:
        self.failure = ""  # of the last attempt
        self._url = url
        self._source = source
        self._client = client
        self._told: tuple[State, int] = (State.OK, 0)
        self._pending: deque[dict[str, Any]] = deque(maxlen=KEPT)

    async def tell(self, status: Status, time: str) -> None:
        """Send what is new."""
        news = (status.state, len(status.changed))
        if news != self._told:
            self._pending.append(message(status, self._source, self._told[0], time))
            self._told = news
        while self._pending:
            self.failure = await self._post(self._pending[0])
            if self.failure:
                return
            self._pending.popleft()

    async def _post(self, body: dict[str, Any]) -> str:
        """What went wrong, "" if nothing did. Shows no url: those of chats are secrets.

        Follows no redirect and reads no answer, so nobody can be made to fetch anything else.
        """
        try:
            async with (
                asyncio.timeout(PATIENCE),
                self._client.stream("POST", self._url, json=body, follow_redirects=False) as reply,
            ):
                return "" if reply.is_success else f"webhook: status {reply.status_code}"
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            return f"webhook: {type(error).__name__}"


class Publisher:
    """Everybody who is told of a round.

    Args:
        metrics: of the monitor whose rounds these are.
        textfile: rewritten after every round.
    """

    def __init__(
        self, metrics: Metrics, textfile: Path | None = None, webhook: Webhook | None = None
    ) -> None:
        self.metrics = metrics
        self._textfile = textfile
        self._webhook = webhook

    async def tell(self, status: Status, time: str) -> str:
        """Tell all; returns what went wrong, "" if nothing did."""
        self.metrics.observed()
        failures = []
        if self._textfile is not None:
            try:
                self.metrics.write(self._textfile)
            except OSError as error:  # a full disk must not end the watch
                failures.append(f"textfile: {error}")
        if self._webhook is not None:
            await self._webhook.tell(status, time)
            failures.append(self._webhook.failure)
        return "; ".join(filter(None, failures))


def message(status: Status, source: str, before: State, time: str) -> dict[str, Any]:
    """The status as JSON; "text" is a line for people, which chat programs show."""
    changed = [{**asdict(alarm), "e_value": min(alarm.e_value, 1e300)} for alarm in status.changed]
    return {
        "text": f"{source}: {before.value} -> {describe(status)}",
        "source": source,
        "time": time,
        "state": status.state.value,
        "before": before.value,
        "round": status.round,
        "probes": status.probes,
        "changed": changed,
        "replicas": list(status.replicas),
        "unread": status.unread,
        "asked": status.asked,
        "new_fingerprints": list(status.new_fingerprints),
    }


def describe(status: Status) -> str:
    """The status in a line."""
    parts = [status.state.value]
    if status.changed:
        parts.append(", ".join(alarm.stream for alarm in status.changed[:5]))
        if len(status.changed) > 5:
            parts.append(f"and {len(status.changed) - 5} more")
        first = status.changed[0]
        parts.append(f"since round {first.round} ({first.probes} answers)")
    if status.unread:
        parts.append(f"{status.unread} of {status.asked} answers unreadable")
    if status.new_fingerprints:
        shown = ", ".join(name[:60] for name in status.new_fingerprints[:3])
        more = len(status.new_fingerprints) - 3
        parts.append(f"new fingerprint {shown}" + (f" and {more} more" if more > 0 else ""))
    return "; ".join(parts)


Kind = type[GaugeMetricFamily] | type[CounterMetricFamily]


def _one(kind: Kind, name: str, text: str, value: float) -> Metric:
    return kind(PREFIX + name, text, value=float(value))


def _family(
    kind: Kind,
    name: str,
    text: str,
    labels: tuple[str, ...],
    rows: Iterable[tuple[tuple[str, ...], float]],
) -> Metric:
    family = kind(PREFIX + name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family
