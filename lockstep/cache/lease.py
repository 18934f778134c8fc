"""What the cache and the scheduler pass between them: wants, matches, leases, journals."""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.cache.tree import Identity, Key, Node


@dataclass(frozen=True, slots=True)
class Want:
    """A group that a layer range needs, and the group's own identity ("" in the trunk)."""

    group: int
    own: str = ""


@dataclass(slots=True)
class Match:
    """What a lookup found; holds no reference and is valid until the cache changes.

    Attributes:
        nodes, walked: as `PrefixTree.walk` returns them.
        length: tokens usable now by every wanted group.
        lagging: groups that the sequence needs as well, but can make up for at less cost.
        behind: whole pages of tokens usable by these too; `length` where there are none.
        soon: tokens usable once the plan being prepared has run: a page that it still
            fills can be read whole at once but not copied in part. At least `length`.
    """

    identity: Identity
    wants: tuple[Want, ...]
    nodes: list[Node]
    walked: int
    length: int
    soon: int
    lagging: tuple[Want, ...] = ()
    behind: int = 0


class Lease:
    """The pages that one live sequence holds: one reference per table entry that is not -1.

    Made by `PrefixCache.open`, ended by `PrefixCache.close`; only the cache mutates it.
    Every page is frozen (shared, or filled) except those from `published` on, which this
    sequence alone writes, appending; what the tree names of such a page is already written.
    Opened with groups that lag behind, only these groups' pages are written up to where the
    others are.

    Attributes:
        tables: per group of the model, the page table (empty for a group not wanted).
        published: full pages of this sequence that the tree knows.
        covered: positions below this have pages.
    """

    __slots__ = ("covered", "first", "keys", "node", "published", "tables", "tail")

    def __init__(self, num_groups: int, keys: tuple[Key, ...], node: Node) -> None:
        self.tables: tuple[list[int], ...] = tuple([] for _ in range(num_groups))
        self.keys = keys
        self.node = node  # deepest published node
        self.published = 0
        self.covered = 0
        self.first = [0] * num_groups  # entries before this are -1
        self.tail: Node | None = None  # the node of the page being filled, if published


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
