"""The tests behind `verify watch`: their false-alarm rate, exactly and over simulated years."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.verify.drift.sequential import (
    COMPONENTS,
    FRACTIONS,
    Floats,
    Stream,
    Wealth,
    advance,
    discoveries,
    log_bets,
    log_wealth,
    odds,
    reserve,
    threshold_ranks,
)
from lockstep.verify.statistics import clopper_pearson

DAYS = 365


def histories(scores: Floats, baseline: int) -> Floats:
    """Log wealth after every round, float64 [runs, rounds], of scores [runs, baseline + rounds]
    without ties."""
    runs, length = scores.shape
    ranks = np.array(threshold_ranks(baseline), dtype=float)
    ordered = -np.sort(-scores[:, :baseline], axis=1)
    thresholds = ordered[:, [int(rank) for rank in ranks]]
    exceeded = np.zeros((runs, len(FRACTIONS)))
    sums = np.full((runs, COMPONENTS), -np.inf)
    wealth = np.zeros((runs, length - baseline))
    for k in range(length - baseline):
        hits = scores[:, baseline + k, None] > thresholds
        sums = advance(sums, k, log_bets(hits, odds(ranks, exceeded, baseline, k)))
        exceeded += hits
        wealth[:, k] = log_wealth(sums, k + 1)
    return wealth


@given(
    st.lists(st.floats(-5, 5), min_size=8, max_size=30),
    st.lists(st.floats(-5, 5), min_size=1, max_size=30),
)
@settings(max_examples=50)
def test_a_stream_is_what_the_simulation_simulates(before: list[float], after: list[float]) -> None:
    scores = np.array([*before, *after])
    if len(set(scores.tolist())) < len(scores):
        return
    stream = Stream("x", before)
    expected = histories(scores[None, :], len(before))[0]
    for value, wealth in zip(after, expected, strict=True):
        stream.observe(value)
        assert stream.wealth.log_value == pytest.approx(wealth, abs=1e-9)
    assert stream.wealth.peak == pytest.approx(max(0.0, *expected))


def test_the_expected_wealth_is_exactly_one_over_all_orders_of_ranks() -> None:
    """Every sequence of ranks is equally likely under the null: sum over all of them."""
    baseline, rounds = 4, 4
    for until in range(1, rounds + 1):
        total, count = 0.0, 0
        for ranks in product(*(range(baseline + 1 + k) for k in range(until))):
            values = [float(value) for value in range(baseline)]
            stream = Stream("x", values)
            for rank in ranks:  # a value between the earlier ones
                ordered = sorted(values)
                low = ordered[rank - 1] if rank else ordered[0] - 2
                high = ordered[rank] if rank < len(ordered) else ordered[-1] + 2
                values.append((low + high) / 2)
                stream.observe(values[-1])
            total += math.exp(stream.wealth.log_value)
            count += 1
        assert total / count == pytest.approx(1.0, abs=1e-12)


def test_the_prior_over_the_beginning_of_a_change_sums_to_one() -> None:
    assert reserve(0) == 1.0
    assert all(reserve(k) > reserve(k + 1) > 0 for k in range(1000))
    idle = Wealth()
    for _ in range(5):
        idle.bet([np.zeros(COMPONENTS)])
    assert idle.log_value == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("alpha", [0.1, 0.01])
def test_clean_years_alarm_no_more_often_than_stated(alpha: float) -> None:
    """4,000 clean years of daily rounds: heavy tails, nothing assumed."""
    generator = np.random.default_rng(20261129)
    scores = generator.standard_cauchy((4000, 60 + DAYS))
    alarms = int((histories(scores, 60).max(axis=1) >= -math.log(alpha)).sum())
    rate = clopper_pearson(alarms, 4000, 0.99)
    assert rate.high <= alpha, f"{alarms} of 4000 years: {rate}"
    assert alarms > 0, "a test that never alarms proves nothing"


def test_clean_years_of_ties_alarm_no_more_often_than_stated() -> None:
    """Statistics with few values (rates, zeros of a deterministic server): ties decide nothing."""
    generator = np.random.default_rng(5)
    alpha, alarms, years = 0.1, 0, 150
    for year in range(years):
        values = (generator.random(20 + 120) < generator.random() * 0.4).astype(float)
        stream = Stream(f"year {year}", values[:20].tolist())
        for value in values[20:]:
            stream.observe(float(value))
        alarms += stream.wealth.peak >= -math.log(alpha)
    rate = clopper_pearson(alarms, years, 0.99)
    assert rate.low <= alpha, f"{alarms} of {years}: {rate}"


@pytest.mark.parametrize(("quiet", "most"), [(0, 4), (30, 7), (365, 8), (1000, 8)])
def test_a_change_in_every_round_is_found_within_so_many_rounds(quiet: int, most: int) -> None:
    """At the threshold of a kind among nine with a third of the weight, alpha 0.01."""
    generator = np.random.default_rng(1)
    scores = generator.random((200, 60 + quiet + 20))
    scores[:, 60 + quiet :] += 1.0
    found = histories(scores, 60)[:, quiet:] >= math.log(100 * 27)
    assert found.any(axis=1).all()
    assert np.quantile(found.argmax(axis=1) + 1, 0.95) <= most


def test_discoveries_keep_the_stated_rate_and_name_the_changed() -> None:
    weights = [1 / 30] * 30
    assert discoveries([0.0] * 30, weights, 0.01) == []
    values = [0.0] * 30
    values[7] = math.log(30 / 0.01) + 1e-9
    assert discoveries(values, weights, 0.01) == [7]
    values[7] = values[9] = math.log(15 / 0.01) + 1e-9  # two need half each
    assert discoveries(values, weights, 0.01) == [7, 9]
    generator = np.random.default_rng(3)
    # 5 changed streams, 25 e-values that are clean (exponential: mean 1)
    wrong, named = [], 0
    for _ in range(400):
        logs = np.log(generator.exponential(size=30))
        logs[:5] = math.log(1e5)
        found = discoveries(logs.tolist(), weights, 0.1)
        assert set(range(5)) <= set(found)
        wrong.append(sum(index >= 5 for index in found) / len(found))
        named += len(found)
    assert np.mean(wrong) <= 0.1
