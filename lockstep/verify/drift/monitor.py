"""What is known so far, and the state that follows: a function of the rounds and of nothing else.

Streams and their share of the false-alarm rate: the kinds of statistics together 40%, the single
probes 30%, replicas 30% (the r-th one that is seen gets 1/(r (r + 1)) of that, so that they need
not be known beforehand). A replica's null hypothesis is that it answers as all of them did in the
baseline; its bets are the mean of what its answers' own probes would have gained, which takes it
that the noise of one probe tells nothing about that of another. Rounds that cannot be read bet
nothing: they are a state of their own, with a test of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from lockstep.verify.drift.baseline import (
    Baseline,
    BaselineError,
    Round,
    read_json,
    readable_of,
    write_json,
)
from lockstep.verify.drift.measure import PROBE, STREAMS, statistics_of
from lockstep.verify.drift.probes import Probe
from lockstep.verify.drift.routing import MOST_REPLICAS, Routing
from lockstep.verify.drift.sequential import Floats, Stream, Wealth, discoveries
from lockstep.verify.probe import Reading
from lockstep.verify.statistics import clopper_pearson

FORMAT = "lockstep-watch-1"
ALPHA = 0.01
KINDS, PROBES, REPLICAS = 0.4, 0.3, 0.3  # of the weights
UNREADABLE = "unreadable"
REPLICA, EXACT = "replica/", "exact/"
MOST_FINGERPRINTS = 1000


class State(StrEnum):
    """What a round leaves the deployment in."""

    OK = "ok"
    CHANGED = "changed"  # it is not what it was; stays until there is a new baseline
    UNREADABLE = "unreadable"  # it cannot be told: too many answers could not be read


@dataclass(frozen=True, slots=True)
class Alarm:
    """The first round in which a stream was found to have changed."""

    stream: str
    round: int
    probes: int  # that had been answered by then
    e_value: float


@dataclass(slots=True)
class Replica:
    """What one replica answered, and its wealth. Mutable."""

    wealth: Wealth = field(default_factory=Wealth)
    readings: int = 0
    unlike: int = 0  # answers farther from the reference than any of the baseline


@dataclass(frozen=True, slots=True)
class Status:
    """The state after a round.

    Attributes:
        changed: alarms, in the order in which they came.
        replicas: names of the replicas among them.
        unread: probes of the last round that could not be read, of `asked`.
        suspicious: some stream is far enough that the next round had better come soon.
        new_fingerprints: that the baseline does not have. Where a server names what it runs,
            a new one announces a change; it is no alarm by itself.
    """

    state: State
    round: int
    probes: int
    changed: tuple[Alarm, ...]
    replicas: tuple[str, ...]
    unread: int
    asked: int
    suspicious: bool
    new_fingerprints: tuple[str, ...]


class Monitor:
    """Takes rounds, gives states. Mutable.

    Args:
        baseline: of the same probes.
        alpha: the chance that a clean deployment is ever called changed; and, apart from it,
            that its unreadable answers are ever called more than they were.
        exact: take the deployment's word that equal requests get equal answers: any difference
            is a change then, and a deployment that keeps its word causes no false alarm at all.

    Raises:
        BaselineError: `exact`, and answers of the baseline differ already.
    """

    def __init__(
        self,
        probes: tuple[Probe, ...],
        baseline: Baseline,
        *,
        alpha: float = ALPHA,
        exact: bool = False,
    ) -> None:
        if not 0.0 < alpha < 1.0:
            raise BaselineError(f"alpha must be in (0, 1), got {alpha!r}")
        if exact and not baseline.steady:
            raise BaselineError(
                "exact: the baseline's own answers differ from round to round, so this "
                "deployment does not give equal answers to equal requests"
            )
        self.alpha = alpha
        self.exact = exact
        self.alarms: dict[str, Alarm] = {}
        self.replicas: dict[str, Replica] = {}
        self.routing = Routing()
        self.rounds = 0
        self.answered = 0
        self.unread_total = 0
        self._probes = probes
        self._baseline = baseline
        self._streams = {name: Stream(name, v) for name, v in baseline.statistics.items()}
        self._unreadable = Stream(UNREADABLE, list(map(float, baseline.unreadable)))
        self._fingerprints: set[str] = set()
        self._last = (0, 0)  # unread and asked in the last round

    def observe(self, each: Round) -> Status:
        """Take a round."""
        readings = readable_of(each)
        self.rounds += 1
        self.answered += len(readings)
        self._last = (len(each) - len(readings), len(each))
        self.unread_total += self._last[0]
        new = {one.fingerprint for one in readings.values()} - self._fingerprints - {""}
        self._fingerprints |= set(sorted(new)[: MOST_FINGERPRINTS - len(self._fingerprints)])
        for name, one in each.items():
            self.routing.saw(name, one.replica)
        self._unreadable.observe(float(self._last[0]))
        if readings:
            self._bet(each, readings)
        self._raise_alarms()
        return self.status()

    def _bet(self, each: Round, readings: Mapping[str, Reading]) -> None:
        values = statistics_of(self._probes, readings, self._baseline.references)
        gains: dict[str, list[Floats]] = {}
        for name, value in values.items():
            if name.startswith(PROBE) and name in self._streams:
                probe = name.removeprefix(PROBE)
                replica = self._replica(each[probe].replica)
                if replica is not None:
                    self.replicas[replica].readings += 1
                    self.replicas[replica].unlike += value > self._largest(name)
                    gains.setdefault(replica, []).append(self._streams[name].log_factors(value))
                if self.exact and value > 0:
                    self._alarm(EXACT + probe, math.inf)
                    if replica is not None:
                        self._alarm(REPLICA + replica, math.inf)
        for replica, factors in gains.items():
            self.replicas[replica].wealth.bet(factors)
        for name, value in values.items():
            if name in self._streams:
                self._streams[name].observe(value)

    def _largest(self, name: str) -> float:
        return max(self._baseline.statistics[name])

    def _replica(self, name: str) -> str | None:
        """The name under which a replica is known; None for none, or one too many."""
        if name and name not in self.replicas and len(self.replicas) < MOST_REPLICAS:
            self.replicas[name] = Replica()
        return name if name in self.replicas else None

    def weights(self) -> dict[str, float]:
        """Each stream's share of `alpha`; together at most 1."""
        kinds = [name for name in self._streams if name in STREAMS]
        probes = [name for name in self._streams if name.startswith(PROBE)]
        weights = {name: KINDS / len(kinds) for name in kinds}
        weights |= {name: PROBES / len(probes) for name in probes}
        for rank, name in enumerate(self.replicas, 1):
            weights[REPLICA + name] = REPLICAS / (rank * (rank + 1))
        return weights

    def wealths(self) -> dict[str, Wealth]:
        """Each stream's wealth; "unreadable" is left out."""
        found = {name: stream.wealth for name, stream in self._streams.items()}
        return found | {REPLICA + name: one.wealth for name, one in self.replicas.items()}

    def _raise_alarms(self) -> None:
        weights, wealths = self.weights(), self.wealths()
        logs = {name: wealths[name].log_value for name in weights}
        if any(logs[n] + math.log(w) >= -math.log(self.alpha) for n, w in weights.items()):
            names = list(weights)
            found = discoveries([logs[n] for n in names], [weights[n] for n in names], self.alpha)
            for index in found:
                self._alarm(names[index], math.exp(min(700.0, logs[names[index]])))

    def _alarm(self, stream: str, e_value: float) -> None:
        if stream not in self.alarms:
            self.alarms[stream] = Alarm(stream, self.rounds, self.answered, e_value)

    def status(self) -> Status:
        """The state as of the last round."""
        unread, asked = self._last
        weights, wealths = self.weights(), self.wealths()
        nearest = max(
            (wealths[n].log_value + math.log(w) for n, w in weights.items()), default=-math.inf
        )
        named = [n.removeprefix(REPLICA) for n in self.alarms if n.startswith(REPLICA)]
        return Status(
            state=self._state(),
            round=self.rounds,
            probes=self.answered,
            changed=tuple(self.alarms.values()),
            replicas=tuple(named),
            unread=unread,
            asked=asked,
            suspicious=not self.alarms and nearest >= 0.0,
            new_fingerprints=tuple(sorted(self._fingerprints - set(self._baseline.fingerprints))),
        )

    def _state(self) -> State:
        if self.alarms:
            return State.CHANGED
        return State.UNREADABLE if self.unreadable else State.OK

    @property
    def unreadable(self) -> bool:
        """Whether half of the last round could not be read, or more than ever was normal.

        The second is the test at level `alpha`, while answers still are missing.
        """
        unread, asked = self._last
        if asked and 2 * unread >= asked:
            return True
        return unread > 0 and self._unreadable.wealth.log_value >= -math.log(self.alpha)

    def shares(self) -> dict[str, tuple[float, float, float]]:
        """For each replica: the share of its answers unlike all of the baseline, low and high.

        The bounds are Clopper and Pearson's at 95%, each for one replica at one moment.
        """
        found = {}
        for name, one in self.replicas.items():
            if one.readings:
                bounds = clopper_pearson(one.unlike, one.readings)
                found[name] = (one.unlike / one.readings, bounds.low, bounds.high)
        return found

    def save(self, path: Path) -> None:
        """Write what is known, to go on from after a restart."""
        write_json(
            path,
            {
                "format": FORMAT,
                "baseline": self._baseline.created,
                "alpha": self.alpha,
                "rounds": self.rounds,
                "answered": self.answered,
                "unread": self.unread_total,
                "last": list(self._last),
                "fingerprints": sorted(self._fingerprints),
                "streams": {name: _written(one) for name, one in self._streams.items()},
                "unreadable": _written(self._unreadable),
                "replicas": {
                    name: {**_wealth(one.wealth), "readings": one.readings, "unlike": one.unlike}
                    for name, one in self.replicas.items()
                },
                "routing": self.routing.to_json(),
                "alarms": [
                    {**asdict(alarm), "e_value": min(alarm.e_value, 1e300)}
                    for alarm in self.alarms.values()
                ],
            },
        )

    def load(self, path: Path) -> None:
        """Go on from a file that `save` wrote.

        Raises:
            BaselineError: no such file, one of another baseline or another rate.
        """
        body = read_json(path, FORMAT)
        if body.get("baseline") != self._baseline.created or body.get("alpha") != self.alpha:
            raise BaselineError(
                f"{path} belongs to another baseline or rate: evidence cannot be carried over"
            )
        try:
            self.rounds, self.answered = int(body["rounds"]), int(body["answered"])
            self.unread_total = int(body["unread"])
            self._last = (int(body["last"][0]), int(body["last"][1]))
            self._fingerprints = set(body["fingerprints"])
            self._streams = {
                name: _stream(name, self._baseline.statistics[name], one)
                for name, one in body["streams"].items()
            }
            unreadable = list(map(float, self._baseline.unreadable))
            self._unreadable = _stream(UNREADABLE, unreadable, body["unreadable"])
            self.replicas = {
                name: Replica(_read_wealth(one), int(one["readings"]), int(one["unlike"]))
                for name, one in body["replicas"].items()
            }
            self.routing = Routing.from_json(body["routing"])
            self.alarms = {one["stream"]: Alarm(**one) for one in body["alarms"]}
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise BaselineError(f"{path} is damaged: {error!r}") from None


def _wealth(wealth: Wealth) -> dict[str, Any]:
    return {"rounds": wealth.rounds, "peak": wealth.peak, "log_sums": wealth.log_sums}


def _read_wealth(body: Mapping[str, Any]) -> Wealth:
    return Wealth(body["log_sums"], int(body["rounds"]), float(body["peak"]))


def _written(stream: Stream) -> dict[str, Any]:
    return {**_wealth(stream.wealth), "exceeded": stream.exceeded}


def _stream(name: str, baseline: Any, body: Mapping[str, Any]) -> Stream:
    return Stream(name, baseline, body["exceeded"], _read_wealth(body))
