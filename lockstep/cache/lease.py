"""What the cache and the scheduler pass between them: needs, matches, leases, journals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from lockstep.cache.tree import Identity, Key, Node


@dataclass(frozen=True, slots=True)
class Want:
    """A group that a layer range needs, and the group's own identity ("" in the trunk)."""

    group: int
    own: str = ""


@dataclass(frozen=True, slots=True)
class Need:
    """What a sequence's rows read and write, and what of it can be made up for.

    The layers above a stop can be computed later, from the rows that entered it: so a prefix is
    of use without the components of these layers where it has its rows.

    Attributes:
        wants: groups that a usable prefix must have.
        lagging: groups whose components the sequence makes from `rows` where they are missing.
        held: groups of the trunk that it does not go through, but whoever goes on from it will:
            what there is of them is held for that, and where they end there must be `rows`.
        rows: the group of the hidden rows at the stop; None where nothing is made from any.
        stop: the layer that they enter.
        keeps: its own rows are stored there as they pass.
        fresh: layers that a row goes through from the embedding on. made: and from the stop on,
            for `lagging`.
    """

    wants: tuple[Want, ...]
    lagging: tuple[Want, ...] = ()
    held: tuple[Want, ...] = ()
    rows: Want | None = None
    stop: int = 0
    keeps: bool = False
    fresh: int = 1
    made: int = 0

    @property
    def writes(self) -> tuple[Want, ...]:
        """The groups that a row from the embedding on writes."""
        kept = (self.rows,) if self.rows is not None and self.keeps else ()
        return (*self.wants, *self.lagging, *kept)

    @property
    def all(self) -> tuple[Want, ...]:
        """Every group in which it may hold pages."""
        rows = () if self.rows is None else (self.rows,)
        return (*self.wants, *self.lagging, *self.held, *rows)


@dataclass(slots=True)
class Match:
    """What a lookup found; holds no reference and is valid until the cache changes.

    Attributes:
        nodes, walked: as `PrefixTree.walk` returns them.
        length: tokens usable now: with what every wanted group has, and what lags can be made.
        behind: tokens that the lagging groups have as well, `length` where there are none or
            they lag not at all. held: tokens that the held groups have. Both are whole pages
            where they are not `length`.
        soon: tokens usable once the plan being prepared has run: a page that it still
            fills can be read whole at once but not copied in part, and rows are not there
            yet. At least `length`.
    """

    identity: Identity
    need: Need
    nodes: list[Node]
    walked: int
    length: int
    behind: int
    held: int
    soon: int

    @property
    def first_row(self) -> int:
        """Something is to be made from rows at this position and behind it, up to `length`."""
        if self.need.rows is None:
            return self.length
        return min(self.length, self.behind, self.held if self.need.held else self.length)

    def work(self, limit: int) -> int:
        """Layers that rows have to go through until `limit` tokens are computed."""
        made, fresh = self.length - self.behind, limit - self.length
        return made * self.need.made + fresh * self.need.fresh

    def reaches(self) -> Iterator[tuple[Want, int, int]]:
        """Of each group that a sequence would take pages of: the first position that it must
        have where earlier ones are of no use by their kind, and how far it goes."""
        need = self.need
        yield from ((want, self.length, self.length) for want in need.wants)
        yield from ((want, self.behind, self.behind) for want in need.lagging)
        yield from ((want, self.held, self.held) for want in need.held)
        if need.rows is not None and (need.keeps or self.first_row < self.length):
            yield need.rows, self.first_row, self.length


class Lease:
    """The pages that one live sequence holds: one reference per table entry that is not -1.

    Made by `PrefixCache.open`, ended by `PrefixCache.close`; only the cache mutates it.
    Every page is frozen (shared, or filled) except those from `published` on, which this
    sequence alone writes, appending; what the tree names of such a page is already written.
    Where groups lag behind, only these groups' pages are written up to where the others are.

    Attributes:
        tables: per group of the model, the page table (empty for a group not wanted).
        published: full pages of this sequence that the tree knows.
        covered: positions below this have pages.
        held: group -> tokens that it has, of groups that do not grow. rows: the group of the
            rows from which these can be made.
    """

    __slots__ = ("covered", "first", "held", "keys", "node", "published", "rows", "tables", "tail")

    def __init__(self, num_groups: int, keys: tuple[Key, ...], node: Node) -> None:
        self.tables: tuple[list[int], ...] = tuple([] for _ in range(num_groups))
        self.keys = keys
        self.node = node  # deepest published node
        self.published = 0
        self.covered = 0
        self.first = [0] * num_groups  # entries before this are -1
        self.tail: Node | None = None  # the node of the page being filled, if published
        self.held: dict[int, int] = {}
        self.rows: int | None = None


@dataclass(slots=True)
class StepJournal:
    """What a plan in preparation did to the cache, until `commit` or `rollback`.

    Attributes:
        adopted: components that the tree took over, whose pages the plan fills.
        swaps: (lease, group, index, page): a second copy of a page that the tree
            already has; the lease takes the tree's page when the step is done.
        pins: (group, page): sources of copies.
    """

    adopted: list[tuple[Node, Key, int]] = field(default_factory=list)
    swaps: list[tuple[Lease, int, int, int]] = field(default_factory=list)
    pins: list[tuple[int, int]] = field(default_factory=list)
