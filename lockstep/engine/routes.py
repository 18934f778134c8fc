"""How the rows of a branch's decision pass through the layers.

The adapters of a branch act on rows in its layers [fork, exit) alone. Of a `suffix` branch
these are the rows behind the context, which read the trunk's own keys and values. Of a
`context` branch they are all rows: a context's rows then take part twice, as the trunk's in
all layers and as the branch's in [fork, exit), where they have keys and values of their own,
the tail. What enters the fork is the same for both, and may be kept.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lockstep.branch import Branch
from lockstep.cache import PrefixCache, Want
from lockstep.cache.tree import LEFT_AT
from lockstep.config import BranchOptions
from lockstep.runner.plan import TokenRun

if TYPE_CHECKING:
    from lockstep.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Route:
    """One decision's way.

    Attributes:
        key: of the branch. fork, exit: its layers.
        begins: position of the suffix's first row.
        trunk: layers of a context's rows as the trunk's own; None where they are the branch's.
        twin: a context's rows take part a second time, as the branch's.
        below: groups of the trunk that the branch's rows use.
        tails: groups that are its own. activations: the group of what enters its fork, where
            it is kept.
        wants: groups in which it needs pages.
        lagging: groups whose pages it can make from the activations that are among `wants`.
        early: a way that goes no further than the exit, for a context of which the trunk has
            most already.
    """

    key: str
    fork: int
    exit: int
    begins: int
    trunk: tuple[int, int] | None
    twin: bool
    below: frozenset[int]
    tails: tuple[Want, ...]
    activations: tuple[Want, ...]
    wants: tuple[Want, ...]
    lagging: tuple[Want, ...] = ()
    early: Route | None = None


def plan_route(
    branch: Branch,
    begins: int,
    cache: PrefixCache,
    layers: tuple[int, int],
    options: BranchOptions,
    *,
    full: bool = False,
) -> Route:
    """The way of a decision.

    Args:
        begins: see `Route`. layers: the trunk's.
        full: the context's rows go through all layers, whatever the options say: somebody
            goes on from them.
    """
    context = branch.adapt == "context"
    early = None
    full = full or options.depth == "full"
    if context and full and not options.keep_activations:
        early = plan_route(branch, begins, cache, layers, BranchOptions(depth="exit"))
    leaves = branch.fork if context else branch.exit  # the trunk, at the earliest
    reach = layers if full else (layers[0], leaves)
    below = frozenset(want.group for want in cache.wants((layers[0], leaves)))
    wants = cache.wants(reach, "" if full else f"{LEFT_AT}{leaves}")
    tails = cache.tails(branch.fork, branch.exit, branch.key) if context else ()
    kept = cache.activations(branch.fork) if context and options.keep_activations else ()
    return Route(
        branch.key,
        branch.fork,
        branch.exit,
        begins,
        None if context and not full else reach,
        context and full,
        below,
        tails,
        kept,
        (*wants, *(kept or tails)),
        tails if kept else (),
        early,
    )


def runs_of(sequence: Sequence, route: Route, start: int, end: int, index: int) -> list[TokenRun]:
    """What positions [start, end) of a decision become in a plan.

    Args:
        index: of the first of these runs in the plan.
    """
    runs: list[TokenRun] = []
    own = {want.group for want in route.tails}
    kept = {want.group for want in route.activations}
    made = min(end, max(start, sequence.kept_until))
    context = min(end, max(made, route.begins)) if route.trunk is not None else made
    if start < made:
        run = _run(sequence, start, made, (route.fork, route.exit), own | kept)
        runs.append(replace(run, branch=route.key, kept=True))
    if made < context:
        assert route.trunk is not None
        groups = {want.group for want in route.wants}.difference(own)
        run = _run(sequence, made, context, route.trunk, groups)
        runs.append(replace(run, keeps=sequence.keeps))
        if route.twin:
            source = index + len(runs) - 1 if route.fork else None
            run = _run(sequence, made, context, (route.fork, route.exit), own)
            runs.append(replace(run, branch=route.key, source=source))
    if context < end:
        last = end == len(sequence.tokens)
        run = _run(sequence, context, end, (0, route.exit), route.below | own)
        runs.append(replace(run, branch=route.key, logits=int(last), scores=last))
    return runs


def _run(
    sequence: Sequence, start: int, end: int, layers: tuple[int, int], groups: Collection[int]
) -> TokenRun:
    """Rows of a sequence with the page tables of these groups."""
    assert sequence.lease is not None
    tables = sequence.lease.tables
    pages = tuple(table if group in groups else () for group, table in enumerate(tables))
    return TokenRun(sequence.number, start, sequence.tokens[start:end], pages, layers)
