"""Which replica answered which probe, and whether a router sends like to like."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

MOST_REPLICAS = 1000  # whose names are kept: a header may name every reply otherwise


class Routing:
    """Counts of consecutive answers to one probe. Mutable.

    Attributes:
        seen: answers by replica.
    """

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self._last: dict[str, str] = {}
        self._pairs = 0
        self._same = 0

    def saw(self, probe: str, replica: str) -> None:
        """Note an answer; "" is a replica that cannot be seen."""
        if not replica or (replica not in self.seen and len(self.seen) >= MOST_REPLICAS):
            return
        self.seen[replica] += 1
        before = self._last.get(probe)
        if before is not None:
            self._pairs += 1
            self._same += before == replica
        self._last[probe] = replica

    @property
    def stickiness(self) -> float | None:
        """How much oftener than by chance a probe comes to the replica that had it last.

        0 for a router that draws or takes turns, 1 for one that always sends a prompt to the
        same replica: the probes then see only the replicas that they are bound to. None while
        fewer than two replicas, or fewer than 30 repetitions, were seen.
        """
        total = sum(self.seen.values())
        chance = sum((count / total) ** 2 for count in self.seen.values()) if total else 1.0
        if self._pairs < 30 or chance >= 1.0:
            return None
        return (self._same / self._pairs - chance) / (1.0 - chance)

    def to_json(self) -> dict[str, Any]:
        """For the state file."""
        return {
            "seen": dict(self.seen),
            "last": self._last,
            "pairs": self._pairs,
            "same": self._same,
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Routing:
        """What `to_json` gave."""
        routing = cls()
        routing.seen = Counter(body["seen"])
        routing._last = dict(body["last"])
        routing._pairs, routing._same = int(body["pairs"]), int(body["same"])
        return routing
