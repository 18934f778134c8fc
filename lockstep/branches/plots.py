"""Pictures of a branch's quality: reliability, and accuracy against layers.

matplotlib is an extra (`lockstep[branches]`); without it nothing is drawn and `False` says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.branches.sweep import Point


def _axes() -> Any:
    """A figure and its axes, or None where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    figure = Figure(figsize=(5, 4), layout="constrained")
    return figure, figure.subplots()


def reliability(series: Mapping[str, Sequence[Mapping[str, float]]], file: Path) -> bool:
    """How often decisions were right, by how probable they were said to be.

    Args:
        series: name -> bins, as `calibrate.figures` lists them under "reliability".
    """
    made = _axes()
    if made is None:
        return False
    figure, axes = made
    axes.plot([0, 1], [0, 1], color="0.6", linestyle="--", linewidth=1, label="calibrated")
    for name, bins in series.items():
        sizes = [10 + 200 * one["rows"] / sum(each["rows"] for each in bins) for one in bins]
        confidence = [one["confidence"] for one in bins]
        accuracy = [one["accuracy"] for one in bins]
        (line,) = axes.plot(confidence, accuracy, linewidth=1.5, label=name)
        axes.scatter(confidence, accuracy, s=sizes, color=line.get_color(), alpha=0.6)
    axes.set(xlabel="probability of the decision", ylabel="share that was right")
    axes.set(xlim=(0, 1.02), ylim=(0, 1.02))
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(file, dpi=120)
    return True


def exits(points: Sequence[Point], file: Path) -> bool:
    """Accuracy against the layer at which the branch ends."""
    made = _axes()
    if made is None:
        return False
    figure, axes = made
    axes.plot([point.exit for point in points], [point.accuracy for point in points], marker="o")
    axes.set(xlabel="exit layer", ylabel="accuracy on rows not trained on", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120)
    return True
