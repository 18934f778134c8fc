"""Which cache groups hold which layers: the trunk's, those of branches, and rows at stops."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.cache.lease import Need, Want
from lockstep.runner.groups import own_groups, tails_of
from lockstep.types import LayerGroup


class Layout:
    """The groups of an executor, by the layers that are asked for.

    Attributes:
        trunk: indices of the model's own groups. layers: the trunk's, a half-open range.
        tail_groups: those of branches' tails. rows_at: stop -> the group of its rows.
        whole: what a sequence needs that goes through all layers. resuming: stop -> what it
            takes to make the trunk's layers above it from the rows there.
    """

    def __init__(self, groups: Sequence[LayerGroup]) -> None:
        self._groups = tuple(groups)
        self.trunk = tuple(range(len(own_groups(groups))))
        self.layers = (0, 1 + max(max(groups[index].layers) for index in self.trunk))
        kinds = [(index, group.kind) for index, group in enumerate(groups)]
        self.tail_groups = tuple(index for index, kind in kinds if kind == "branch")
        self.rows_at = {
            groups[index].layers[0]: index for index, kind in kinds if kind == "activations"
        }
        self.whole = Need(self.wants(self.layers), fresh=self.layers[1])
        self.resuming = {stop: self._resuming(stop) for stop in self.rows_at}

    def wants(self, layers: tuple[int, int], own: str = "") -> tuple[Want, ...]:
        """The model's own groups with a layer in the half-open range `layers`."""
        begin, end = layers
        return tuple(
            Want(index, own)
            for index in self.trunk
            if any(begin <= layer < end for layer in self._groups[index].layers)
        )

    def cuts_through(self, layer: int) -> bool:
        """Whether a group of the model's own has layers on both sides."""
        groups = (self._groups[index].layers for index in self.trunk)
        return any(min(layers) < layer <= max(layers) for layers in groups)

    def tails(self, fork: int, exit_: int, own: str) -> tuple[Want, ...]:
        """The groups in which the branch of that key keeps layers [fork, exit_); none where
        the pool was laid out without them."""
        return tuple(Want(index, own) for index in tails_of(self._groups, fork, exit_))

    def rows(self, stop: int) -> Want | None:
        """The group that holds what enters that layer, if there is one."""
        return Want(self.rows_at[stop]) if stop in self.rows_at else None

    def _resuming(self, stop: int) -> Need:
        begin, end = self.layers
        return Need(
            self.wants((begin, stop)),
            self.wants((stop, end)),
            rows=self.rows(stop),
            stop=stop,
            fresh=end - begin,
            made=end - stop,
        )
