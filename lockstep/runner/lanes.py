"""Which rows pass through which layers of a step, and in whose company. Imports no torch.

Runs may pass through different layers: some leave early, some enter late. The layers are
cut where that changes, so that inside one segment the rows are constant, but for its last
layer: rows that nobody reads after it only write their keys and values there. They are also
cut at every stop (`groups`), so that each kind of attention has one cache group in a segment.

Inside a segment rows are divided into lanes, which the layers take one after the other:
first the trunk's, then those with adapters, one lane for each place where keys and values
lie. So a branch's rows find what the trunk's rows of the same step wrote, and the trunk's
rows are launched as they are in a step without any branch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lockstep.runner.plan import TokenRun

Ints = NDArray[np.int32]
Tail = tuple[int, int]
"""The (fork, exit) of context branches, which share the groups of their tail."""


@dataclass(frozen=True, slots=True)
class BranchPlace:
    """Where a loaded branch acts.

    Attributes:
        fork, exit: layers with its adapters. slot: its place in every set of adapters.
        tail: where the keys and values of those layers lie; None for the trunk's groups.
    """

    fork: int
    exit: int
    slot: int
    tail: Tail | None = None


@dataclass(frozen=True, slots=True)
class LaneRows:
    """Runs that pass through a segment together.

    Attributes:
        runs: their indices in the plan, in its order; adapted ones branch by branch, since
            rows of one adapter are best next to each other.
        whole: the lane of the segment before that these rows are, all and in order.
        gather: else the rows' places among all that left the segment before, lane by lane,
            and behind them the segment's `kept` runs.
        leaving: how many of each run's rows, its last ones, leave; at least one of all.
        exits: how many of those need logits.
        adapted: whether adapters act on them. tail: see `BranchPlace`.
    """

    runs: tuple[int, ...]
    whole: int | None
    gather: Ints | None
    leaving: tuple[int, ...]
    exits: tuple[int, ...]
    adapted: bool = False
    tail: Tail | None = None


@dataclass(frozen=True, slots=True)
class SegmentRows:
    """Layers [begin, end) and who passes through them.

    Attributes:
        kept: runs whose rows come from the pages of the activations group of layer `begin`.
        keeps: (run, its first row's place among all that leave, lane by lane) of those whose
            rows, all of them, are stored on the pages of the activations group of layer `end`.
    """

    begin: int
    end: int
    lanes: tuple[LaneRows, ...]
    kept: tuple[int, ...] = ()
    keeps: tuple[tuple[int, int], ...] = ()


def segments_of(
    runs: Sequence[TokenRun],
    branches: Mapping[str, BranchPlace],
    activations: Mapping[int, int],
) -> tuple[SegmentRows, ...]:
    """The segments of a plan that `check_runs` accepts, ascending; without those nobody is in.

    The rows that "left" before the first are those of the runs at layer 0, in the plan's order.

    Args:
        activations: stop -> the index of its activations group.
    """
    embedded = {i: len(run.tokens) for i, run in enumerate(runs) if run.layers[0] == 0}
    before = [embedded] if embedded else []
    found = []
    for begin, end in pairwise(_cuts(runs, branches, activations)):
        active = [
            i for i, run in enumerate(runs) if run.layers[0] <= begin and run.layers[1] >= end
        ]
        if not active:
            continue
        starts, total = _starts(before)
        kept = tuple(i for i in active if runs[i].kept and runs[i].layers[0] == begin)
        for i in kept:
            starts[i] = total
            total += len(runs[i].tokens)
        stored = {i for i in active if _stores(runs[i], activations, end)}
        lanes = []
        for (adapted, tail), members in _lanes(runs, active, branches, begin).items():
            whole = next((at for at, rows in enumerate(before) if list(rows) == members), None)
            lanes.append(
                LaneRows(
                    tuple(members),
                    whole,
                    _entering(runs, members, starts, begin) if whole is None else None,
                    _leaving(runs, members, end, stored),
                    tuple(runs[i].logits if runs[i].layers[1] == end else 0 for i in members),
                    adapted,
                    tail,
                )
            )
        before = [dict(zip(lane.runs, lane.leaving, strict=True)) for lane in lanes]
        ends, _ = _starts(before)
        keeps = tuple((i, ends[i]) for i in active if i in stored)
        found.append(SegmentRows(begin, end, tuple(lanes), kept, keeps))
    return tuple(found)


def exit_spans(
    segments: Sequence[SegmentRows], runs: Sequence[TokenRun]
) -> tuple[tuple[int, int], ...]:
    """Per run, (begin, end) of its rows among all that need logits, in the order they exit."""
    spans = [(0, 0)] * len(runs)
    total = 0
    for segment in segments:
        for lane in segment.lanes:
            for i, count in zip(lane.runs, lane.exits, strict=True):
                if count:
                    spans[i] = (total, total + count)
                    total += count
    return tuple(spans)


def last_rows(lengths: Ints, wanted: Ints) -> Ints:
    """Indices of the last `wanted` [B] rows of each of B stretches of `lengths` [B] rows."""
    owner = np.repeat(np.arange(len(lengths)), lengths)
    from_end = np.cumsum(lengths)[owner] - np.arange(len(owner))
    return np.flatnonzero(from_end <= wanted[owner]).astype(np.int32)


def _cuts(
    runs: Sequence[TokenRun],
    branches: Mapping[str, BranchPlace],
    activations: Mapping[int, int],
) -> list[int]:
    """Layers at whose entrance rows enter, leave, or change their lane, and every stop."""
    cuts = {layer for run in runs for layer in run.layers}.union(activations)
    for run in runs:
        if run.branch and run.layers[0] < branches[run.branch].fork < run.layers[1]:
            cuts.add(branches[run.branch].fork)
    return sorted(cuts)


def _stores(run: TokenRun, activations: Mapping[int, int], layer: int) -> bool:
    """Whether a run's rows are stored as they leave the layers below `layer`."""
    group = activations.get(layer)
    return (
        run.keeps
        and group is not None
        and run.layers[0] < layer <= run.layers[1]
        and bool(run.pages[group])
    )


def _starts(before: Sequence[Mapping[int, int]]) -> tuple[dict[int, int], int]:
    """Each run's first row among those that left the segment before, and how many they are."""
    starts: dict[int, int] = {}
    row = 0
    for lane in before:
        for i, count in lane.items():
            starts[i] = row
            row += count
    return starts, row


def _lanes(
    runs: Sequence[TokenRun],
    active: Sequence[int],
    branches: Mapping[str, BranchPlace],
    begin: int,
) -> dict[tuple[bool, Tail | None], list[int]]:
    """Members of each (adapted, tail), the trunk's first, then adapted rows on its groups."""
    found: dict[tuple[bool, Tail | None], list[int]] = {}
    trunk = []
    for i in active:
        place = branches[runs[i].branch] if runs[i].branch else None
        if place is None or begin < place.fork:
            trunk.append(i)
        else:
            found.setdefault((True, place.tail), []).append(i)
    for members in found.values():
        members.sort(key=lambda i: branches[runs[i].branch].slot)
    if trunk:
        found[False, None] = trunk
    return dict(sorted(found.items(), key=lambda entry: (entry[0][0], entry[0][1] or (-1, -1))))


def _leaving(
    runs: Sequence[TokenRun], members: Sequence[int], end: int, stored: Collection[int]
) -> tuple[int, ...]:
    """How many of each member's rows, its last ones, somebody reads at layer `end`, or stores.

    At least one of all: no kernel takes a launch without rows.
    """
    sources = {run.source for run in runs if run.source is not None and run.layers[0] == end}
    left = [
        len(runs[i].tokens)
        if runs[i].layers[1] > end or i in sources or i in stored
        else runs[i].logits
        for i in members
    ]
    if not any(left):
        left[-1] = 1
    return tuple(left)


def _entering(
    runs: Sequence[TokenRun], members: Sequence[int], starts: Mapping[int, int], begin: int
) -> Ints:
    """Places of the members' rows among those that left before; of these runs all have."""
    pieces = []
    for i in members:
        source = runs[i].source
        copies = source is not None and runs[i].layers[0] == begin > 0
        first = starts[source if copies and source is not None else i]
        pieces.append(np.arange(first, first + len(runs[i].tokens), dtype=np.int32))
    return np.concatenate(pieces)


def check_runs(
    runs: Sequence[TokenRun],
    num_layers: int,
    num_groups: int,
    branches: Mapping[str, BranchPlace],
    activations: Mapping[int, int],
) -> None:
    """Refuse a plan that would compute nonsense.

    Raises:
        ValueError: naming the run.
    """
    if not runs:
        raise ValueError("a plan without runs has nothing to compute")
    for index, run in enumerate(runs):
        first, last = run.layers
        if not 0 <= first < last <= num_layers:
            raise ValueError(f"run {index}: layers {run.layers} of {num_layers}")
        if not run.tokens or run.logits > len(run.tokens):
            raise ValueError(f"run {index}: {run.logits} logits of {len(run.tokens)} tokens")
        if run.sample is not None and run.logits < 1:
            raise ValueError(f"run {index} samples without logits")
        if run.prompt_targets and len(run.prompt_targets) != run.logits:
            raise ValueError(
                f"run {index}: {len(run.prompt_targets)} targets of {run.logits} logits"
            )
        if len(run.pages) != num_groups:
            raise ValueError(f"run {index}: pages of {len(run.pages)} groups, not {num_groups}")
        if run.branch or run.scores:
            _check_branch(index, run, branches)
        if first or run.kept or run.source is not None:
            _check_entrance(index, runs, activations)


def _check_branch(index: int, run: TokenRun, branches: Mapping[str, BranchPlace]) -> None:
    place = branches.get(run.branch)
    if place is None:
        raise ValueError(f"run {index}: branch {run.branch!r} is not loaded")
    if run.layers[1] > place.exit:
        raise ValueError(
            f"run {index}: layers {run.layers} go beyond the exit {place.exit} of its branch"
        )
    if run.scores and (run.layers[1] != place.exit or run.logits != 1):
        raise ValueError(
            f"run {index} is scored: it must leave at {place.exit} with one row of logits, "
            f"it leaves at {run.layers[1]} with {run.logits}"
        )
    if run.sample is not None or run.prompt_targets or run.pooling or run.keeps:
        raise ValueError(
            f"run {index} is a branch's: its rows are not drawn from, pooled or kept, and have no "
            "prompt logprobs"
        )


def _check_entrance(index: int, runs: Sequence[TokenRun], activations: Mapping[int, int]) -> None:
    """Whether there is something where the run enters."""
    run = runs[index]
    first = run.layers[0]
    if run.kept:
        group = activations.get(first)
        if run.source is not None or group is None or not run.pages[group]:
            raise ValueError(f"run {index}: no activations are kept for layer {first}")
        return
    if run.source is None:
        if first != 0:
            raise ValueError(f"run {index} enters at layer {first} without a source")
        return
    source = runs[run.source]
    if len(source.tokens) != len(run.tokens) or source.start != run.start:
        raise ValueError(f"run {index} copies run {run.source}, which stands elsewhere")
    at_embedding = first == source.layers[0] == 0
    if not (at_embedding or source.layers[0] < first <= source.layers[1]):
        raise ValueError(
            f"run {index} enters at layer {first}, where its source {run.source} "
            f"(layers {source.layers}) has no rows"
        )
