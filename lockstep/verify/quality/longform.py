"""Long answers, followed to their end: some faults begin to show after a sentence or two.

Both models write answers to the same prompts with the same seeds; the base model then says how
probable each of them is, token by token. A model that loses the thread writes what the base model
finds less and less probable, or says the same again and again; the second is probable, so both
are measured. What counts is the excess over the base model's own answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from lockstep.verify.drift.measure import repetition_of
from lockstep.verify.quality.divergence import bounds, interval
from lockstep.verify.quality.subject import Scored, Subject, Writing
from lockstep.verify.quality.tasks import Item, Limits, LongForm
from lockstep.verify.report import Section
from lockstep.verify.verdict import Verdict

BLOCK = 16  # tokens


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt's answers, and their tokens' negative logprobs under the base model."""

    base: str
    changed: str
    base_losses: tuple[float, ...]
    changed_losses: tuple[float, ...]

    @property
    def late_excess(self) -> float:
        """Nats a token by which the changed answer's last third is less probable."""
        return _late(self.changed_losses) - _late(self.base_losses)

    @property
    def early_excess(self) -> float:
        """The same of the first block."""
        return _mean(self.changed_losses[:BLOCK]) - _mean(self.base_losses[:BLOCK])

    @property
    def repetition(self) -> float:
        """By how much more the changed answer repeats itself."""
        return repetition_of(self.changed) - repetition_of(self.base)


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _late(values: Sequence[float]) -> float:
    return _mean(values[len(values) * 2 // 3 :])


async def follow(base: Subject, changed: Subject, long: LongForm) -> list[Pair]:
    """Let both write, and the base model score."""
    items = [Item(prompt=prompt) for prompt in long.prompts]
    how = Writing(long.max_tokens, long.temperature)
    ours, theirs = await base.write(items, how), await changed.write(items, how)
    # A text without any character cannot be scored, and says nothing.
    texts = [(item, text) for item, text in zip(items * 2, [*ours, *theirs], strict=True) if text]
    scores = iter(await base.score(texts))
    losses = [_losses(next(scores)) if text else () for text in (*ours, *theirs)]
    return [
        Pair(one, other, left, right)
        for one, other, left, right in zip(
            ours, theirs, losses[: len(items)], losses[len(items) :], strict=True
        )
    ]


def _losses(scored: Scored) -> tuple[float, ...]:
    return tuple(-value for value in scored.logprobs if value is not None)


def judge(
    pairs: Sequence[Pair], limits: Limits, confidence: float
) -> tuple[Verdict, str, Section, dict[str, Any]]:
    """Against `late_excess` and `repetition`; which also says whether it grew with length."""
    groups = list(range(len(pairs)))
    late, early = [p.late_excess for p in pairs], [p.early_excess for p in pairs]
    growth = [after - before for after, before in zip(late, early, strict=True)]
    repeats = [pair.repetition for pair in pairs]
    late_low, late_high = interval(late, groups, confidence)
    again_low, again_high = interval(repeats, groups, confidence)
    grown_low, _ = interval(growth, groups, confidence)
    shown = (
        f"excess {_mean(early):+.3f} nats a token in the first {BLOCK}, {_mean(late):+.3f} in the "
        f"last third ({late_low:+.3f} to {late_high:+.3f}); repetition {_mean(repeats):+.1%}"
    )
    if grown_low > 0:
        shown += "; it grows with length"
    over = [
        text
        for text, wrong in (
            (f"late excess over {limits.late_excess:g}", late_low > limits.late_excess),
            (f"repetition over {limits.repetition:g}", again_low > limits.repetition),
        )
        if wrong
    ]
    if over:
        verdict, reason = Verdict.FAIL, f"{', '.join(over)}: {shown}"
    elif late_high > limits.late_excess or again_high > limits.repetition:
        verdict, reason = Verdict.UNDECIDABLE, f"a limit lies in its interval: {shown}"
    else:
        verdict, reason = Verdict.PASS, shown
    longest = max((len(p.changed_losses) for p in pairs), default=0)
    rows: list[list[object]] = []
    for start in range(0, longest, 2 * BLOCK):
        ours = [x for p in pairs for x in p.base_losses[start : start + 2 * BLOCK]]
        theirs = [x for p in pairs for x in p.changed_losses[start : start + 2 * BLOCK]]
        if ours and theirs:
            cells = [f"{_mean(ours):.3f}", f"{_mean(theirs):.3f}"]
            rows.append([f"{start} to {start + 2 * BLOCK - 1}", *cells])
    head = ["tokens", "base, nats a token", "changed"]
    section = Section("Long answers, as the base model finds them", [reason], head, rows)
    figures = {
        "early_excess": _mean(early),
        "late_excess": _mean(late),
        "late_interval": bounds(late_low, late_high),
        "repetition": _mean(repeats),
        "grows": grown_low > 0,
    }
    return verdict, reason, section, figures
