"""Quality against the layer at which a branch ends: how early can the decision be read?

Every branch has the same number of layers, [exit - depth, exit), and the same recipe else. The
trunk's rows at all forks come from one pass, the rows that are measured are the same for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lockstep.branch import BranchError
from lockstep.branches import calibrate
from lockstep.branches.build import Plan, Progress, Trunk, describe, part, train_once
from lockstep.branches.data import Dataset
from lockstep.branches.layers import Layers


@dataclass(frozen=True, slots=True)
class Point:
    """One exit.

    Attributes:
        share: of the trunk's layers that a decision's rows pass through.
        accuracy, ece, brier: on the rows that were not trained on, by training's own float32
            layers. Of a value head `accuracy` is R squared, the others 0.
    """

    fork: int
    exit: int
    share: float
    accuracy: float
    ece: float
    brier: float


def default_exits(layers: int, depth: int) -> list[int]:
    """Up to seven exits from `depth` to the last layer, evenly spread."""
    count = min(7, layers - depth + 1)
    return sorted({round(depth + i * (layers - depth) / max(1, count - 1)) for i in range(count)})


def sweep(
    trunk: Trunk,
    data: Dataset,
    plan: Plan,
    exits: Sequence[int],
    *,
    calibration: Dataset | None = None,
    progress: Progress = lambda stage, done: None,
) -> list[Point]:
    """Train and measure a branch for each exit; nothing is written.

    Raises:
        BranchError: an exit that leaves no room for the branch's layers, or is beyond the last.
    """
    depth = plan.recipe.exit - plan.recipe.fork
    for end in exits:
        if not depth <= end <= trunk.runner.num_layers:
            raise BranchError(
                f"exit {end}: must be in [{depth}, {trunk.runner.num_layers}], a branch has "
                f"{depth} layers"
            )
    branch = describe(trunk, plan)
    parts = part(trunk, branch, plan, data, calibration)
    rows = trunk.rows(parts.tokens, [end - depth for end in exits], progress)
    found = []
    for end in exits:
        own = replace(plan, recipe=replace(plan.recipe, fork=end - depth, exit=end))
        layers = Layers(trunk.runner.model, end - depth, end)

        def shown(stage: str, done: float, end: int = end) -> None:
            progress(f"exit {end}: {stage}", done)

        _, outputs = train_once(trunk, layers, parts, rows[end - depth], own, shown)
        share = end / trunk.runner.num_layers
        if branch.head == "value":
            wanted = np.array([float(parts.examples[i].target) for i in parts.held])
            explained = calibrate.value_figures(outputs[:, 0], wanted)["r_squared"]
            found.append(Point(end - depth, end, share, explained, 0.0, 0.0))
            continue
        targets = np.array([int(parts.examples[i].target) for i in parts.held], dtype=np.int64)
        probabilities = calibrate.softmax(outputs)
        most = probabilities.argmax(axis=1)
        figures = calibrate.figures(probabilities, targets, most, branch.options)
        found.append(
            Point(end - depth, end, share, figures["accuracy"], figures["ece"], figures["brier"])
        )
    return found
