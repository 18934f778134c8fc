"""Normalisation, thresholds, confidence, mass; questions that are refused."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.decisions import Choice, Option, Predicate, Question, Score
from lockstep.decisions.decision import OptionScores, decide
from lockstep.options import normalise
from lockstep.types import RequestError

logprobs = st.lists(st.floats(-60, -0.01), min_size=2, max_size=12)


@given(logprobs)
def test_probabilities_add_up_to_one(values: list[float]) -> None:
    assert math.isclose(math.fsum(normalise(values)), 1.0, rel_tol=1e-12)


@given(logprobs, st.randoms())
def test_the_order_of_options_moves_no_bit(values: list[float], chance: random.Random) -> None:
    order = list(range(len(values)))
    chance.shuffle(order)
    plain, shuffled = normalise(values), normalise([values[i] for i in order])
    assert [plain[i] for i in order] == list(shuffled)


def test_confidence_is_probability_times_mass() -> None:
    question = Choice("which", ["a", "b"])
    decision = decide(question, OptionScores((math.log(0.3), math.log(0.1)), "labels"))
    assert decision.value == "a"
    assert math.isclose(decision.probabilities[0], 0.75)
    assert math.isclose(decision.mass, 0.4)
    assert math.isclose(decision.confidence, 0.3)


def test_a_trained_heads_mass_is_one_and_its_temperature_flattens() -> None:
    scores = (math.log(0.9), math.log(0.1))
    hot = decide(Predicate("is it"), OptionScores(scores, "judge", temperature=2.0))
    assert hot.mass == 1.0
    assert math.isclose(hot.probabilities[0], 0.75)


@pytest.mark.parametrize(
    ("thresholds", "chosen"),
    [
        ((None, None, None), 1),
        ((0.2, None, None), 0),  # the first that reaches its own wins over more probable ones
        ((0.21, None, 0.3), 2),
        ((0.21, 0.51, 0.31), 1),  # nobody reaches: the most probable
        ((0.2, 0.5, 0.3), 0),
        ((None, None, 0.0), 2),
    ],
)
def test_thresholds_in_declared_order(thresholds: tuple[float | None, ...], chosen: int) -> None:
    options = [Option(n, threshold=t) for n, t in zip("abc", thresholds, strict=True)]
    scores = tuple(map(math.log, (0.2 + 1e-9, 0.5, 0.3 + 1e-9)))
    assert decide(Choice("which", options), OptionScores(scores, "labels")).chosen == chosen


def test_of_equal_options_the_first_is_chosen() -> None:
    assert decide(Choice("which", ["a", "b"]), OptionScores((-1.0, -1.0), "labels")).chosen == 0


def test_nothing_said_about_any_option_is_no_confidence_at_all() -> None:
    decision = decide(Choice("which", ["a", "b"]), OptionScores((-math.inf, -math.inf), "labels"))
    assert decision.probabilities == (0.5, 0.5)
    assert decision.mass == decision.confidence == 0.0


def test_a_score_is_the_expected_level() -> None:
    scores = OptionScores(tuple(map(math.log, (0.1, 0.2, 0.7))), "labels")
    assert math.isclose(decide(Score("how", ["low", "mid", "high"]), scores).expected, 1.6)


def test_values_are_typed() -> None:
    question = Choice("which", ["true", True, "false", False])
    assert [option.value for option in question.options] == ["true", True, "false", False]


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Predicate(""), "instructions"),
        (lambda: Predicate(3), "instructions"),  # type: ignore[arg-type]
        (lambda: Predicate("\ud800"), "instructions"),
        (lambda: Predicate("x" * 100_001), "instructions"),
        (lambda: Choice("which", ["one"]), "choices"),
        (lambda: Choice("which", "ab"), "choices"),
        (lambda: Choice("which", [str(i) for i in range(256)]), "choices"),
        (lambda: Choice("which", ["a", "b", "a"]), "choices[2].value"),
        (lambda: Choice("which", [True, "x", True]), "choices[2].value"),
        (lambda: Choice("which", ["a", 1]), "choices[1].value"),  # type: ignore[list-item]
        (lambda: Choice("which", ["a", " "]), "choices[1].value"),
        (lambda: Option("a", threshold=1.5), "threshold"),
        (lambda: Option("a", threshold=math.nan), "threshold"),
        (lambda: Option("a", threshold=True), "threshold"),
        (lambda: Score("how", []), "levels"),
    ],
)
def test_bad_questions_name_their_field(make: Any, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        make()
    assert caught.value.field == field


@pytest.mark.parametrize("count", [2, 26, 27, 99, 100, 255])
def test_up_to_255_options(count: int) -> None:
    question: Question = Choice("which", {f"option {i}": "" for i in range(count)})
    assert len(question.options) == count
