"""The cache groups of a model that serves branches. Imports no torch.

The model's own groups are cut where the trunk's rows may stop for a branch (`Branch.stop`), so
that a context can be cached below a stop alone. Behind them in `Executor.groups` stand those of
the branches. A context branch keeps the keys and values of its layers [fork, exit) in groups of
kind "branch", its tail: one for each kind of attention among those layers. All branches of one
(fork, exit) share them. A group of kind "activations" holds the hidden rows that enter the layer
at a stop, from which the layers above can be computed later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from lockstep.branch import Branch
from lockstep.types import BranchLayers, LayerGroup


def executor_groups(
    own: Sequence[LayerGroup], branches: Iterable[Branch | BranchLayers], hidden_size: int
) -> tuple[LayerGroup, ...]:
    """The groups of a model that serves these branches, as in `Executor.groups`.

    First the model's own, cut at the branches' stops and ordered by their first layers, or as
    they are where there is no stop; then tails; then an activations group for each stop. The
    order of the branches does not matter.

    Args:
        own: the model's groups, which have all of its layers among them.
    """
    branches = tuple(branches)
    num_layers = sum(len(group.layers) for group in own)
    # What enters layer 0 is the embedding of the ids, and behind the last layer nothing comes.
    stops = sorted({branch.stop for branch in branches if 0 < branch.stop < num_layers})
    ranges = sorted({(b.fork, b.exit) for b in branches if b.adapt == "context"})
    return (
        *_cut(own, stops, num_layers),
        *(tail for fork, exit_ in ranges for tail in _tails(own, fork, exit_)),
        *(LayerGroup(f"rows:{at}", "activations", (at,), 1, hidden_size) for at in stops),
    )


def _cut(own: Sequence[LayerGroup], stops: Sequence[int], num_layers: int) -> list[LayerGroup]:
    """Groups of which none has layers on both sides of a stop."""
    if not stops:
        return list(own)
    found = []
    for group in own:
        pieces = []
        for begin, end in pairwise((0, *stops, num_layers)):
            layers = tuple(layer for layer in group.layers if begin <= layer < end)
            if layers:
                pieces.append(replace(group, name=f"{group.name}:{begin}-{end}", layers=layers))
        found += pieces if len(pieces) > 1 else [group]
    return sorted(found, key=lambda group: group.layers)


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


def cuts(
    model: Sequence[LayerGroup], groups: Sequence[LayerGroup]
) -> tuple[tuple[int, int, dict[int, int]], ...]:
    """The trunk between its stops: (begin, end, group of the model -> own group with layers in
    [begin, end)).

    Args:
        model: the model's groups, uncut. groups: as `Executor.groups`.
    """
    own = own_groups(groups)
    stops = [group.layers[0] for group in groups if group.kind == "activations"]
    num_layers = sum(len(group.layers) for group in own)
    return tuple(
        (
            begin,
            end,
            {
                place: index
                for place, whole in enumerate(model)
                for index, group in enumerate(own)
                if group.layers[0] in whole.layers
                and any(begin <= layer < end for layer in group.layers)
            },
        )
        for begin, end in pairwise((0, *stops, num_layers))
    )


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


def activations_of(groups: Sequence[LayerGroup], layer: int) -> int | None:
    """Index of the group that holds what enters a layer."""
    for index, group in enumerate(groups):
        if group.kind == "activations" and group.layers == (layer,):
            return index
    return None
