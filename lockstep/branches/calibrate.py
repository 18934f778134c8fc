"""From a head's outputs on labelled rows to probabilities that can be trusted, and thresholds.

Everything here is a function of outputs [N, C] and targets [N]; no torch, no model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.branch import BranchError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BINS = 10
_GOLDEN = (5**0.5 - 1) / 2
_LOG_TEMPERATURES = (-3.0, 3.0)
_GRID = 64  # thresholds that are tried for each option


def softmax(outputs: Floats, temperature: float = 1.0) -> Floats:
    """Probabilities [N, C] of outputs; -inf is an option that a row does not have."""
    shifted = (outputs - outputs.max(axis=1, keepdims=True)) / temperature
    weights = np.exp(shifted)
    result: Floats = weights / weights.sum(axis=1, keepdims=True)
    return result


def log_loss(outputs: Floats, targets: Ints, temperature: float = 1.0) -> float:
    """Mean negative log-likelihood of the right options, in nats."""
    shifted = (outputs - outputs.max(axis=1, keepdims=True)) / temperature
    right = shifted[np.arange(len(targets)), targets]
    return float(np.mean(np.log(np.exp(shifted).sum(axis=1)) - right))


def fit_temperature(outputs: Floats, targets: Ints) -> float:
    """The temperature with the least log-loss (Guo et al. 2017), between 0.05 and 20.

    The loss has one minimum, found by golden-section search; no accuracy changes by it. Rows
    that are all decided right have none: the surer the better. Such rows cannot make a branch
    surer than training left it: 1 is then the least.
    """
    low, high = _LOG_TEMPERATURES
    if (outputs.argmax(axis=1) == targets).all():
        low = 0.0

    def loss(at: float) -> float:
        return log_loss(outputs, targets, float(np.exp(at)))

    while high - low > 1e-4:
        span = _GOLDEN * (high - low)
        if loss(high - span) <= loss(low + span):
            high = low + span
        else:
            low = high - span
    return round(float(np.exp((low + high) / 2)), 4)


@dataclass(frozen=True, slots=True)
class Bin:
    """Decisions whose probability lies in (low, high].

    Attributes:
        rows: how many. confidence, accuracy: their means; 0 where there are none.
    """

    low: float
    high: float
    rows: int
    confidence: float
    accuracy: float


def reliability(probabilities: Floats, targets: Ints, bins: int = BINS) -> list[Bin]:
    """How often the most probable option was right, by how probable it was said to be."""
    chosen = probabilities.argmax(axis=1)
    confidence = probabilities.max(axis=1)
    right = chosen == targets
    edges = np.linspace(0.0, 1.0, bins + 1)
    found = []
    for low, high in pairwise(edges):
        inside = (confidence > low) & (confidence <= high)
        count = int(inside.sum())
        mean = float(confidence[inside].mean()) if count else 0.0
        accuracy = float(right[inside].mean()) if count else 0.0
        found.append(Bin(float(low), float(high), count, mean, accuracy))
    return found


def expected_calibration_error(bins: Sequence[Bin]) -> float:
    """Mean distance of confidence and accuracy, by rows (Naeini et al. 2015)."""
    rows = sum(one.rows for one in bins)
    return sum(one.rows * abs(one.confidence - one.accuracy) for one in bins) / max(1, rows)


def brier(probabilities: Floats, targets: Ints) -> float:
    """Mean squared distance from the right answer, summed over options: 0 to 2 (Brier 1950)."""
    wanted = np.zeros_like(probabilities)
    wanted[np.arange(len(targets)), targets] = 1.0
    return float(np.mean(np.square(probabilities - wanted).sum(axis=1)))


def choose(probabilities: Floats, thresholds: Sequence[float | None]) -> Ints:
    """As `options.choose`, of every row: the first option that reaches its threshold wins."""
    chosen: Ints = np.asarray(probabilities.argmax(axis=1), dtype=np.int64)
    for index in reversed(range(len(thresholds))):
        threshold = thresholds[index]
        if threshold is not None:
            chosen[probabilities[:, index] >= threshold] = index
    return chosen


@dataclass(frozen=True, slots=True)
class OptionFigures:
    """One option: rows that are it, decisions for it, and how many are both."""

    rows: int
    chosen: int
    right: int

    @property
    def precision(self) -> float:
        """Share of the decisions for it that are right; 0 where there are none."""
        return self.right / self.chosen if self.chosen else 0.0

    @property
    def recall(self) -> float:
        """Share of its rows that are found; 0 where there are none."""
        return self.right / self.rows if self.rows else 0.0


def by_option(chosen: Ints, targets: Ints, options: Sequence[str]) -> dict[str, OptionFigures]:
    """The figures of every option."""
    return {
        name: OptionFigures(
            int((targets == index).sum()),
            int((chosen == index).sum()),
            int(((chosen == index) & (targets == index)).sum()),
        )
        for index, name in enumerate(options)
    }


# --- thresholds -------------------------------------------------------------------

Loss = Callable[[Ints], float]


def precision_loss(targets: Ints, wanted: Mapping[int, float]) -> Loss:
    """How far precisions fall short of what is wanted, before everything else; then mistakes."""

    def loss(chosen: Ints) -> float:
        short = 0.0
        for option, precision in wanted.items():
            mine = chosen == option
            if mine.any():
                short += max(0.0, precision - float((targets[mine] == option).mean()))
            else:  # an option that is never chosen keeps any promise, and is of no use
                short += precision
        return 1000.0 * short + float((chosen != targets).mean())

    return loss


def cost_loss(targets: Ints, costs: Floats) -> Loss:
    """Mean cost of decisions; costs [C, C] by (right option, chosen option)."""

    def loss(chosen: Ints) -> float:
        return float(costs[targets, chosen].mean())

    return loss


def find_thresholds(probabilities: Floats, loss: Loss) -> list[float | None]:
    """Thresholds with a small loss on these rows, None where an option needs none.

    Options are gone through in turn, each given the best threshold among quantiles of its own
    probabilities while the others stay, until none changes.
    """
    options = probabilities.shape[1]
    grids = []
    for index in range(options):
        quantiles = np.quantile(probabilities[:, index], np.linspace(0, 1, _GRID))
        # Cut, not rounded: what has been chosen with the quantile is chosen with it.
        grids.append(sorted({float(np.floor(value * 1e4) / 1e4) for value in quantiles}))
    best: list[float | None] = [None] * options
    least = loss(choose(probabilities, best))
    changed = True
    while changed:
        changed = False
        for index in range(options):
            for value in (None, *grids[index]):
                tried = [*best[:index], value, *best[index + 1 :]]
                found = loss(choose(probabilities, tried))
                if found < least - 1e-12:
                    best, least, changed = tried, found, True
    return best


def parse_precision(texts: Sequence[str], options: Sequence[str]) -> dict[int, float]:
    """`answer=0.95` as {index of the option: precision}.

    Raises:
        BranchError: not of this form, no such option, or not in (0, 1].
    """
    found = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        index, number = _option(name, options, text), _number(value, text)
        if not 0 < number <= 1:
            raise BranchError(f"target precision {text!r}: must be in (0, 1]")
        found[index] = number
    return found


def parse_costs(texts: Sequence[str], options: Sequence[str]) -> Floats:
    """`search:answer=5` as costs [C, C]: to choose `answer` where `search` is right costs 5.

    Other mistakes cost 1, what is right costs nothing.

    Raises:
        BranchError: not of this form, no such option, or a negative cost.
    """
    costs: Floats = 1.0 - np.eye(len(options))
    for text in texts:
        pair, _, value = text.rpartition("=")
        right, found, chosen = pair.partition(":")
        number = _number(value, text)
        if not found or number < 0:
            raise BranchError(
                f"cost {text!r}: must be RIGHT:CHOSEN=COST, with a cost of at least 0"
            )
        costs[_option(right, options, text), _option(chosen, options, text)] = number
    return costs


def _option(name: str, options: Sequence[str], text: str) -> int:
    if name not in options:
        raise BranchError(f"{text!r}: {name!r} is none of {', '.join(options)}")
    return options.index(name)


def _number(value: str, text: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise BranchError(f"{text!r}: {value!r} is no number") from None
    if not np.isfinite(number):
        raise BranchError(f"{text!r}: must be finite")
    return number


# --- a report ---------------------------------------------------------------------


def figures(
    probabilities: Floats, targets: Ints, chosen: Ints, options: Sequence[str]
) -> dict[str, Any]:
    """What `branch.json` and evaluations say about labelled rows; plain values."""
    bins = reliability(probabilities, targets)
    right = probabilities[np.arange(len(targets)), targets]
    return {
        "rows": len(targets),
        "accuracy": _short(float((chosen == targets).mean())),
        "ece": _short(expected_calibration_error(bins)),
        "brier": _short(brier(probabilities, targets)),
        "log_loss": _short(float(-np.log(np.maximum(right, 1e-300)).mean())),
        "options": {
            name: {
                "rows": one.rows,
                "chosen": one.chosen,
                "precision": _short(one.precision),
                "recall": _short(one.recall),
            }
            for name, one in by_option(chosen, targets, options).items()
            if one.rows or one.chosen
        },
        "reliability": [
            {
                "up_to": _short(one.high),
                "rows": one.rows,
                "confidence": _short(one.confidence),
                "accuracy": _short(one.accuracy),
            }
            for one in bins
            if one.rows
        ],
    }


def value_figures(values: Floats, targets: Floats) -> dict[str, Any]:
    """The same of a value head: errors, and the share of the variance that is explained."""
    errors = values - targets
    spread = float(np.square(targets - targets.mean()).mean())
    squared = float(np.square(errors).mean())
    return {
        "rows": len(targets),
        "mean_absolute_error": _short(float(np.abs(errors).mean())),
        "root_mean_squared_error": _short(squared**0.5),
        "r_squared": _short(1 - squared / spread) if spread else 0.0,
    }


def _short(value: float) -> float:
    return round(value, 4)
