"""How much of a sequence's prefix the tree has, for what the sequence needs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from lockstep.cache.groups import CacheGroup
from lockstep.cache.lease import Match, Need, Want
from lockstep.cache.tree import Identity, Node, PrefixTree

MOST_LOOKED_AT = 256
"""Children of a node that a lookup considers for a page to copy when the nearest has none."""


class Lookup:
    """Reads the tree; changes nothing.

    Args:
        unwritten: (group, page) of components whose plan is not done.
    """

    def __init__(
        self,
        tree: PrefixTree,
        groups: Sequence[CacheGroup],
        unwritten: Collection[tuple[int, int]],
    ) -> None:
        self._tree = tree
        self._groups = groups
        self._unwritten = unwritten
        self._size = tree.page_tokens

    def match(self, identity: Identity, tokens: Sequence[int], limit: int, need: Need) -> Match:
        """The longest prefix of `tokens[:limit]` that serves the need."""
        nodes, walked = self._tree.walk(identity, tokens, limit)
        begun = walked % self._size
        if begun:
            self._prefer_ready(nodes, tuple(tokens[walked - begun : walked]), need)
        match = Match(identity, need, nodes, walked, walked, 0, 0, 0)
        self._settle(match, limit, written=False)
        match.soon = match.length
        self._settle(match, limit, written=True)
        return match

    def shorten(self, match: Match, length: int) -> None:
        """Make do with no more than `length` tokens, whole pages."""
        match.length = match.soon = length
        self._settle(match, length, written=True)

    def _settle(self, match: Match, limit: int, *, written: bool) -> None:
        """Lower `length` until all that it asks for is there; find `behind` and `held`."""
        need, nodes = match.need, match.nodes
        held = self._usable(nodes, match.walked, need.held)
        length = self._usable(nodes, match.length, need.wants)
        while True:
            match.length = length
            match.behind = self._whole(nodes, self._usable(nodes, length, need.lagging), match)
            match.held = self._whole(nodes, held, match, need.held)
            there = self._rows_until(match, written=written)
            if there == length and (
                length % self._size == 0 or self._can_copy(match, limit, written=written)
            ):
                return
            if there == length:
                there -= there % self._size
            length = self._usable(nodes, there, need.wants)

    def _whole(
        self,
        nodes: list[Node],
        reach: int,
        match: Match,
        wants: tuple[Want, ...] | None = None,
    ) -> int:
        """A group that goes less far than the others, or further, does so by whole pages."""
        begun = reach % self._size
        if reach == match.length or not begun:
            return reach
        return self._usable(nodes, reach - begun, match.need.lagging if wants is None else wants)

    def _rows_until(self, match: Match, *, written: bool) -> int:
        """How far what is missing above the stop can be made."""
        rows, first = match.need.rows, match.first_row
        if rows is None:
            return match.length
        for index in range(first // self._size, -(-match.length // self._size)):
            page = match.nodes[index].page((rows.group, rows.own))
            if page is None or (written and (rows.group, page) in self._unwritten):
                return max(first, index * self._size)
        return match.length

    def _can_copy(self, match: Match, limit: int, *, written: bool) -> bool:
        """Whether the page that is matched in part can be copied in every group."""
        need, length = match.need, match.length
        from_rows = match.first_row < length
        if need.keeps and not from_rows and length < limit:
            return False  # the rows in front of its own would be missing on their page
        if not written:
            return True
        wants = [*need.wants]
        wants += need.lagging if match.behind == length else ()
        wants += need.held if match.held == length else ()
        if from_rows and need.rows is not None:
            wants.append(need.rows)
        return self._is_written(match.nodes[length // self._size], wants)

    def _prefer_ready(self, nodes: list[Node], begun: tuple[int, ...], need: Need) -> None:
        """Of the nodes whose page begins with these tokens, take one that can be copied now:
        best of all with everything, else with what the rest can be made from."""
        parent = nodes[-1].parent
        assert parent is not None
        whole = (*need.wants, *need.lagging, *need.held)
        ways = [whole] if need.rows is None else [whole, (*need.wants, need.rows)]
        for wants in ways:
            if self._is_written(nodes[-1], wants):
                return
            for node in islice(self._tree.beginning_with(parent, begun), MOST_LOOKED_AT):
                if self._is_written(node, wants):
                    nodes[-1] = node
                    return

    def _is_written(self, node: Node, wants: Iterable[Want]) -> bool:
        for want in wants:
            page = node.page((want.group, want.own))
            if page is None or (want.group, page) in self._unwritten:
                return False
        return True

    def _usable(self, nodes: list[Node], length: int, wants: tuple[Want, ...]) -> int:
        settled = False
        while not settled and length:
            settled = True
            for want in wants:
                usable = self._groups[want.group].reusable(nodes, length, (want.group, want.own))
                if usable < length:
                    length, settled = usable, False
        return length
