"""`PrefixCache`: pages, tree and groups together, as the scheduler sees them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.cache.groups import CacheGroup
from lockstep.cache.groups.base import pages_in
from lockstep.cache.integrity import Books
from lockstep.cache.layout import Layout
from lockstep.cache.lease import Lease, Match, Need, StepJournal, Want
from lockstep.cache.lookup import Lookup
from lockstep.cache.pool import PagePool, PoolError
from lockstep.cache.tree import Identity, Key, Node, PrefixTree
from lockstep.runner.plan import PageCopy


@dataclass(slots=True)
class CacheStats:
    """Counters of the cache.

    Attributes:
        walked, matched: tokens that the tree knew, and of these that every group could
            use; the difference lacked a component (evicted, or a state never kept).
        copies: pages copied on write. evictions: components dropped for room.
    """

    walked: int = 0
    matched: int = 0
    copies: int = 0
    evictions: int = 0


class PrefixCache:
    """Reusable prefixes over a pool that is never over-committed.

    One eviction policy: least recently released first, over all groups, among components
    that only the tree holds. A sequence releases its pages last to first, so of a chain
    the leaf goes first; a node may lose its sliding component and keep full attention.

    Failure: `open` and `grow` report a full pool by their result and leave nothing
    half-done; `PoolError` means a defect in the caller. Not thread-safe.

    Args:
        pool: owned by this cache from here on.
        groups: one per layer group, in the model's order.
        page_tokens: tokens of a page, equal for all groups.
        keep: False drops a component as soon as no live sequence holds its page.
        keep_tails: False gives up branches' tails before anything else, and `drop_tails` all.
    """

    def __init__(
        self,
        pool: PagePool,
        groups: Sequence[CacheGroup],
        page_tokens: int,
        *,
        keep: bool = True,
        keep_tails: bool = False,
    ) -> None:
        self.pool = pool
        self.groups = tuple(groups)
        self.page_tokens = page_tokens
        self.keep = keep
        self.layout = Layout([group.layers for group in self.groups])
        self._fleeting = frozenset(() if keep_tails else self.layout.tail_groups)
        self.tree = PrefixTree(page_tokens)
        self.stats = CacheStats()
        self._owner: list[dict[int, tuple[Node, Key]]] = [{} for _ in self.groups]
        self._idle: OrderedDict[tuple[int, int], None] = OrderedDict()  # oldest first
        self._idle_pages = [0] * len(self.groups)
        self._unwritten: set[tuple[int, int]] = set()  # adopted, their plan not done
        self._lookup = Lookup(self.tree, self.groups, self._unwritten)

    # --- sizes -----------------------------------------------------------------

    def plain(self) -> list[Need]:
        """What the trunk's own sequences may go on from: a prefix through all layers, or one of
        which a part has the rows at a stop in place of the layers above."""
        used = [stop for stop, index in self.layout.rows_at.items() if self.pool.used[index]]
        return [self.layout.resuming[stop] for stop in used] or [self.layout.whole]

    def fits_alone(
        self, length: int, wants: Iterable[Want] | None = None, held: int | None = None
    ) -> bool:
        """Whether a lone sequence can grow to `length` tokens in this pool.

        Args:
            wants: the groups that it needs; None stands for all of the model's own.
            held: it lets go of nothing that a query at this position reads.
        """
        pages = [0] * len(self.groups)
        for index in self.layout.trunk if wants is None else [want.group for want in wants]:
            pages[index] = self.groups[index].live_pages(length)
            if held is not None:
                more = pages_in(length - held, self.page_tokens) + 1
                most = self.groups[index].live_pages(held) + more
                pages[index] = min(most, pages_in(length, self.page_tokens))
        return self.pool.slabs_for(pages) <= self.pool.num_slabs

    def capacity(self, most: int) -> int:
        """The largest length <= `most` that `fits_alone`."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits_alone(middle) else (low, middle - 1)
        return low

    def could_fit(self, needs: Sequence[int]) -> bool:
        """Whether `needs[g]` more pages of every group fit if all idle pages were evicted
        and the rest packed tightly. Exact for one group, optimistic for several."""
        held = [
            used - idle + need
            for used, idle, need in zip(self.pool.used, self._idle_pages, needs, strict=True)
        ]
        return self.pool.slabs_for(held) <= self.pool.num_slabs

    def demand(self, match: Match, length: int) -> list[int]:
        """Pages per group that a sequence of `length` tokens would take beside those of
        `match` that live sequences hold anyway."""
        needs = [0] * len(self.groups)
        for want, position, end in match.reaches():
            group = self.groups[want.group]
            refs = self.pool.refs[want.group]
            key = (want.group, want.own)
            first, whole = group.first_needed(position), end // self.page_tokens
            shared = sum(
                1
                for node in match.nodes[first:whole]
                if (page := node.page(key)) is not None and refs[page] > 1
            )
            more = pages_in(length, self.page_tokens) - first
            needs[want.group] = max(0, min(group.live_pages(length), more) - shared)
        return needs

    def outstanding(self, lease: Lease, length: int) -> list[int]:
        """Pages per group that the lease, or whoever goes on from it, may still take to reach
        `length` tokens."""
        needs = [0] * len(self.groups)
        for index, _ in lease.keys:
            reach = len(lease.tables[index])
            more = self.groups[index].live_pages(length) - (reach - lease.first[index])
            needs[index] = max(0, min(more, pages_in(length, self.page_tokens) - reach))
        return needs

    @property
    def pages_cached(self) -> int:
        """Pages that only the tree holds."""
        return len(self._idle)

    @property
    def pages_used(self) -> int:
        """Pages that live sequences hold."""
        return sum(self.pool.used) - len(self._idle)

    @property
    def pages_total(self) -> int:
        """Pages in use, and those that the model's own groups could make of the rest."""
        return sum(self.pool.used) + self.pool.free_pages(self.layout.trunk)

    @property
    def pages_tail(self) -> int:
        """Pages of branches' tails and of rows at stops, held or kept."""
        groups = (*self.layout.tail_groups, *self.layout.rows_at.values())
        return sum(self.pool.used[index] for index in groups)

    # --- a sequence's way --------------------------------------------------------

    def match(self, identity: Identity, tokens: Sequence[int], limit: int, need: Need) -> Match:
        """The longest prefix of `tokens[:limit]` that serves the need, see `Match`."""
        return self._lookup.match(identity, tokens, limit, need)

    def open(self, match: Match, journal: StepJournal) -> tuple[Lease, list[PageCopy]]:
        """A lease on the matched pages, and copies to plan.

        A page matched in part is copied (the source is pinned by the journal); when the
        pool has no page for that, the match is shortened to whole pages.
        """
        self.stats.walked += match.walked
        self.stats.matched += match.length
        lease = self._lease(match)
        place, begun = divmod(match.length, self.page_tokens)
        if not begun:
            return lease, []
        sources = []
        needs = [0] * len(self.groups)
        for want, first, end in match.reaches():
            if end == match.length and (first < end or want != match.need.rows):
                page = match.nodes[place].page((want.group, want.own))
                assert page is not None
                sources.append((want.group, page))
                needs[want.group] = 1
        for group, page in sources:
            self._retain(group, page)
        copies = []
        if self._reserve(needs):
            for group, page in sources:
                target = self.pool.allocate(group)
                lease.tables[group].append(target)
                copies.append(PageCopy(group, page, target))
            journal.pins.extend(sources)
            self.stats.copies += len(copies)
            return lease, copies
        for group, page in sources:
            self._release(group, page)
        self.close(lease)
        self._lookup.shorten(match, place * self.page_tokens)
        return self._lease(match), []

    def _lease(self, match: Match) -> Lease:
        """Take the whole pages of `match`."""
        size = self.page_tokens
        need = match.need
        whole = min(match.length, match.behind) // size
        node = match.nodes[whole - 1] if whole else self.tree.root(match.identity)
        node.pins += 1
        reaches = list(match.reaches())
        lease = Lease(
            len(self.groups), tuple((want.group, want.own) for want, _, _ in reaches), node
        )
        lease.published = whole
        lease.covered = whole * size
        lease.held = {want.group: match.held for want in need.held}
        lease.rows = None if need.rows is None else need.rows.group
        for want, position, end in reaches:
            index = want.group
            if want == need.rows and not need.keeps:
                lease.held[index] = end
            last = end // size
            first = min(self.groups[index].first_needed(position), last)
            lease.first[index] = first
            table = lease.tables[index]
            table.extend([-1] * first)
            for node in match.nodes[first:last]:
                page = node.page((index, want.own))
                table.append(-1 if page is None else page)
                if page is not None:
                    self._retain(index, page)
        return lease

    def grow(
        self,
        lease: Lease,
        start: int,
        end: int,
        spans: Mapping[int, tuple[int, int]] | None = None,
    ) -> bool:
        """Give the lease every page that computing positions [start, end) writes.

        Evicts as needed. False, with the lease unchanged, when the pool cannot hold them.
        Args: spans: of which of them each group is written; None stands for all in every group
            that grows.
        """
        size = self.page_tokens
        if spans is None:
            spans = {index: (start, end) for index, _ in lease.keys if index not in lease.held}
        needs = [0] * len(self.groups)
        places: list[tuple[int, list[int]]] = []
        for index, (begin, until) in spans.items():
            if begin >= until:
                continue
            table = lease.tables[index]
            missing = [
                place
                for place in self.groups[index].writes(begin, until)
                if place >= len(table) or table[place] < 0
            ]
            needs[index] = len(missing)
            places.append((index, missing))
        if not self._reserve(needs):
            return False
        for index, missing in places:
            table = lease.tables[index]
            last = (spans[index][1] - 1) // size
            if len(table) <= last:
                table.extend([-1] * (last + 1 - len(table)))
            for place in missing:
                table[place] = self.pool.allocate(index)
        lease.covered = max(lease.covered, pages_in(end, size) * size)
        return True

    def trim(self, lease: Lease, position: int) -> None:
        """Release the entries that no query at `position` or later reads, nor whoever makes
        more of the groups that are held."""
        for index, _ in lease.keys:
            first = lease.first[index]
            at = lease.held.get(index, position)
            if index == lease.rows:
                at = min([position, *lease.held.values()])
            needed = min(self.groups[index].first_needed(at), len(lease.tables[index]))
            if first < needed:
                table = lease.tables[index]
                for place in range(first, needed):
                    if table[place] >= 0:
                        self._release(index, table[place])
                        table[place] = -1
                lease.first[index] = needed

    def narrow(self, lease: Lease, wants: Iterable[Want], length: int) -> None:
        """Let go of the groups that are not among `wants`, and of pages wholly behind position
        `length`. The tree knows nothing of the lease behind it."""
        keys = {(want.group, want.own) for want in wants}
        pages = pages_in(length, self.page_tokens)
        for key in lease.keys:
            index, table = key[0], lease.tables[key[0]]
            stays = pages if key in keys else 0
            while len(table) > stays:
                page = table.pop()
                if page >= 0:
                    self._release(index, page)
            lease.first[index] = min(lease.first[index], len(table))
        lease.keys = tuple(key for key in lease.keys if key in keys)
        left = {index for index, _ in lease.keys}
        lease.held = {index: reach for index, reach in lease.held.items() if index in left}
        lease.covered = min(lease.covered, pages * self.page_tokens)

    def go_on(self, lease: Lease, length: int) -> int:
        """The lease's holder goes on to write the groups that it held: from which position.

        What it publishes next is there again, with these groups' pages.
        Args: length: tokens whose rows it has stored.
        """
        at = min(lease.held.values())
        lease.held = {} if lease.rows is None else {lease.rows: length}
        whole = at // self.page_tokens
        if whole < lease.published:
            self._drop_tail(lease)
            node = lease.node
            while whole < lease.published:
                assert node.parent is not None
                node = node.parent
                lease.published -= 1
            self._stand(lease, node)
        lease.covered = min(lease.covered, whole * self.page_tokens)
        return at

    def publish(
        self,
        lease: Lease,
        tokens: Sequence[int],
        end: int,
        journal: StepJournal | None,
        *,
        tail: bool = False,
    ) -> None:
        """Let the tree know the lease's full pages below `end`, and with `tail` the page begun.

        With a journal the pages are being filled by the plan in preparation; without one
        they have been filled. A page that the tree has already is marked for a swap.
        """
        size = self.page_tokens
        while (lease.published + 1) * size <= end:
            place = lease.published
            run = tuple(tokens[place * size : (place + 1) * size])
            self._drop_tail(lease)
            self._stand(lease, self.tree.child(lease.node, run))
            lease.published += 1
            for key in lease.keys:
                self._offer(lease, place, key, journal)
        rest = tuple(tokens[lease.published * size : end]) if tail else ()
        if rest and (lease.tail is None or lease.tail.tokens != rest):
            self._drop_tail(lease)
            self._publish_tail(lease, rest, journal)

    def _offer(self, lease: Lease, place: int, key: Key, journal: StepJournal | None) -> None:
        index = key[0]
        table = lease.tables[index]
        page = table[place] if place < len(table) else -1
        if page < 0:
            return
        if lease.held.get(index, self._end_of(place)) < self._end_of(place):
            return  # not written to its end
        held = lease.node.page(key)
        if held is None:
            self._adopt(lease.node, key, page, journal)
        elif held != page and journal is not None:
            self._retain(index, held)
            journal.swaps.append((lease, index, place, held))

    def _end_of(self, place: int) -> int:
        return (place + 1) * self.page_tokens

    def _publish_tail(
        self, lease: Lease, rest: tuple[int, ...], journal: StepJournal | None
    ) -> None:
        keys = [
            key for key in lease.keys if self.groups[key[0]].partial and key[0] not in lease.held
        ]
        if lease.node.order:
            near, shared = self.tree.nearest(lease.node, rest)
            if shared == len(rest) and all(near.page(key) is not None for key in keys):
                return  # a longer page serves whoever would look for this one
        node = self.tree.child(lease.node, rest)
        for key in keys:
            table = lease.tables[key[0]]
            page = table[lease.published] if lease.published < len(table) else -1
            # One that is the tree's already is a whole page of which only a part is meant.
            if node.page(key) is None and page >= 0 and page not in self._owner[key[0]]:
                self._adopt(node, key, page, journal)
        self.tree.prune(node)
        lease.tail = node

    def _drop_tail(self, lease: Lease) -> None:
        """Forget the begun page's node: a node of more tokens of the same page follows."""
        node, lease.tail = lease.tail, None
        if node is None:
            return
        for key in lease.keys:
            table = lease.tables[key[0]]
            page = node.components.get(key, -1)
            if page >= 0 and lease.published < len(table) and table[lease.published] == page:
                self._disown(node, key)

    def close(self, lease: Lease, tokens: Sequence[int] = (), computed: int = 0) -> None:
        """End a lease; `tokens[:computed]` stay in the tree as far as it keeps anything."""
        if computed and self.keep:
            self.publish(lease, tokens, computed, None, tail=True)
        for index, _ in reversed(lease.keys):
            table = lease.tables[index]
            for place in range(len(table) - 1, lease.first[index] - 1, -1):
                if table[place] >= 0:
                    self._release(index, table[place])
            table.clear()
        lease.node.pins -= 1
        self.tree.prune(lease.node)

    def forget(self, lease: Lease) -> None:
        """Take every page of the lease out of the tree: what was computed from them is worthless.

        Others that hold such a page keep it; later lookups do not find it. The lease must
        then be closed without tokens.
        """
        for index, _ in lease.keys:
            for page in lease.tables[index]:
                owner = self._owner[index].get(page)
                if owner is not None:
                    self._disown(*owner)

    # --- a step's end ------------------------------------------------------------

    def commit(self, journal: StepJournal) -> None:
        """The plan has run: its pages are written."""
        for _, key, page in journal.adopted:
            self._unwritten.discard((key[0], page))
        for lease, index, place, page in journal.swaps:
            table = lease.tables[index]
            own = table[place] if place < len(table) else -1
            if own >= 0:
                table[place], page = page, own
            self._release(index, page)  # the tree's own page where the lease ended, or moved on
        for index, page in journal.pins:
            self._release(index, page)

    def rollback(self, journal: StepJournal) -> None:
        """The plan failed: what it registered is undone. Its sequences' leases must then be
        closed without tokens; they are the only ones that can hold the pages in question."""
        for node, key, page in reversed(journal.adopted):
            if node.components.get(key) == page:
                self._disown(node, key)
        for _, index, _, page in journal.swaps:
            self._release(index, page)
        for index, page in journal.pins:
            self._release(index, page)

    def flush(self) -> None:
        """Evict every component that no live sequence holds."""
        while self._idle:
            self._evict()

    @property
    def has_idle_tails(self) -> bool:
        """Whether there are tails that no live sequence holds and that are not to be kept."""
        return any(self._idle_pages[index] for index in self._fleeting)

    def drop_tails(self) -> None:
        """Forget these; they come first in the eviction order."""
        while self.has_idle_tails:
            self._evict()

    # --- references ----------------------------------------------------------------

    def _reserve(self, needs: Sequence[int]) -> bool:
        if self.pool.can_allocate(needs):
            return True
        if not self.could_fit(needs):
            return False
        while self._idle:
            self._evict()
            if self.pool.can_allocate(needs):
                return True
        return False

    def _evict(self) -> None:
        index, page = next(iter(self._idle))
        self._disown(*self._owner[index][page])
        self.stats.evictions += 1

    def _retain(self, index: int, page: int) -> None:
        if self.pool.retain(index, page) == 2 and page in self._owner[index]:
            del self._idle[(index, page)]
            self._idle_pages[index] -= 1

    def _release(self, index: int, page: int) -> None:
        if self.pool.release(index, page) == 1 and page in self._owner[index]:
            self._idle[(index, page)] = None
            self._idle_pages[index] += 1
            if index in self._fleeting:
                self._idle.move_to_end((index, page), last=False)
            if not self.keep:
                self._disown(*self._owner[index][page])

    def _adopt(self, node: Node, key: Key, page: int, journal: StepJournal | None) -> None:
        index = key[0]
        if page in self._owner[index]:
            raise PoolError(f"page {page} of group {index} is in the tree twice")
        self.pool.retain(index, page)
        node.components[key] = page
        self._owner[index][page] = (node, key)
        if journal is not None:
            journal.adopted.append((node, key, page))
            self._unwritten.add((index, page))

    def _disown(self, node: Node, key: Key) -> None:
        index = key[0]
        page = node.components.pop(key)
        del self._owner[index][page]
        self._unwritten.discard((index, page))
        if (index, page) in self._idle:
            del self._idle[(index, page)]
            self._idle_pages[index] -= 1
        self.pool.release(index, page)
        self.tree.prune(node)

    def _stand(self, lease: Lease, node: Node) -> None:
        before, lease.node = lease.node, node
        node.pins += 1
        before.pins -= 1
        self.tree.prune(before)

    def check_integrity(self, leases: Iterable[Lease], *journals: StepJournal) -> None:
        """Raise `PoolError` unless every reference has exactly one holder that is known.

        O(pool). Args: every live lease, and the journals of plans that have not ended.
        """
        books = Books(self.pool, self.tree, self._owner, self._idle, self._idle_pages)
        books.check(leases, journals)
