"""What branches keep beside the trunk: their own keys and values, and the rows at their fork."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.cache.groups.base import CacheGroup
from lockstep.cache.groups.full import FullAttention
from lockstep.cache.groups.sliding import SlidingWindow
from lockstep.cache.tree import Key, Node
from lockstep.types import LayerGroup


def branch_tail(index: int, layers: LayerGroup, page_tokens: int) -> CacheGroup:
    """Keys and values of a branch's own layers: cached as the trunk's of that kind are.

    Components are told apart by the branch's key, see `Want.own`.
    """
    kind = FullAttention if layers.window is None else SlidingWindow
    return kind(index, layers, page_tokens)


class Activations(FullAttention):
    """Hidden rows of all earlier positions that enter a fork; of use by the whole page."""

    partial = False

    def reusable(self, nodes: Sequence[Node], length: int, key: Key) -> int:
        usable = super().reusable(nodes, length, key)
        return usable - usable % self.page_tokens
