"""What branches keep beside the trunk: their own keys and values, and the rows at stops."""

from __future__ import annotations

from lockstep.cache.groups.base import CacheGroup
from lockstep.cache.groups.full import FullAttention
from lockstep.cache.groups.sliding import SlidingWindow
from lockstep.types import LayerGroup


def branch_tail(index: int, layers: LayerGroup, page_tokens: int) -> CacheGroup:
    """Keys and values of a branch's own layers: cached as the trunk's of that kind are.

    Components are told apart by the branch's key, see `Want.own`.
    """
    kind = FullAttention if layers.window is None else SlidingWindow
    return kind(index, layers, page_tokens)


class Activations(FullAttention):
    """Hidden rows that enter the layer at a stop. Each is read to compute its own position's
    upper layers, and by nobody behind it."""

    def first_needed(self, position: int) -> int:
        return position // self.page_tokens
