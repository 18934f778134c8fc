"""The proof that no page is lost, shared by accident or counted twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from lockstep.cache.lease import Lease, StepJournal
from lockstep.cache.pool import PagePool, PoolError
from lockstep.cache.tree import Key, Node, PrefixTree


@dataclass(frozen=True, slots=True)
class Books:
    """What a cache has on record; read only.

    Attributes:
        pool, tree: of the cache.
        owner: per group, page -> (node, key) of the component that it is.
        idle: (group, page) of components that only the tree holds, in eviction order.
        idle_pages: how many of them each group has.
    """

    pool: PagePool
    tree: PrefixTree
    owner: list[dict[int, tuple[Node, Key]]]
    idle: Collection[tuple[int, int]]
    idle_pages: list[int]

    def check(self, leases: Iterable[Lease], journals: Iterable[StepJournal]) -> None:
        """Raise `PoolError` unless every page's references equal its holders: entries of
        these leases, components of the tree, and what the journals' plans hold."""
        self.pool.check_integrity()
        live: Counter[tuple[int, int]] = Counter()
        pins: Counter[int] = Counter()
        for lease in leases:
            pins[id(lease.node)] += 1
            for group, table in enumerate(lease.tables):
                live.update((group, page) for page in table if page >= 0)
        for journal in journals:
            live.update(journal.pins)
            live.update((group, page) for _, group, _, page in journal.swaps)
        self._check_references(live + self._check_nodes(pins))
        self._check_idle(live)

    def _check_nodes(self, pins: Counter[int]) -> Counter[tuple[int, int]]:
        """Check the tree against the owners and the leases' places; its pages."""
        held: Counter[tuple[int, int]] = Counter()
        for node in self.tree.nodes():
            if node.pins != pins[id(node)]:
                raise PoolError(f"a node has {node.pins} pins, {pins[id(node)]} leases stand there")
            if not (node.components or node.children or node.pins):
                raise PoolError("an empty node was left in the tree")
            if sorted(node.children) != node.order:
                raise PoolError("a node's children and their order differ")
            for key, page in node.components.items():
                held[(key[0], page)] += 1
                if self.owner[key[0]].get(page) != (node, key):
                    raise PoolError(f"page {page} of group {key[0]} has another owner in the books")
        if sum(len(pages) for pages in self.owner) != held.total():
            raise PoolError("the books name components that the tree does not hold")
        return held

    def _check_references(self, held: Counter[tuple[int, int]]) -> None:
        for group, refs in enumerate(self.pool.refs):
            for page, count in enumerate(refs):
                if count != held[(group, page)]:
                    raise PoolError(
                        f"page {page} of group {group}: {count} references, "
                        f"{held[(group, page)]} holders"
                    )

    def _check_idle(self, live: Counter[tuple[int, int]]) -> None:
        idle = {
            (group, page)
            for group, pages in enumerate(self.owner)
            for page in pages
            if not live[(group, page)]
        }
        if idle != set(self.idle):
            raise PoolError("the eviction order does not name exactly the idle components")
        counts = Counter(group for group, _ in idle)
        if self.idle_pages != [counts[group] for group in range(len(self.owner))]:
            raise PoolError("idle page counts are wrong")
