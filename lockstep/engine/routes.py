"""How rows pass through the layers: those of a branch's decision, and those that go on from a stop.

The adapters of a branch act on rows in its layers [fork, exit) alone. Of a `suffix` branch
these are the rows behind the context, which read the trunk's own keys and values. Of a
`context` branch they are all rows: a context's rows then take part twice, as the trunk's and,
from the fork on, as the branch's, where they have keys and values of their own, the tail.

Of the trunk a decision reads nothing above the branch's stop. There a context's rows may be
kept; whoever needs the layers above computes them from these rows, when it is known that
somebody does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lockstep.branch import Branch
from lockstep.cache import Lease, Need, Want
from lockstep.cache.layout import Layout
from lockstep.cache.tree import LEFT_AT
from lockstep.config import BranchOptions
from lockstep.runner.plan import TokenRun

if TYPE_CHECKING:
    from lockstep.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Route:
    """One way of a decision.

    Attributes:
        key: of the branch. fork, exit: its layers.
        begins: position of the suffix's first row.
        trunk: layers of a context's rows as the trunk's own; None where they are the branch's.
        twin: a context's rows take part a second time, as the branch's.
        need: what of the cache its rows read and write.
        below: groups of the trunk that the branch's rows use.
        tails: groups that are its own.
    """

    key: str
    fork: int
    exit: int
    begins: int
    trunk: tuple[int, int] | None
    twin: bool
    need: Need
    below: tuple[Want, ...]
    tails: tuple[Want, ...] = ()

    @property
    def doubles(self) -> bool:
        """Whether a context's rows are two in some layer."""
        return self.twin and self.trunk is not None and self.trunk[1] > self.fork


def plan_routes(
    branch: Branch,
    begins: int,
    layout: Layout,
    options: BranchOptions,
    *,
    gate: bool = False,
) -> tuple[Route, ...]:
    """The ways of a decision. One behind the first is for a prefix of which it finds more.

    Args:
        begins: see `Route`.
        gate: it may be that somebody goes on from the context's rows, and that nobody does.
    """
    rows = layout.rows(branch.stop)
    stops = branch.adapt == "context" if branch.stop == 0 else rows is not None
    if gate and stops:
        return (_deferring(branch, begins, layout, rows),)
    if gate or options.depth == "full":
        through = _through(branch, begins, layout, options)
        return (through, _deferring(branch, begins, layout, rows)) if stops else (through,)
    return (_leaving(branch, begins, layout, rows),)


def _deferring(branch: Branch, begins: int, layout: Layout, rows: Want | None) -> Route:
    """The trunk's rows stop where the branch reads nothing above, and are kept there."""
    below = layout.wants((0, branch.stop))
    above = layout.wants((branch.stop, layout.layers[1]))
    tails = _tails(branch, layout)
    twin = bool(tails) and rows is not None
    need = Need(
        below if twin else (*below, *tails),
        tails if twin else (),
        above,
        rows,
        branch.stop,
        keeps=rows is not None,
        fresh=branch.exit,
        made=branch.exit - branch.fork if twin else 0,
    )
    trunk = None if rows is None else (0, branch.stop)
    return Route(branch.key, branch.fork, branch.exit, begins, trunk, twin, need, below, tails)


def _through(
    branch: Branch,
    begins: int,
    layout: Layout,
    options: BranchOptions,
) -> Route:
    """The trunk's rows go through all layers: a later answer goes on from there."""
    tails = _tails(branch, layout)
    rows = layout.rows(branch.stop) if tails and options.keep_activations else None
    all_, own = layout.wants(layout.layers), branch.exit - branch.fork
    need = Need(
        all_ if rows is not None else (*all_, *tails),
        tails if rows is not None else (),
        (),
        rows,
        branch.stop,
        keeps=rows is not None,
        fresh=layout.layers[1] + (own if tails else 0),
        made=own,
    )
    below = layout.wants((0, branch.stop))
    return Route(
        branch.key, branch.fork, branch.exit, begins, layout.layers, bool(tails), need, below, tails
    )


def _leaving(branch: Branch, begins: int, layout: Layout, rows: Want | None) -> Route:
    """No row goes further than the exit, and nobody is to go on from there."""
    through = layout.cuts_through(branch.stop)
    below = layout.wants((0, branch.stop), f"{LEFT_AT}{branch.stop}" if through else "")
    tails = _tails(branch, layout)
    makes = bool(tails) and rows is not None
    need = Need(
        below if makes else (*below, *tails),
        tails if makes else (),
        (),
        rows if makes else None,
        branch.stop,
        fresh=branch.exit,
        made=branch.exit - branch.fork,
    )
    trunk = None if tails else (0, branch.exit)
    return Route(branch.key, branch.fork, branch.exit, begins, trunk, False, need, below, tails)


def _tails(branch: Branch, layout: Layout) -> tuple[Want, ...]:
    if branch.adapt != "context":
        return ()
    return layout.tails(branch.fork, branch.exit, branch.key)


def runs_of(sequence: Sequence, route: Route, start: int, end: int, index: int) -> list[TokenRun]:
    """What positions [start, end) of a decision become in a plan.

    Args:
        index: of the first of these runs in the plan.
    """
    runs: list[TokenRun] = []
    need, own = route.need, (route.fork, route.exit)
    made = min(end, max(start, sequence.kept_until))
    context = min(end, max(made, route.begins)) if route.trunk is not None else made
    if start < made:
        run = from_rows(sequence, start, made, route.exit)
        runs.append(replace(run, branch=route.key))
    if made < context:
        assert route.trunk is not None
        keeps = made < sequence.keeps_until(made)
        groups = set(need.writes).difference(route.tails)
        if need.rows is not None and not keeps:
            groups.discard(need.rows)
        run = _run(sequence, made, context, route.trunk, groups)
        runs.append(replace(run, keeps=keeps))
        if route.twin:
            source = index + len(runs) - 1 if route.fork else None
            run = _run(sequence, made, context, own, route.tails)
            runs.append(replace(run, branch=route.key, source=source))
    if context < end:
        last = end == len(sequence.tokens)
        run = _run(sequence, context, end, (0, route.exit), (*route.below, *route.tails))
        runs.append(replace(run, branch=route.key, logits=int(last), scores=last))
    return runs


def from_rows(sequence: Sequence, start: int, end: int, last: int) -> TokenRun:
    """Positions [start, end) from the rows that were kept at a stop, up to layer `last`."""
    need = sequence.need
    assert need.rows is not None
    groups = (*need.lagging, need.rows)
    return replace(_run(sequence, start, end, (need.stop, last), groups), kept=True)


def _run(
    sequence: Sequence, start: int, end: int, layers: tuple[int, int], groups: Iterable[Want]
) -> TokenRun:
    """Rows of a sequence with the page tables of these groups."""
    assert sequence.lease is not None
    pages = tables_of(sequence.lease, groups)
    return TokenRun(sequence.number, start, sequence.tokens[start:end], pages, layers)


def tables_of(lease: Lease, groups: Iterable[Want]) -> tuple[list[int], ...]:
    """The lease's page tables of these groups, and empty ones."""
    indices = {want.group for want in groups}
    return tuple(table if group in indices else [] for group, table in enumerate(lease.tables))
