"""A ledger as a table and as a report."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from lockstep.verify.ledger import Checked, PastRun, past_runs
from lockstep.verify.report import Plot, Report, Section, shares_plot, shortened

NO_END = "no end"  # shown as the verdict of a run that never ended


def report_of(path: Path, checked: Checked) -> Report:
    """All runs, failed and unfinished ones among them, and the state of the chain."""
    runs = past_runs(checked.records)
    intact = not checked.problems
    count = len(checked.records)
    return Report(
        title=f"Ledger {path.name}",
        lead=f"{count} records, {len(runs)} runs. Head {checked.head}.",
        verdict="ok" if intact else "changed",
        reason=(
            "The chain is intact. It cannot show that its end was cut off or that all of it was "
            "written anew: compare the head with one that was kept elsewhere."
            if intact
            else checked.problems[0]
        ),
        sections=[
            section
            for section in (_problems(checked), _verdicts(runs), _runs(runs), _comparisons(runs))
            if section is not None
        ],
    )


def _problems(checked: Checked) -> Section | None:
    if not checked.problems:
        return None
    return Section("What is wrong with the chain", checked.problems)


def _verdicts(runs: list[PastRun]) -> Section:
    counts = Counter((run.command, run.verdict or NO_END) for run in runs)
    rows = [(command, verdict, count) for (command, verdict), count in sorted(counts.items())]
    return Section("Verdicts", (), ("command", "verdict", "runs"), rows)


def _runs(runs: list[PastRun]) -> Section:
    rows = [
        (
            run.began,
            run.id,
            run.command,
            run.subject,
            run.rule[:12],
            run.verdict or NO_END,
            shortened(run.reason, 160),
        )
        for run in runs
    ]
    head = ("began", "run", "command", "subject", "rule", "verdict", "why")
    return Section("Runs, in the order of their beginning", (), head, rows)


def _comparisons(runs: list[PastRun]) -> Section | None:
    """Share of differing requests of every run that counted them."""
    names, shares, bounds = [], [], []
    for run in runs:
        requests, share = run.figures.get("requests"), run.figures.get("cross")
        if requests and isinstance(share, dict):
            names.append(f"{run.began[:16]} {run.id[:6]}")
            shares.append(share["count"] / requests)
            bounds.append((share["low"], share["high"]))
    if not names:
        return None
    caption = "Comparisons: requests on which B differs from A."
    return Section("Over time", plots=[Plot(shares_plot(names, shares, bounds), caption)])


def summary(record: dict[str, Any]) -> str:
    """One line of a record that was just written, worth keeping elsewhere."""
    return f"record {record['seq']}, hash {record['hash']}"
