"""The exact fake with branches: it knows which rows wrote which layers of every slot.

A slot that a row of the trunk has filled in all layers of its group holds its prefix's hash, as
in `FakeExecutor`. Any other holds `Part`: whose row it was, and the layers that it wrote. Of rows
kept at a stop it holds `Kept`: whose, and since which step. So a run that reads a page of rows
that left too early, of rows that an adapter touched, or of another context is found, and one
that goes on from rows that are not there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from lockstep.branch import Adapt, Branch, BranchError, HeadKind, read_branch, write_branch
from lockstep.runner.groups import executor_groups, tails_of
from lockstep.runner.plan import Plan, RunResult, StepResult, TokenRun
from lockstep.types import BranchLayers, EngineInfo, LayerGroup
from tests.fakes import EMPTY, FakeExecutor, hashes, mix

WEIGHTS = "fake-weights"
HIDDEN = 8
Judge = Callable[[Sequence[int], int, Branch], tuple[float, ...]]


class Part(NamedTuple):
    """A slot that holds less than a row of the trunk through all of its group: its prefix's
    hash, the layers that were written, and the branch whose adapters had touched them."""

    prefix: int
    begin: int
    end: int
    key: str


class Kept(NamedTuple):
    """A slot of a row at a stop: its prefix's hash, and the step that stored it."""

    prefix: int
    step: int


def page_elements(group: LayerGroup) -> int:
    """How large a token is in a group, as a runner lays it out."""
    own = len(group.layers) * group.kv_heads * group.head_dim
    return own if group.kind == "activations" else 2 * own


def scores_of(tokens: Sequence[int], begins: int, branch: Branch) -> tuple[float, ...]:
    """What the fake's heads say of a prompt whose suffix begins there; one value an option."""
    value = mix(hashes(tokens)[-1], begins if branch.adapt == "suffix" else 0)
    value = mix(value, int(branch.key, 16))
    return tuple(float(mix(value, index) >> 41 & 7) for index in range(len(branch.options)))


def make_branch(
    folder: Path,
    name: str = "judge",
    *,
    fork: int = 1,
    exit_: int = 2,
    adapt: Adapt = "suffix",
    head: HeadKind = "options",
    options: tuple[str, ...] = ("answer", "search", "refuse"),
    base: str = WEIGHTS,
    **more: object,
) -> str:
    """Write a branch's description; its folder."""
    suffix = " {question}" if head == "codes" else " ?"
    at = folder / name
    at.mkdir(parents=True, exist_ok=True)
    branch = Branch(
        base, "fake", fork, exit_, adapt, 4, 1.0, ("q_proj",), head, options, suffix, tensors=name
    )
    write_branch(replace(branch, **more), at)  # type: ignore[arg-type]
    return str(at)


class BranchExecutor(FakeExecutor):
    """`FakeExecutor` that hosts branches.

    Args:
        folders: of branches at whose stops the groups are cut, and whose contexts get tails.
        layers: the same of branches that are not there.
        groups, pages_per_slab: of the model, uncut.
        judge: (tokens, begin of the suffix, branch) -> outputs of its head.

    Attributes:
        loaded: keys, and how often each is loaded.
        layers_of_rows: how many rows went through how many layers, as `computed_layers`.
    """

    def __init__(
        self,
        *,
        folders: Sequence[str] = (),
        layers: Sequence[BranchLayers] = (),
        judge: Judge = scores_of,
        **more: object,
    ) -> None:
        own = more.pop("groups", (LayerGroup("full", "full", (0, 1, 2, 3), 1, 8),))
        assert isinstance(own, tuple)
        groups = executor_groups(own, [*map(read_branch, folders), *layers], HIDDEN)
        per_slab = more.pop("pages_per_slab", ()) or (1,) * len(own)
        assert isinstance(per_slab, tuple)
        sizes = [per * page_elements(group) for per, group in zip(per_slab, own, strict=True)]

        def per_slab_of(group: LayerGroup) -> int:
            whole = [size for size, of in zip(sizes, own, strict=True) if _is_piece(group, of)]
            return max(1, (whole[0] if whole else max(sizes)) // page_elements(group))

        super().__init__(
            groups=groups,
            pages_per_slab=tuple(map(per_slab_of, groups)),
            **{"num_layers": 4, **more},  # type: ignore[arg-type]
        )
        self.judge = judge
        self.loaded: Counter[str] = Counter()
        self.layers_of_rows = 0
        self._branches: dict[str, Branch] = {}
        self._parents: dict[int, tuple[int, int]] = {}  # hash -> (hash before, token)
        self._plan = Plan(0, ())  # that is executed

    def load_branch(self, folder: str) -> Branch:
        branch = read_branch(folder)
        if branch.base != WEIGHTS:
            raise BranchError(f"{folder}: trained on other weights")
        if branch.exit > self.num_layers:
            raise BranchError(f"{folder}: exit {branch.exit} of {self.num_layers} layers")
        if branch.adapt == "context" and not tails_of(self.groups, branch.fork, branch.exit):
            raise BranchError(f"{folder}: no tail; name it with --branch at start")
        self.loaded[branch.key] += 1
        self._branches[branch.key] = branch
        return branch

    def unload_branch(self, key: str) -> None:
        if not self.loaded[key]:
            raise KeyError(key)
        self.loaded[key] -= 1
        if not self.loaded[key]:
            del self.loaded[key], self._branches[key]

    def info(self) -> EngineInfo:
        """A description of the fake; `Engine` makes its own otherwise."""
        return EngineInfo(
            *("fake", "none", "none", "none", "none", 1, self.vocab_size, self.num_layers),
            *(self.max_context, self.page_tokens, 0, 0, 0, "", 0.0),
            weights_hash=WEIGHTS,
        )

    def _execute(self, plan: Plan) -> StepResult:
        self._plan = plan
        return super()._execute(plan)

    # --- writing ------------------------------------------------------------------------

    def _write(self, run: TokenRun, written: set[tuple[int, int]]) -> None:
        self.layers_of_rows += len(run.tokens) * (run.layers[1] - run.layers[0])
        branch = self._branches[run.branch] if run.branch else None
        assert branch is not None or not (run.branch or run.scores)
        assert run.layers[0] == 0 or run.kept or run.source is not None
        if run.source is not None:
            self._check_source(run)
        self._check_tables(run)
        value = self._before(run)
        for position, token in enumerate(run.tokens, run.start):
            before, value = value, mix(value, token)
            self._parents[value] = (before, token)
            for group, slot in self._slots(run, branch, value):
                self._fill(run, group, position, slot, written)
            for group in self._activations(run) if run.keeps else ():
                self._fill(run, group, position, Kept(value, self._plan.step), written)

    def _fill(
        self, run: TokenRun, group: int, position: int, slot: object, written: set[tuple[int, int]]
    ) -> None:
        page, at = self._place(run, group, position)
        place = (group, page * self.page_tokens + at)
        assert place not in written, "written twice"
        written.add(place)
        self._page(group, page)[at] = slot  # type: ignore[call-overload]

    def _check_tables(self, run: TokenRun) -> None:
        """Pages in the groups that the run reads or writes, and in no other."""
        used = {group for group in range(len(self.groups)) if self._is_used(run, group)}
        kept = self._activations(run)
        if run.kept:
            assert [self.groups[group].layers for group in kept] == [(run.layers[0],)]
        elif run.keeps:
            assert kept
            begin, end = run.layers
            assert all(begin < self.groups[group].layers[0] <= end for group in kept)
            assert not run.branch, "a branch's rows are not kept"
        else:
            assert not kept
        given = {group for group, table in enumerate(run.pages) if table}
        assert given == used.union(kept), f"pages of {given}, not of {used}"

    def _check_source(self, run: TokenRun) -> None:
        assert run.source is not None
        source = self._plan.runs[run.source]
        assert source.sequence == run.sequence
        assert (source.start, list(source.tokens)) == (run.start, list(run.tokens))
        assert not source.branch
        assert source.layers[0] == 0 < run.layers[0] <= source.layers[1]

    def _slots(self, run: TokenRun, branch: Branch | None, value: int) -> list[tuple[int, object]]:
        """What a row of this prefix writes into every group."""
        begin, end = run.layers
        if branch is None:
            return self._trunk_slots(value, begin, end)
        assert end == branch.exit, "a branch's rows leave at its exit"
        if branch.adapt == "suffix":
            assert begin == 0
            return [(group, Part(value, 0, end, branch.key)) for group in self._used(0, end)]
        tail = [
            (group, Part(value, branch.fork, end, branch.key)) for group in self._tail_of(branch)
        ]
        if begin:
            assert begin == branch.fork
            assert (run.source is None) == run.kept
            return list(tail)
        return [*tail, *self._trunk_slots(value, 0, branch.fork)]

    def _trunk_slots(self, value: int, begin: int, end: int) -> list[tuple[int, object]]:
        found: list[tuple[int, object]] = []
        for group in self._used(begin, end):
            layers = self.groups[group].layers
            whole = begin <= layers[0] and layers[-1] < end
            assert whole or begin == 0, "a stop inside a group"
            found.append((group, value if whole else Part(value, 0, end, "")))
        return found

    def _before(self, run: TokenRun) -> int:
        """Hash of everything before the run, wherever its pages hold it."""
        if run.start == 0:
            return 0
        found = set()
        for group, table in enumerate(run.pages):
            if table and self.groups[group].window != 1 and self._is_used(run, group):
                page, slot = self._place(run, group, run.start - 1)
                found.add(_prefix_of(self._page(group, page)[slot]))
        if not found:  # what its pages hold does not reach so far back
            return self._told(run)
        assert len(found) == 1, f"groups of sequence {run.sequence} hold different prefixes"
        (value,) = found
        assert value != EMPTY, f"sequence {run.sequence} builds on a slot never written"
        return value

    def _told(self, run: TokenRun) -> int:
        """What is before a run whose own layers see one position only: as its source has it,
        or its rows."""
        if run.kept:
            (group,) = self._activations(run)
            page, slot = self._place(run, group, run.start)
            return self._parents[_prefix_of(self._page(group, page)[slot])][0]
        assert run.source is not None
        return self._before(self._plan.runs[run.source])

    def _is_used(self, run: TokenRun, group: int) -> bool:
        begin, end = run.layers
        if run.branch and self._branches[run.branch].adapt == "context":
            branch = self._branches[run.branch]
            if group in self._tail_of(branch):
                return True
            end = branch.fork
        return group in self._used(begin, end)

    def _used(self, begin: int, end: int) -> list[int]:
        return [
            group
            for group in self._own
            if any(begin <= layer < end for layer in self.groups[group].layers)
        ]

    def _tail_of(self, branch: Branch) -> tuple[int, ...]:
        return tails_of(self.groups, branch.fork, branch.exit)

    def _activations(self, run: TokenRun) -> list[int]:
        return [
            group
            for group, table in enumerate(run.pages)
            if table and self.groups[group].kind == "activations"
        ]

    # --- reading ------------------------------------------------------------------------

    def _read(self, run: TokenRun) -> RunResult:
        end = run.start + len(run.tokens)
        value = self._before(run)
        for token in run.tokens:
            value = mix(value, token)
        tokens, expected = self._story(value, end)
        assert tokens[run.start :] == list(run.tokens)
        if run.kept:
            self._check_rows(run, expected)
        if run.branch:
            return self._read_branch(run, tokens, expected)
        for group in self._used(*run.layers):
            self._check_slots(run, group, expected, run.layers[1], ("",))
        return super()._read(run) if run.layers[1] == self.num_layers else RunResult()

    def _read_groups(self, run: TokenRun) -> list[int]:
        return self._used(*run.layers)

    def _check_rows(self, run: TokenRun, expected: list[int]) -> None:
        """The rows that it goes on from are its own, and a step before this one stored them."""
        (group,) = self._activations(run)
        rows: list[object] = list(self._stored(run, group, run.start, len(expected)))
        assert all(isinstance(row, Kept) for row in rows), "goes on from rows never kept"
        assert [row.prefix for row in rows if isinstance(row, Kept)] == expected[run.start :]
        assert all(row.step < self._plan.step for row in rows if isinstance(row, Kept))

    def _read_branch(self, run: TokenRun, tokens: list[int], expected: list[int]) -> RunResult:
        branch = self._branches[run.branch]
        begins = 0
        if branch.adapt == "suffix":
            for group in self._used(0, branch.exit):
                keys = self._check_slots(run, group, expected, branch.exit, ("", branch.key))
                own = keys.count(branch.key)
                assert keys == [""] * (len(keys) - own) + [branch.key] * own, "rows of two kinds"
                if "" in keys:  # else the window shows the suffix alone
                    begins = len(expected) - own
        else:
            for group in self._tail_of(branch):
                self._check_slots(run, group, expected, branch.exit, (branch.key,))
            for group in () if run.layers[0] else self._used(0, branch.fork):
                self._check_slots(run, group, expected, branch.fork, ("",))
        assert run.logits == int(run.scores)
        if not run.scores:
            return RunResult()
        return RunResult(scores=self.judge(tokens, begins, branch))

    def _check_slots(
        self, run: TokenRun, group: int, expected: list[int], reach: int, keys: Sequence[str]
    ) -> list[str]:
        """Every slot that the run's rows see holds the row of its own prefix, by one of these
        branches, at least up to layer `reach`; whose they are."""
        first = self._first_seen(run, group)
        found = []
        for slot, prefix in zip(
            self._stored(run, group, first, len(expected)), expected[first:], strict=True
        ):
            part = slot if isinstance(slot, Part) else Part(slot, 0, self.num_layers, "")
            assert part.prefix == prefix, f"sequence {run.sequence} reads foreign rows"
            assert part.end >= reach, f"reads layers below {reach} of rows that left at {part.end}"
            assert part.key in keys, f"reads rows of branch {part.key!r}"
            found.append(part.key)
        return found

    def _first_seen(self, run: TokenRun, group: int) -> int:
        window = self.groups[group].window
        return 0 if window is None else max(0, run.start - window + 1)

    def _story(self, value: int, length: int) -> tuple[list[int], list[int]]:
        """Tokens of a prefix by its hash, and the hashes of everything it begins with."""
        tokens, found = [], []
        for _ in range(length):
            found.append(value)
            value, token = self._parents[value]
            tokens.append(token)
        return tokens[::-1], found[::-1]


def _is_piece(group: LayerGroup, of: LayerGroup) -> bool:
    return group.kind == of.kind and set(group.layers) <= set(of.layers)


def _prefix_of(slot: int | Part | Kept) -> int:
    return slot if isinstance(slot, int) else slot.prefix
