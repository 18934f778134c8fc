"""The page pool: slabs of one size, each cut into one group's pages, all counted."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.types import LockstepError


class PoolError(LockstepError, RuntimeError):
    """The pool's books do not balance: always a defect of the caller, never of a request."""


class PagePool:
    """Pages by reference count, never over-committed.

    A slab belongs to no group, or to one group until its last page is free again.
    Pages of a group come from slabs that the group owns already before a new slab is
    taken, so that a lone sequence that starts on an empty pool never holds more than
    ceil(peak pages / pages per slab) slabs of a group.

    Mutation: `allocate`, `retain` and `release` only. Failure: `allocate` raises
    `PoolError` when no page is left (callers ask `can_allocate` first); a retain or a
    release of a free page raises it too.

    Attributes:
        num_slabs, pages_per_slab: geometry; page ids as in `runner.plan.Executor`.
        refs: per group, the reference count of every page id; 0 is free.
        used: per group, pages with a count above 0.
    """

    def __init__(self, num_slabs: int, pages_per_slab: Sequence[int]) -> None:
        self.num_slabs = num_slabs
        self.pages_per_slab = tuple(pages_per_slab)
        self.refs: list[list[int]] = [[0] * (num_slabs * n) for n in self.pages_per_slab]
        self.used = [0] * len(self.pages_per_slab)
        self._free_slabs = list(range(num_slabs - 1, -1, -1))
        # Per group: slabs that it owns and that have a free page -> their free page ids.
        self._open: list[dict[int, list[int]]] = [{} for _ in self.pages_per_slab]
        self._spare = [0] * len(self.pages_per_slab)  # free pages in owned slabs

    @property
    def free_slabs(self) -> int:
        return len(self._free_slabs)

    def can_allocate(self, needs: Sequence[int]) -> bool:
        """Whether `needs[g]` pages of every group g can be had at once, as things stand."""
        slabs = 0
        for group, need in enumerate(needs):
            missing = need - self._spare[group]
            if missing > 0:
                slabs += -(-missing // self.pages_per_slab[group])
        return slabs <= len(self._free_slabs)

    def slabs_for(self, pages: Sequence[int]) -> int:
        """Slabs that hold `pages[g]` pages of every group g when packed tightly."""
        return sum(-(-n // per) for n, per in zip(pages, self.pages_per_slab, strict=True))

    def allocate(self, group: int) -> int:
        """A free page of the group, with one reference that the caller owns."""
        opened = self._open[group]
        if opened:
            slab = next(reversed(opened))
        elif self._free_slabs:
            slab = self._free_slabs.pop()
            per = self.pages_per_slab[group]
            opened[slab] = list(range((slab + 1) * per - 1, slab * per - 1, -1))
            self._spare[group] += per
        else:
            raise PoolError(f"no free page for group {group}: {self.num_slabs} slabs are in use")
        free = opened[slab]
        page = free.pop()
        if not free:
            del opened[slab]
        self._spare[group] -= 1
        self.used[group] += 1
        self.refs[group][page] = 1
        return page

    def retain(self, group: int, page: int) -> int:
        """Add a reference to a page in use; returns the new count."""
        refs = self.refs[group]
        if refs[page] < 1:
            raise PoolError(f"page {page} of group {group} is free and cannot be retained")
        refs[page] += 1
        return refs[page]

    def release(self, group: int, page: int) -> int:
        """Drop a reference; at 0 the page, and with its last page the slab, is free."""
        refs = self.refs[group]
        if refs[page] < 1:
            raise PoolError(f"page {page} of group {group} is released twice")
        refs[page] -= 1
        if refs[page] == 0:
            per = self.pages_per_slab[group]
            slab = page // per
            free = self._open[group].setdefault(slab, [])
            free.append(page)
            self._spare[group] += 1
            self.used[group] -= 1
            if len(free) == per:
                del self._open[group][slab]
                self._spare[group] -= per
                self._free_slabs.append(slab)
        return refs[page]

    def free_pages(self, groups: Sequence[int]) -> int:
        """Free pages of these groups; a free slab counts as the one with most pages in it."""
        per_slab = max(self.pages_per_slab[group] for group in groups)
        return sum(self._spare[group] for group in groups) + len(self._free_slabs) * per_slab

    def check_integrity(self) -> None:
        """Raise `PoolError` unless slabs and free lists agree with the counts."""
        owner: dict[int, int] = {}
        for group, per in enumerate(self.pages_per_slab):
            used = 0
            spare = 0
            for slab in range(self.num_slabs):
                pages = range(slab * per, (slab + 1) * per)
                busy = sum(1 for page in pages if self.refs[group][page] > 0)
                used += busy
                free = self._open[group].get(slab, [])
                spare += len(free)
                if not busy and not free:
                    continue
                if slab in owner:
                    raise PoolError(f"slab {slab} belongs to groups {owner[slab]} and {group}")
                owner[slab] = group
                idle = {page for page in pages if self.refs[group][page] == 0}
                if set(free) != idle or len(free) != len(idle) or not busy:
                    raise PoolError(f"slab {slab} of group {group}: free list is wrong")
            if used != self.used[group] or spare != self._spare[group]:
                raise PoolError(f"group {group}: {used} pages in use, books say {self.used[group]}")
        if sorted(self._free_slabs) != [s for s in range(self.num_slabs) if s not in owner]:
            raise PoolError("free slabs and owned slabs do not add up to the pool")
