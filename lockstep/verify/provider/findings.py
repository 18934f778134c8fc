"""What a check gives back, and what several of them come to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.verify.probe import Reading
from lockstep.verify.report import Section
from lockstep.verify.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's result.

    Attributes:
        name: of the check.
        reason: one line.
        section: the figures, for a report.
        figures: the same as JSON values, for a ledger.
    """

    name: str
    verdict: Verdict
    reason: str
    section: Section
    figures: Mapping[str, Any] = field(default_factory=dict)


def passing(reading: Reading) -> bool:
    """Whether an answer failed for a reason that may be gone in a minute, and tells nothing of
    the model: a limit of requests, an overload, no connection."""
    return not reading.ok and reading.error.startswith(
        ("timeout", "unreachable", "status 429", "status 502", "status 503", "status 504")
    )


def overall(findings: Iterable[Finding]) -> tuple[Verdict, str]:
    """Fail if any check fails, else undecidable if any is; the names of those that decided it."""
    found = list(findings)
    for verdict in (Verdict.FAIL, Verdict.UNDECIDABLE):
        names = [one.name for one in found if one.verdict is verdict]
        if names:
            return verdict, ", ".join(names)
    return Verdict.PASS, f"all {len(found)} checks"
