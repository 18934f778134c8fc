"""Sliding window: the pages of the last `window` positions; reusable where they are present."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.cache.groups.base import CacheGroup, pages_in
from lockstep.cache.tree import Key, Node
from lockstep.config import ConfigError
from lockstep.types import LayerGroup


class SlidingWindow(CacheGroup):
    """Keys and values that the next query can still see (itself included in the window)."""

    def __init__(self, index: int, layers: LayerGroup, page_tokens: int) -> None:
        super().__init__(index, layers, page_tokens)
        if layers.window is None or layers.window < 1:
            raise ConfigError(f"group {layers.name!r}: window must be at least 1")
        self.window = layers.window

    def reusable(self, nodes: Sequence[Node], length: int, key: Key) -> int:
        # A hole at page i hides every length whose window reaches into it; the next
        # candidate is the hole's start, with the window before it to be seen to in turn.
        index = pages_in(length, self.page_tokens) - 1
        while index >= self.first_needed(length) and length:
            if nodes[index].page(key) is None:
                length = index * self.page_tokens
            index -= 1
        return length

    def first_needed(self, position: int) -> int:
        return max(0, position - self.window + 1) // self.page_tokens

    def live_pages(self, length: int) -> int:
        # `window` consecutive positions touch at most this many pages.
        most = 1 if self.window == 1 else (self.window - 2) // self.page_tokens + 2
        return min(pages_in(length, self.page_tokens), most)
