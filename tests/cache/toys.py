"""Kinds of component that no model here has yet, to show that they fit the interface."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lockstep.cache.groups import CacheGroup
from lockstep.cache.tree import Key, Node


class Recurrent(CacheGroup):
    """State at every `chunk`-th position: entry i holds the state behind page i's last token."""

    partial = False
    chunk = 8  # tokens, a multiple of page_tokens

    def reusable(self, nodes: Sequence[Node], length: int, key: Key) -> int:
        boundary = length - length % self.chunk
        while boundary:
            if key in nodes[boundary // self.page_tokens - 1].components:
                return boundary
            boundary -= self.chunk
        return 0

    def first_needed(self, position: int) -> int:
        return max(0, position // self.chunk * self.chunk // self.page_tokens - 1)

    def live_pages(self, length: int) -> int:
        return min(2, length // self.chunk)  # the state it reads and the one it writes

    def writes(self, start: int, end: int) -> Iterable[int]:
        first = start - start % self.chunk + self.chunk
        return [boundary // self.page_tokens - 1 for boundary in range(first, end + 1, self.chunk)]
