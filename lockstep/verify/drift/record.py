"""Puts a watch on record: its beginning, each round after which it says something new, its end."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from lockstep.verify.drift.monitor import Status
from lockstep.verify.drift.publish import describe
from lockstep.verify.ledger import Run


class Recorder:
    """Takes the status of each round; mutable. A watch runs for months, so quiet rounds leave no
    record of their own."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._told: dict[str, Any] = {}
        self._last: Status | None = None

    def baseline(self, path: Path) -> None:
        """Which baseline the rounds to come are held against."""
        self._run.note({"baseline": hashlib.sha256(path.read_bytes()).hexdigest()})

    def round(self, status: Status) -> None:
        """A round's status: a record where the state, an alarm or a fingerprint is new."""
        said = {
            "state": status.state.value,
            "changed": [alarm.stream for alarm in status.changed],
            "new_fingerprints": list(status.new_fingerprints),
        }
        self._last = status
        if said != self._told:
            self._told = said
            self._run.note({**figures(status), "reason": describe(status)})

    def finish(self, reason: str = "") -> None:
        """The end, with the last round's state as the verdict; none without a round.

        Args:
            reason: why it ended, where that was not the number of rounds.
        """
        if self._last is not None:
            found = describe(self._last)
            self._run.finish(
                self._last.state.value,
                figures(self._last),
                reason=f"{reason}; {found}" if reason else found,
            )


def figures(status: Status) -> dict[str, Any]:
    """For a ledger."""
    return {
        "state": status.state.value,
        "round": status.round,
        "probes": status.probes,
        "changed": {alarm.stream: alarm.round for alarm in status.changed},
        "replicas": list(status.replicas),
        "unread": status.unread,
        "asked": status.asked,
        "new_fingerprints": list(status.new_fingerprints),
    }
