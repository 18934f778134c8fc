"""Full attention: every page from the start; reusable at any token."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.cache.groups.base import CacheGroup, pages_in
from lockstep.cache.tree import Key, Node


class FullAttention(CacheGroup):
    """Keys and values of all earlier positions; a prefix is usable as far as its pages go."""

    def reusable(self, nodes: Sequence[Node], length: int, key: Key) -> int:
        for index in range(pages_in(length, self.page_tokens)):
            if nodes[index].page(key) is None:
                return index * self.page_tokens
        return length

    def first_needed(self, position: int) -> int:
        return 0

    def live_pages(self, length: int) -> int:
        return pages_in(length, self.page_tokens)
