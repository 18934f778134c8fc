"""The cache groups that branches need beside the model's own. Imports no torch.

They stand behind the model's groups in `Executor.groups`. A context branch keeps the keys
and values of its layers [fork, exit) in groups of kind "branch", its tail: one for each
kind of attention among those layers. All branches of one (fork, exit) share them. A group
of kind "activations" holds the hidden rows that enter a fork.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lockstep.branch import Branch
from lockstep.types import LayerGroup


def branch_groups(
    own: Sequence[LayerGroup],
    branches: Iterable[Branch],
    hidden_size: int,
    *,
    keep_activations: bool = False,
) -> tuple[LayerGroup, ...]:
    """The groups that these branches' contexts need, in an order that their own does not move.

    Args:
        own: the model's groups. keep_activations: with those that hold what enters each fork.
    """
    ranges = sorted({(b.fork, b.exit) for b in branches if b.adapt == "context"})
    found = [tail for fork, exit_ in ranges for tail in _tails(own, fork, exit_)]
    if keep_activations:
        # What enters layer 0 is the embedding of the ids: there is nothing to keep.
        forks = sorted({fork for fork, _ in ranges if fork})
        found += [
            LayerGroup(f"fork:{fork}", "activations", (fork,), 1, hidden_size) for fork in forks
        ]
    return tuple(found)


def _tails(own: Sequence[LayerGroup], fork: int, exit_: int) -> list[LayerGroup]:
    found = []
    for group in own:
        layers = tuple(layer for layer in group.layers if fork <= layer < exit_)
        if layers:
            kind = "" if group.window is None else ":sliding"
            name = f"tail:{fork}-{exit_}{kind}"
            found.append(
                LayerGroup(name, "branch", layers, group.kv_heads, group.head_dim, group.window)
            )
    return found


def own_groups(groups: Sequence[LayerGroup]) -> tuple[LayerGroup, ...]:
    """The model's groups, which come first."""
    return tuple(group for group in groups if group.kind not in ("branch", "activations"))


def tails(groups: Sequence[LayerGroup]) -> dict[tuple[int, int], tuple[int, ...]]:
    """(fork, exit) -> the indices of its tail's groups."""
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    for index, group in enumerate(groups):
        if group.kind == "branch":
            _, range_, *_ = group.name.split(":")
            fork, exit_ = map(int, range_.split("-"))
            found[fork, exit_] = (*found.get((fork, exit_), ()), index)
    return found


def tails_of(groups: Sequence[LayerGroup], fork: int, exit_: int) -> tuple[int, ...]:
    """Indices of the groups of that range's tail; none where it was not asked for at start."""
    return tails(groups).get((fork, exit_), ())


def activations_of(groups: Sequence[LayerGroup], fork: int) -> int | None:
    """Index of the group that holds what enters a fork."""
    for index, group in enumerate(groups):
        if group.kind == "activations" and group.layers == (fork,):
            return index
    return None
