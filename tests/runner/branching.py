"""Plans of decisions, as a scheduler would make them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lockstep.branch import Branch
from lockstep.runner.groups import activations_of, tails_of
from lockstep.runner.plan import Plan, RunResult, TokenRun
from lockstep.runner.probe import Pages, Probe


def join(*parts: Sequence[TokenRun]) -> tuple[TokenRun, ...]:
    """The runs of one plan; each part names sources within itself."""
    runs: list[TokenRun] = []
    for part in parts:
        base = len(runs)
        runs += [
            run if run.source is None else replace(run, source=run.source + base) for run in part
        ]
    return tuple(runs)


class Decision:
    """One decision: its runs, step by step, on pages of its own.

    Args:
        chunk: rows of the context a step. suffix_chunk: of the suffix. Both 0 for all.
        together: the context's last rows and the suffix's first in one step.
        keep: store what the trunk's rows are where they may stop. kept: pages of trunk runs
            over the same context that stored it; only the branch's own layers are then computed
            for the context.
        depth: how far the context's rows go through the trunk; 0 is all layers.
        sequence: as in `TokenRun`.
    """

    def __init__(
        self,
        probe: Probe,
        branch: Branch,
        context: list[int],
        suffix: list[int],
        *,
        chunk: int = 0,
        suffix_chunk: int = 0,
        together: bool = False,
        keep: bool = False,
        kept: Pages | None = None,
        depth: int = 0,
        sequence: int = 0,
    ) -> None:
        self.branch = branch
        self.context, self.suffix = context, suffix
        self.pages = probe.pages(len(context) + len(suffix))
        self._groups = probe.runner.groups
        self._depth = depth or probe.runner.num_layers
        self._keep, self._kept = keep, kept
        self._sequence = sequence
        own = [i for i, g in enumerate(self._groups) if g.kind in ("full", "sliding")]
        self._tails = tails_of(self._groups, branch.fork, branch.exit)
        self._own = tuple(own)
        if kept is not None:
            self.pages = tuple(
                kept[g] + table[len(kept[g]) :] if g in own else table
                for g, table in enumerate(self.pages)
            )
        activations = activations_of(self._groups, branch.stop)
        self._activations = () if activations is None else (activations,)
        before = [self._context(*span) for span in _chunks(0, len(context), chunk)]
        end = len(context) + len(suffix)
        after = [self._suffix(*span) for span in _chunks(len(context), end, suffix_chunk)]
        if together and before:
            after[0] = join(before.pop(), after[0])
        self.steps = [*before, *after]

    def _of(self, pages: Pages, *groups: int) -> tuple[list[int], ...]:
        """Page tables of some groups, empty ones for the others."""
        return tuple(table if g in groups else [] for g, table in enumerate(pages))

    def _run(self, start: int, end: int, layers: tuple[int, int], *groups: int) -> TokenRun:
        tokens = [*self.context, *self.suffix][start:end]
        return TokenRun(self._sequence, start, tokens, self._of(self.pages, *groups), layers)

    def _context(self, start: int, end: int) -> tuple[TokenRun, ...]:
        branch = self.branch
        own = (*self._own, *(self._activations if self._keep else ()))
        trunk = replace(self._run(start, end, (0, self._depth), *own), keeps=self._keep)
        if branch.adapt == "suffix":
            return (trunk,)
        twin = self._run(start, end, (branch.fork, branch.exit), *self._tails)
        twin = replace(twin, branch=branch.key, source=0)
        if self._kept is None:
            return (trunk, twin)
        stored = self._of(self._kept, *self._activations)
        pages = tuple(a or b for a, b in zip(twin.pages, stored, strict=True))
        return (replace(twin, source=None, kept=True, pages=pages),)

    def _suffix(self, start: int, end: int) -> tuple[TokenRun, ...]:
        branch = self.branch
        tails = self._tails if branch.adapt == "context" else ()
        run = self._run(start, end, (0, branch.exit), *self._own, *tails)
        last = end == len(self.context) + len(self.suffix)
        return (replace(run, branch=branch.key, logits=int(last), scores=last),)


def _chunks(begin: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    step = size or max(1, end - begin)
    for start in range(begin, end, step):
        yield start, min(start + step, end)


def scores_of(
    probe: Probe, decision: Decision, strangers: Sequence[Sequence[TokenRun]] = ()
) -> RunResult:
    """The decision's result; the strangers share every step, half of them before it."""
    half = len(strangers) // 2
    for number, own in enumerate(decision.steps):
        runs = join(*strangers[:half], own, *strangers[half:])
        result = probe.runner.execute(Plan(number, runs))
        at = sum(map(len, strangers[:half])) + len(own) - 1
    return result.runs[at]
