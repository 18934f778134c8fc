"""Intervals and tests for counts. Each states what it assumes and how often it is wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

CONFIDENCE = 0.95
GRID = 64  # values of an unknown share over which an exact test takes the worst


@dataclass(frozen=True, slots=True)
class Interval:
    """A closed interval of a share."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"{percent(self.low)} to {percent(self.high)}"


def percent(share: float) -> str:
    """A share for people, with two digits where it is small."""
    value = 100 * share
    return f"{value:.2g}%" if 0 < abs(value) < 1 else f"{value:.1f}%"


def lower_bound(count: int, of: int, confidence: float = CONFIDENCE) -> float:
    """One-sided exact lower bound of the share behind `count` of `of` (Clopper and Pearson 1934).

    Assumes independent trials of one share. The bound exceeds the share in at most
    1 - confidence of all repetitions, for every share and every `of`.
    """
    _check(count, of, confidence)
    if count == 0:
        return 0.0
    from scipy.special import betaincinv  # slow to import

    return float(betaincinv(count, of - count + 1, 1.0 - confidence))


def upper_bound(count: int, of: int, confidence: float = CONFIDENCE) -> float:
    """As `lower_bound`, from above."""
    _check(count, of, confidence)
    if count == of:
        return 1.0
    from scipy.special import betaincinv

    return float(betaincinv(count + 1, of - count, confidence))


def clopper_pearson(count: int, of: int, confidence: float = CONFIDENCE) -> Interval:
    """Two-sided exact interval: it misses the share in at most 1 - confidence of all repetitions.

    Half of that on either side. With `of` = 0 nothing is known: 0 to 1.
    """
    side = (1.0 + confidence) / 2
    return Interval(lower_bound(count, of, side), upper_bound(count, of, side))


def paired_excess(more: int, less: int, of: int, confidence: float = CONFIDENCE) -> Interval:
    """Bounds of P(more) - P(less) from paired counts; each of them holds at `confidence`.

    Of `of` independent pairs, `more` showed the event in the second member only and `less` in
    the first only. Each bound takes exact bounds of both shares at half the error (Bonferroni),
    so it is wrong in at most 1 - confidence of all repetitions, and usually in far fewer.
    """
    side = (1.0 + confidence) / 2
    return Interval(
        lower_bound(more, of, side) - upper_bound(less, of, side),
        upper_bound(more, of, side) - lower_bound(less, of, side),
    )


def sign_test(more: int, less: int) -> float:
    """Exact one-sided p-value of at least `more` among more + less (sign test; McNemar 1947).

    Null: in each discordant pair both orders are equally likely. Under it a p-value of at
    most x comes in at most a share x of all repetitions. Without discordant pairs it is 1.
    """
    if more < 0 or less < 0:
        raise ValueError(f"counts must not be negative, got {more} and {less}")
    if more == 0:
        return 1.0
    from scipy.special import bdtrc

    return float(bdtrc(more - 1, more + less, 0.5))


@cache
def excess_test(more: int, less: int, of: int, margin: float) -> float:
    """One-sided p-value of paired counts against P(more) - P(less) <= `margin`.

    Null: of `of` independent pairs, the first kind comes at most by `margin` oftener than the
    second. Outcomes are ordered by Tango's score (Statistics in Medicine 17, 1998, 891-908);
    the p-value is the largest chance of one as far out, over the unknown share of the second
    kind (the exact unconditional test, Sidik, Statistics in Medicine 22, 2003, 265-278). The
    largest is sought on a grid, beside which it may be larger by a few thousandths of itself.
    """
    _check(more, of, CONFIDENCE)
    _check(less, of - more, CONFIDENCE)
    if not 0.0 <= margin < 1.0:
        raise ValueError(f"margin must be in [0, 1), got {margin}")
    if more - less <= of * margin:
        return 1.0
    import numpy as np
    from scipy.special import gammaln

    first, both = np.triu_indices(of + 1)  # all outcomes, `both` is first + second
    second = both - first
    far = _score(first, second, of, margin) >= _score(more, less, of, margin) - 1e-9
    first, second = first[far], second[far]
    rest = of - both[far]
    ways = gammaln(of + 1) - gammaln(first + 1) - gammaln(second + 1) - gammaln(rest + 1)
    most = (1.0 - margin) / 2 * (1 - 1e-9)
    largest = 0.0
    for share in most * np.linspace(1 / GRID, 1, GRID) ** 2:  # closer where it is small
        chances = first * np.log(share + margin) + second * np.log(share)
        chances += rest * np.log1p(-2 * share - margin)
        largest = max(largest, float(np.exp(ways + chances).sum()))
    return min(1.0, largest)


def _score(more: Any, less: Any, of: int, margin: float) -> Any:
    """How far counts exceed the margin, in standard deviations; arrays or numbers."""
    import numpy as np

    # The share of `less` that makes the counts most likely where the null just holds.
    linear = (2 * of - more + less) * margin - more - less
    root = np.sqrt(linear**2 + 8 * of * less * margin * (1 - margin))
    share = (root - linear) / (4 * of)
    deviation = np.sqrt(of * (2 * share + margin * (1 - margin)))
    return (more - less - of * margin) / np.maximum(deviation, 1e-12)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of `values` that at least `share` of them do not exceed.

    Raises:
        ValueError: no values, or a share outside [0, 1].
    """
    if not values or not 0.0 <= share <= 1.0:
        raise ValueError(f"no quantile {share} of {len(values)} values")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _check(count: int, of: int, confidence: float) -> None:
    if not 0 <= count <= of:
        raise ValueError(f"count must be in [0, {of}], got {count}")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence must be in (0, 1), got {confidence}")
