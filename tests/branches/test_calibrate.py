"""Temperature, thresholds and the figures that stand for trust."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep import options
from lockstep.branch import BranchError
from lockstep.branches import calibrate
from lockstep.branches.build import Aim

NAMES = ("answer", "search", "refuse")


def noisy(rows: int, sharpness: float, seed: int = 0) -> tuple[calibrate.Floats, calibrate.Ints]:
    """Outputs whose own probabilities, at temperature `sharpness`, tell the truth."""
    random = np.random.default_rng(seed)
    logits = random.normal(size=(rows, 3)) * 2
    probabilities = calibrate.softmax(logits)
    targets = np.array([random.choice(3, p=p) for p in probabilities], dtype=np.int64)
    return logits * sharpness, targets


@pytest.mark.parametrize("sharpness", [0.3, 1.0, 4.0])
def test_the_temperature_is_found_and_calibrates(sharpness: float) -> None:
    outputs, targets = noisy(6000, sharpness)
    temperature = calibrate.fit_temperature(outputs, targets)
    assert temperature == pytest.approx(sharpness, rel=0.08)
    bins = calibrate.reliability(calibrate.softmax(outputs, temperature), targets)
    assert calibrate.expected_calibration_error(bins) < 0.02
    if sharpness != 1.0:
        raw = calibrate.reliability(calibrate.softmax(outputs), targets)
        assert calibrate.expected_calibration_error(raw) > 0.08


def test_options_that_a_row_does_not_have() -> None:
    outputs = np.array([[1.0, 2.0, -np.inf], [0.0, 1.0, 2.0]])
    targets = np.array([1, 2])
    assert calibrate.softmax(outputs)[0, 2] == 0.0
    assert np.isfinite(calibrate.log_loss(outputs, targets))
    assert np.isfinite(calibrate.fit_temperature(outputs, targets))


def test_rows_that_are_all_right_make_nothing_surer() -> None:
    """Without a mistake among them the least loss would be at no temperature at all."""
    outputs = np.array([[2.0, 0.0, 0.0], [0.0, 1.0, 0.5], [0.0, 0.1, 0.2]])
    right, mistaken = np.array([0, 1, 2]), np.array([0, 1, 1])
    assert calibrate.fit_temperature(outputs, right) == pytest.approx(1.0, abs=1e-3)
    assert calibrate.fit_temperature(outputs, mistaken) < 0.9


def test_brier_and_calibration_error_by_hand() -> None:
    probabilities = np.array([[0.8, 0.2], [0.6, 0.4]])
    targets = np.array([0, 1])
    assert calibrate.brier(probabilities, targets) == pytest.approx((0.08 + 0.72) / 2)
    bins = calibrate.reliability(probabilities, targets)
    # Both in bins of their own: |0.8 - 1| and |0.6 - 0|, half the rows each.
    assert calibrate.expected_calibration_error(bins) == pytest.approx(0.4)
    assert sum(one.rows for one in bins) == 2


@given(
    rows=st.lists(st.lists(st.floats(0.01, 1.0), min_size=3, max_size=3), min_size=1, max_size=20),
    thresholds=st.lists(st.none() | st.floats(0, 1), min_size=3, max_size=3),
)
def test_choices_are_those_of_the_engine(
    rows: list[list[float]], thresholds: list[float | None]
) -> None:
    probabilities = np.array([[value / sum(row) for value in row] for row in rows])
    chosen = calibrate.choose(probabilities, thresholds)
    assert chosen.tolist() == [options.choose(row.tolist(), thresholds) for row in probabilities]


def test_thresholds_reach_a_precision() -> None:
    outputs, targets = noisy(2000, 1.0)
    probabilities = calibrate.softmax(outputs)
    before = calibrate.by_option(probabilities.argmax(axis=1), targets, NAMES)["answer"]
    thresholds = Aim(precision=("answer=0.9",)).thresholds(probabilities, targets, NAMES)
    chosen = calibrate.choose(probabilities, [thresholds.get(name) for name in NAMES])
    after = calibrate.by_option(chosen, targets, NAMES)["answer"]
    assert before.precision < 0.8
    assert after.precision >= 0.9
    assert after.right > 100  # and not by never answering
    fresh, right = noisy(2000, 1.0, seed=1)
    chosen = calibrate.choose(calibrate.softmax(fresh), [thresholds.get(name) for name in NAMES])
    assert calibrate.by_option(chosen, right, NAMES)["answer"].precision > 0.85


def test_thresholds_lower_a_cost() -> None:
    outputs, targets = noisy(2000, 1.0)
    probabilities = calibrate.softmax(outputs)
    costs = calibrate.parse_costs(["search:answer=8", "refuse:answer=8"], NAMES)
    loss = calibrate.cost_loss(targets, costs)
    thresholds = calibrate.find_thresholds(probabilities, loss)
    plain = loss(calibrate.choose(probabilities, [None] * 3))
    assert loss(calibrate.choose(probabilities, thresholds)) < 0.8 * plain


def test_without_an_aim_there_are_no_thresholds() -> None:
    outputs, targets = noisy(50, 1.0)
    assert Aim().thresholds(calibrate.softmax(outputs), targets, NAMES) == {}
    with pytest.raises(BranchError, match="not for both"):
        Aim(("answer=0.9",), ("search:answer=2",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("answer", "'' is none of"),
        ("maybe=0.9", "'maybe' is none of answer, search, refuse"),
        ("answer=much", "'much' is no number"),
        ("answer=1.5", r"must be in \(0, 1\]"),
        ("answer=nan", "must be finite"),
    ],
)
def test_target_precisions_are_checked(text: str, message: str) -> None:
    with pytest.raises(BranchError, match=message):
        calibrate.parse_precision([text], NAMES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("search=5", "must be RIGHT:CHOSEN=COST"),
        ("search:answer=-1", "a cost of at least 0"),
        ("search:reply=1", "'reply' is none of"),
    ],
)
def test_costs_are_checked(text: str, message: str) -> None:
    with pytest.raises(BranchError, match=message):
        calibrate.parse_costs([text], NAMES)


def test_figures_of_values() -> None:
    targets = np.array([0.0, 1.0, 2.0])
    assert calibrate.value_figures(targets, targets)["r_squared"] == 1.0
    assert calibrate.value_figures(np.full(3, 1.0), targets)["r_squared"] == 0.0
    assert calibrate.value_figures(np.full(3, 1.0), targets)["mean_absolute_error"] == 0.6667
