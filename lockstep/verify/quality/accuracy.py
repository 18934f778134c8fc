"""Right answers, task by task, item by item: which were lost, which were won.

The two models answer the same items, so what counts is the items on which they differ. The
interval of P(lost) - P(won) takes exact bounds of both shares, see `paired_excess`; it speaks
for the kind of question that the items are drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.verify.quality.subject import Scored, Subject, Writing
from lockstep.verify.quality.tasks import Item, Task, is_right
from lockstep.verify.report import Section, shortened
from lockstep.verify.statistics import clopper_pearson, excess_test, paired_excess, percent
from lockstep.verify.verdict import Verdict

LISTED = 20


@dataclass(frozen=True, slots=True)
class Answered:
    """One item's answers and whether they are right."""

    item: Item
    base: str
    changed: str
    base_right: bool
    changed_right: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """One task."""

    task: Task
    answers: tuple[Answered, ...]

    @property
    def lost(self) -> int:
        """Items that only the base model has right."""
        return sum(one.base_right and not one.changed_right for one in self.answers)

    @property
    def won(self) -> int:
        """Items that only the changed model has right."""
        return sum(one.changed_right and not one.base_right for one in self.answers)

    @property
    def flips(self) -> int:
        """Items that are answered otherwise, right or wrong."""
        return sum(one.base != one.changed for one in self.answers)

    @property
    def right(self) -> tuple[int, int]:
        """Items that are right: by the base model, by the changed one."""
        return (
            sum(one.base_right for one in self.answers),
            sum(one.changed_right for one in self.answers),
        )


async def run_task(base: Subject, changed: Subject, task: Task) -> Outcome:
    """Ask every item of both."""
    ours, theirs = await _answers(base, task), await _answers(changed, task)
    return Outcome(
        task,
        tuple(
            Answered(item, one, other, is_right(task, item, one), is_right(task, item, other))
            for item, one, other in zip(task.items, ours, theirs, strict=True)
        ),
    )


async def _answers(subject: Subject, task: Task) -> list[str]:
    if task.kind == "generate":
        return await subject.write(task.items, Writing(task.max_tokens))
    asked = [(item, option) for item in task.items for option in item.options]
    scores = iter(await subject.score(asked))
    chosen = []
    for item in task.items:
        totals = [(total(next(scores)), option) for option in item.options]
        chosen.append(max(totals, key=lambda one: one[0])[1])
    return chosen


def total(scored: Scored) -> float:
    """Log-likelihood of a text, added left to right."""
    return sum((value for value in scored.logprobs if value is not None), 0.0)


def judge(outcome: Outcome, confidence: float) -> tuple[Verdict, str]:
    """Pass: a loss beyond `drop` is ruled out, which is non-inferiority with that margin (null:
    the loss is `drop` or more). Fail: a loss within it is ruled out (null: it is `drop` or
    less). Undecidable in between: more items would tell. Each is wrong in at most
    1 - confidence of all gates.
    """
    count = len(outcome.answers)
    lost, won, limit = outcome.lost, outcome.won, outcome.task.drop
    excess = paired_excess(lost, won, count, confidence)
    drop = (lost - won) / count
    shown = (
        f"{outcome.right[0]} -> {outcome.right[1]} of {count} right, lost {lost}, won {won}; "
        f"drop {percent(drop)} ({excess})"
    )
    if excess_test(lost, won, count, limit) <= 1.0 - confidence:
        return Verdict.FAIL, shown
    if excess.high <= limit:
        return Verdict.PASS, shown
    return Verdict.UNDECIDABLE, f"{shown}; up to {percent(limit)} is allowed"


def section_of(outcomes: Sequence[Outcome], confidence: float) -> Section:
    """A row a task; no average over them."""
    rows: list[list[object]] = []
    for outcome in outcomes:
        verdict, _ = judge(outcome, confidence)
        count = len(outcome.answers)
        cells = []
        for right in outcome.right:
            bounds = clopper_pearson(right, count, confidence)
            cells.append(f"{percent(right / count)} ({bounds})")
        excess = paired_excess(outcome.lost, outcome.won, count, confidence)
        drop = percent((outcome.lost - outcome.won) / count)
        rows.append(
            [
                outcome.task.name,
                outcome.task.kind,
                count,
                *cells,
                outcome.lost,
                outcome.won,
                outcome.flips,
                f"{drop} ({excess})",
                verdict.value,
            ]
        )
    head = ["task", "kind", "items", "base", "changed", "lost", "won", "other", "drop", ""]
    return Section("Tasks", [f"Intervals hold at {confidence:.0%}, each by itself."], head, rows)


def examples_of(outcomes: Sequence[Outcome]) -> Section:
    """Items that were lost."""
    rows = [
        [
            outcome.task.name,
            shortened(one.item.prompt or one.item.message, 80),
            shortened(one.base, 80),
            shortened(one.changed, 80),
        ]
        for outcome in outcomes
        for one in outcome.answers
        if one.base_right and not one.changed_right
    ]
    head = ["task", "asked", "base", "changed"]
    return Section("Lost answers", [], head, rows[:LISTED], verbatim=frozenset({1, 2, 3}))


def figures_of(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """For a ledger."""
    return {
        outcome.task.name: {
            "items": len(outcome.answers),
            "right": list(outcome.right),
            "lost": outcome.lost,
            "won": outcome.won,
            "flips": outcome.flips,
        }
        for outcome in outcomes
    }
