"""From counts to a verdict: pass, fail, or undecidable with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from lockstep.verify.rule import Criterion, Exact, Relative
from lockstep.verify.statistics import Interval, paired_excess, percent


class Verdict(StrEnum):
    """What a comparison came to."""

    PASS = "pass"
    FAIL = "fail"
    UNDECIDABLE = "undecidable"


EXIT = {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.UNDECIDABLE: 2}


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of requests.

    Attributes:
        requests: all of the rule.
        own: on which A differs from itself.
        cross: on which B differs from A.
        more: on which B's second answer differs from A's first and A's second does not; less: the
            reverse.
        unread: that could not be compared, because an answer failed or was silent.
        scores: whether these are scores. Then `own` counts those on which A's score changed,
            `more` those on which A is right and B wrong, `less` the reverse, and `cross` is by
            how many the first exceed the second.
    """

    requests: int
    own: int
    cross: int
    more: int
    less: int
    unread: int
    scores: bool = False

    def excess(self, confidence: float) -> Interval:
        """Bounds of P(more) - P(less), each at `confidence`: B's difference beyond A's own.

        Whatever the unread requests would have shown lies within: the upper bound takes
        them as differences of B, the lower one as differences of A.
        """
        of = self.requests
        # By the exact criterion a request may be counted and unread at once.
        high = paired_excess(min(of, self.more + self.unread), self.less, of, confidence).high
        low = paired_excess(self.more, min(of, self.less + self.unread), of, confidence).low
        return Interval(low, high)


def judge(tally: Tally, criterion: Criterion) -> tuple[Verdict, str]:
    """The verdict and one line that says why."""
    if tally.unread == tally.requests:
        return Verdict.UNDECIDABLE, f"none of the {tally.requests} requests could be compared"
    if isinstance(criterion, Exact):
        return _exact(tally, criterion)
    return _relative(tally, criterion)


def _exact(tally: Tally, criterion: Exact) -> tuple[Verdict, str]:
    allowed = f"the rule allows {criterion.allow}"
    if tally.own > criterion.allow:
        return Verdict.UNDECIDABLE, (
            f"A differs from itself on {tally.own} of {tally.requests} requests, {allowed}: "
            "no B could be told from A by this rule"
        )
    does = "loses against A, on balance, on" if tally.scores else "differs from A on"
    found = f"B {does} {tally.cross} of {tally.requests} requests, {allowed}"
    if tally.cross > criterion.allow:
        return Verdict.FAIL, f"{found}; A differs from itself on {tally.own}"
    if tally.cross + tally.unread > criterion.allow:
        return Verdict.UNDECIDABLE, f"{found}, but {tally.unread} could not be compared"
    return Verdict.PASS, found


def _relative(tally: Tally, criterion: Relative) -> tuple[Verdict, str]:
    own = tally.own / tally.requests
    if own > criterion.most_own:
        return Verdict.UNDECIDABLE, (
            f"A differs from itself on {percent(own)} of the requests, "
            f"the rule allows {percent(criterion.most_own)}"
        )
    bounds = tally.excess(criterion.confidence)
    what = "what B loses against A" if tally.scores else "B's excess over A's own difference"
    found = (
        f"{what} lies in {bounds} "
        f"({criterion.confidence:.0%} each side), the margin is {percent(criterion.margin)}"
    )
    if bounds.high <= criterion.margin:
        return Verdict.PASS, found
    if bounds.low > criterion.margin:
        return Verdict.FAIL, found
    unread = f"; {tally.unread} requests could not be compared" if tally.unread else ""
    return Verdict.UNDECIDABLE, f"{found}: too few requests to say{unread}"
