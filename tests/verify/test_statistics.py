"""Intervals hold as often as they say; the sign test's false alarms are as rare as it says."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lockstep.verify.statistics import (
    clopper_pearson,
    excess_test,
    lower_bound,
    paired_excess,
    percent,
    quantile,
    sign_test,
    upper_bound,
)


def tail(count: int, of: int, share: float) -> float:
    """P(X >= count), summed."""
    return sum(math.comb(of, k) * share**k * (1 - share) ** (of - k) for k in range(count, of + 1))


@pytest.mark.parametrize(("count", "of"), [(1, 10), (3, 7), (9, 10), (50, 200)])
def test_a_bound_is_the_share_at_which_the_count_becomes_unlikely(count: int, of: int) -> None:
    low = lower_bound(count, of, 0.9)
    assert tail(count, of, low) == pytest.approx(0.1)
    high = upper_bound(count, of, 0.9)
    assert 1 - tail(count + 1, of, high) == pytest.approx(0.1)


def test_nothing_seen_is_not_nothing() -> None:
    assert clopper_pearson(0, 100).low == 0.0
    assert clopper_pearson(0, 100).high == pytest.approx(1 - 0.025 ** (1 / 100))
    assert (clopper_pearson(0, 0).low, clopper_pearson(0, 0).high) == (0.0, 1.0)
    assert clopper_pearson(7, 7).high == 1.0


@pytest.mark.parametrize("share", [0.001, 0.02, 0.3, 0.5])
def test_the_interval_covers_as_often_as_it_says(share: float) -> None:
    counts = np.random.default_rng(7).binomial(60, share, 4000)
    bounds = {count: clopper_pearson(int(count), 60) for count in np.unique(counts)}
    missed = sum(share not in bounds[count] for count in counts)
    assert clopper_pearson(missed, len(counts), 0.999).low <= 0.05


@pytest.mark.parametrize(("more", "less"), [(0.02, 0.02), (0.3, 0.3), (0.06, 0.01), (0.0, 0.2)])
def test_each_bound_of_a_paired_excess_holds_as_often_as_it_says(more: float, less: float) -> None:
    draws = np.random.default_rng(3).multinomial(80, [more, less, 1 - more - less], 3000)
    found = [paired_excess(int(a), int(b), 80, 0.9) for a, b, _ in draws]
    for wrong in (
        sum(each.low > more - less for each in found),
        sum(each.high < more - less for each in found),
    ):
        assert clopper_pearson(wrong, len(found), 0.999).low <= 0.1


def test_the_sign_test_is_exact_and_its_false_alarms_are_as_rare_as_it_says() -> None:
    assert sign_test(0, 5) == 1.0
    assert sign_test(5, 0) == pytest.approx(1 / 32)
    assert sign_test(3, 1) == pytest.approx(5 / 16)
    draws = np.random.default_rng(11).multinomial(50, [0.1, 0.1, 0.8], 3000)
    alarms = sum(sign_test(int(a), int(b)) <= 0.05 for a, b, _ in draws)
    assert clopper_pearson(alarms, len(draws), 0.999).low <= 0.05


@pytest.mark.parametrize(("of", "margin"), [(25, 0.0), (25, 0.1), (48, 0.05)])
def test_an_excess_that_is_just_the_margin_is_rejected_as_rarely_as_it_says(
    of: int, margin: float
) -> None:
    """All outcomes are enumerated, at shares between those of the test's own grid, too."""
    rejected = [
        (more, less)
        for more in range(of + 1)
        for less in range(min(more, of - more) + 1)
        if excess_test(more, less, of, margin) <= 0.05
    ]
    sizes = []
    for share in np.linspace(1e-6, (1 - margin) / 2 - 1e-6, 101):
        rest = 1 - 2 * share - margin
        sizes.append(
            math.fsum(
                math.comb(of, more)
                * math.comb(of - more, less)
                * (share + margin) ** more
                * share**less
                * rest ** (of - more - less)
                for more, less in rejected
            )
        )
    assert 0.035 < max(sizes) <= 0.0505
    for more, less in rejected:  # what is farther out is rejected as well
        assert more == of or excess_test(more + 1, max(0, less - 1), of, margin) <= 0.05


def test_an_excess_is_told_from_one_within_the_margin() -> None:
    assert excess_test(9, 0, 40, 0.05) == pytest.approx(0.0047, abs=2e-4)
    assert excess_test(4, 2, 40, 0.05) == 1.0
    assert excess_test(5, 0, 5, 0.0) == pytest.approx(1 / 32, rel=0.01)
    with pytest.raises(ValueError, match="margin"):
        excess_test(1, 0, 5, 1.0)
    with pytest.raises(ValueError, match="count"):
        excess_test(3, 3, 5, 0.1)


def test_quantiles_are_values_that_occur() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([3.0, 1.0, 2.0], 1.0) == 3.0
    assert quantile([5.0], 0.0) == 5.0
    with pytest.raises(ValueError, match="no quantile"):
        quantile([], 0.5)


def test_impossible_counts_are_refused() -> None:
    for count, of, confidence in ((-1, 5, 0.9), (6, 5, 0.9), (1, 5, 1.0), (1, 5, 0.0)):
        with pytest.raises(ValueError, match="must be in"):
            lower_bound(count, of, confidence)
    with pytest.raises(ValueError, match="negative"):
        sign_test(-1, 0)


def test_small_shares_keep_their_digits() -> None:
    assert [percent(x) for x in (0.0, 0.00037, 0.0123, 0.5, 1.0)] == [
        "0.0%",
        "0.037%",
        "1.2%",
        "50.0%",
        "100.0%",
    ]
