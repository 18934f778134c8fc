"""What a kind of cache component answers for: positions in, page indices out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from lockstep.cache.tree import Key, Node
from lockstep.types import LayerGroup


class CacheGroup(ABC):
    """One layer group's rules. A sequence's table has one entry per page of tokens.

    Entry i belongs to positions [i * page_tokens, (i + 1) * page_tokens): their keys and
    values, the state behind the last of them, the rows at a stop; -1 where the
    sequence holds nothing. An entry is written while its positions are computed.

    Mutation: none; a group is a pure function of positions and of what nodes hold, and
    keeps no record of sequences. Ownership: references belong to `PrefixCache` alone,
    which takes and drops them as the answers here say. Failure: nothing here raises on
    valid positions (0 <= start < end).

    Where the kinds to come fit: a recurrent group writes an entry only at kept chunk
    boundaries and is reusable at exactly these; a branch tail is any kind below whose
    `Want.own` names the branch; rows at a stop are read once each, by whoever computes the
    layers above for their own positions.

    Attributes:
        index: in the model's groups. layers: the layer group itself.
        page_tokens: tokens that one table entry stands for.
        partial: whether a page matched in part is of use after copying it (true where
            every token has slots of its own); where not, `reusable` answers whole pages.
    """

    partial: bool = True

    def __init__(self, index: int, layers: LayerGroup, page_tokens: int) -> None:
        self.index = index
        self.layers = layers
        self.page_tokens = page_tokens

    @abstractmethod
    def reusable(self, nodes: Sequence[Node], length: int, key: Key) -> int:
        """The largest length' <= length at which this group's component is there.

        Args:
            nodes: nodes[i] covers page i; at least ceil(length / page_tokens) of them.
            length: matched tokens; inside the last page when not a multiple of a page.
            key: of this group's components in a node.
        """

    @abstractmethod
    def first_needed(self, position: int) -> int:
        """Index of the first table entry that a query at `position` or later reads."""

    @abstractmethod
    def live_pages(self, length: int) -> int:
        """Most entries held at once by a lone sequence that grows to `length` in small steps."""

    def writes(self, start: int, end: int) -> Iterable[int]:
        """Ascending indices of the entries that computing positions [start, end) writes."""
        return range(start // self.page_tokens, (end - 1) // self.page_tokens + 1)


def pages_in(length: int, page_tokens: int) -> int:
    """Pages that cover `length` tokens."""
    return -(-length // page_tokens)
