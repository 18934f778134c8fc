"""The gate: everything that a tasks file asks, and a verdict that no average can hide behind."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.verify.provider.findings import Finding, overall
from lockstep.verify.quality import accuracy, divergence, longform
from lockstep.verify.quality.subject import Subject, Writing
from lockstep.verify.quality.tasks import Item, Tasks
from lockstep.verify.report import Report, Section, shortened
from lockstep.verify.verdict import Verdict

ESSAY = Item(message="Write an essay about the importance of higher education.")
RUN = 16  # of one character: a text that has collapsed
_RUNS = re.compile(r"(\S)\1*")


@dataclass(frozen=True, slots=True)
class Checked:
    """What the gate found."""

    findings: tuple[Finding, ...]
    outcomes: tuple[accuracy.Outcome, ...]
    confidence: float

    @property
    def verdict(self) -> tuple[Verdict, str]:
        """Fail if anything fails; pass only if everything passes."""
        return overall(self.findings)

    @property
    def figures(self) -> dict[str, Any]:
        """For a ledger."""
        return {finding.name: dict(finding.figures) for finding in self.findings}


async def check_quality(
    base: Subject,
    changed: Subject,
    tasks: Tasks,
    progress: Callable[[str], None] = lambda stage: None,
) -> Checked:
    """Ask both models everything.

    Raises:
        SubjectError: one of them does not answer.
    """
    progress("does it write")
    findings = [await _alive(base, changed)]
    outcomes = []
    for task in tasks.tasks:
        progress(task.name)
        outcome = await accuracy.run_task(base, changed, task)
        outcomes.append(outcome)
        verdict, reason = accuracy.judge(outcome, tasks.confidence)
        findings.append(
            Finding(
                f"task {task.name}",
                verdict,
                reason,
                Section(task.name, [reason]),
                accuracy.figures_of([outcome])[task.name],
            )
        )
    if not any(task.kind == "generate" for task in tasks.tasks):
        reason = "no task generates: choices do not show what is lost over many tokens"
        section = Section("Coverage", [reason])
        findings.append(Finding("coverage", Verdict.UNDECIDABLE, reason, section))
    if tasks.texts:
        progress("divergence")
        found = await divergence.diverge(base, changed, tasks.texts)
        judged = divergence.judge(found, tasks.limits, tasks.confidence)
        findings.append(Finding("divergence", *judged))
    if tasks.long is not None:
        progress("long answers")
        pairs = await longform.follow(base, changed, tasks.long)
        findings.append(
            Finding("long answers", *longform.judge(pairs, tasks.limits, tasks.confidence))
        )
    return Checked(tuple(findings), tuple(outcomes), tasks.confidence)


async def _alive(base: Subject, changed: Subject) -> Finding:
    """Whether the changed model writes at all: some that load well print `!!!!`."""
    how = Writing(64)
    (ours,), (theirs,) = await base.write([ESSAY], how), await changed.write([ESSAY], how)
    broken = collapsed(theirs)
    if collapsed(ours):
        verdict, reason = Verdict.UNDECIDABLE, f"the base model writes {shortened(ours, 40)!r}"
    elif broken:
        verdict, reason = Verdict.FAIL, f"it writes {shortened(theirs, 40)!r}"
    else:
        verdict, reason = Verdict.PASS, f"it writes {shortened(theirs, 60)!r}"
    section = Section("Does it write", [f"To {ESSAY.message!r} {reason}"])
    return Finding("writes", verdict, reason, section)


def collapsed(text: str) -> bool:
    """Whether a text is empty, one character again and again, or one word so."""
    words = text.split()
    longest = max((len(run[0]) for run in _RUNS.finditer(text)), default=0)
    if not words or longest >= max(RUN, len(text) // 2):
        return True
    return len(words) >= RUN and len(set(words)) <= 2


def report_of(checked: Checked, base: str, changed: str) -> Report:
    """A report: the tasks in one table, then the rest."""
    verdict, decisive = checked.verdict
    others = [one.section for one in checked.findings if not one.name.startswith("task ")]
    return Report(
        title="Is the changed model as good?",
        lead=f"Base: {base}. Changed: {changed}.",
        verdict=verdict.value,
        reason=decisive,
        sections=[
            accuracy.section_of(checked.outcomes, checked.confidence),
            *others,
            accuracy.examples_of(checked.outcomes),
        ],
    )
