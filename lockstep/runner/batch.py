"""A plan turned into tensors: the rows of `lanes`, with what each operation reads of them.

All index arrays of a step travel to the device in one copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.kernels.contract import AttentionBatch
from lockstep.model import Onward
from lockstep.runner.groups import own_groups, tails_of
from lockstep.runner.lanes import (
    BranchPlace,
    Ints,
    LaneRows,
    SegmentRows,
    Tail,
    check_runs,
    exit_spans,
    last_rows,
    segments_of,
)
from lockstep.runner.plan import Plan, TokenRun
from lockstep.types import LayerGroup

_ALIGN = 16  # int32 elements: every array starts on a 64-byte boundary


@dataclass(frozen=True, slots=True)
class Lane:
    """Rows that pass through a segment's layers together.

    Attributes:
        whole, gather, tail: as in `LaneRows`; gather int32 on the device.
        positions, attention: of these rows; see `model.ForwardStep`.
        num_exits: rows whose hidden states after the segment need logits.
        exits: int32 indices of those rows among the ones that leave the last layer; None
            when they are all of them, or none.
        onward: the rows that leave the last layer; None when they are all.
        adapters: int32 [R], each row's place in the sets of adapters; None for no adapters.
    """

    whole: int | None
    gather: Tensor | None
    positions: Tensor
    attention: Mapping[int, AttentionBatch]
    num_exits: int
    exits: Tensor | None = None
    onward: Onward | None = None
    adapters: Tensor | None = None
    tail: Tail | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """Hidden rows on the pages of an activations group.

    Attributes:
        group: its index. slots: int32 [2, n], page and token within it of every row.
        rows: int32 [n], places of those to write among all rows that leave the segment, lane
            by lane; None where they are read.
    """

    group: int
    slots: Tensor
    rows: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """Layers [begin, end), and the lanes that take them in turn.

    Attributes:
        kept: rows that enter here from pages. keeps: rows that are stored as they leave.
    """

    begin: int
    end: int
    lanes: tuple[Lane, ...]
    kept: Stored | None = None
    keeps: Stored | None = None


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Everything that the forward pass of one step reads.

    Attributes:
        ids: int32 token ids of the runs that enter from the embedding; None for no run.
        segments: ascending.
        logit_rows: per run of the plan, (begin, end) of its rows among all exits, in
            the order in which segments, and in them lanes, yield them.
    """

    ids: Tensor | None
    segments: tuple[Segment, ...]
    logit_rows: tuple[tuple[int, int], ...]


def page_table(pages: Sequence[Sequence[int]], columns: int) -> Ints:
    """Page tables of some runs as one array [len(pages), columns], -1 where a run has no page;
    what stands behind `columns` is left out."""
    cut = [own if len(own) <= columns else own[:columns] for own in pages]
    lengths = np.fromiter(map(len, cut), np.int32, len(cut))
    table = np.full((len(cut), columns), -1, np.int32)
    # All at once: a run at a time takes twice as long.
    table[np.arange(columns) < lengths[:, None]] = np.fromiter(
        chain.from_iterable(cut), np.int32, int(lengths.sum())
    )
    return table


class _Upload:
    """int32 arrays gathered into one buffer and sent to the device in one copy."""

    def __init__(self) -> None:
        self._arrays: list[Ints] = []
        self._starts: list[int] = []
        self._size = 0

    def add(self, array: Ints) -> int:
        """Register an array; its index in what `send` returns."""
        self._arrays.append(array)
        self._starts.append(self._size)
        self._size += -(-array.size // _ALIGN) * _ALIGN
        return len(self._arrays) - 1

    def add_some(self, array: Ints | None) -> int | None:
        """As `add`, where there is one."""
        return None if array is None else self.add(array)

    def send(self, device: torch.device) -> list[Tensor]:
        pinned = device.type == "cuda"
        buffer = torch.empty(self._size, dtype=torch.int32, pin_memory=pinned)
        flat = buffer.numpy()
        for start, array in zip(self._starts, self._arrays, strict=True):
            flat[start : start + array.size] = array.ravel()
        sent = buffer.to(device, non_blocking=True) if pinned else buffer
        return [
            sent[start : start + array.size].view(array.shape)
            for start, array in zip(self._starts, self._arrays, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class _Stand:
    """Where the rows of some runs stand; arrays as indices into an upload.

    Attributes:
        owner, at: each row's run and absolute position, on the host.
        lengths: rows of each run.
    """

    runs: tuple[int, ...]
    owner: NDArray[np.int64]
    at: Ints
    lengths: Ints
    positions: int
    query_start: int
    context_len: int
    max_query: int
    max_context: int


def _some(tensors: Sequence[Tensor], index: int | None) -> Tensor | None:
    return None if index is None else tensors[index]


@dataclass(frozen=True, slots=True)
class _OnwardDraft:
    """An `Onward` whose arrays are indices into an upload."""

    rows: int
    query_start: int
    adapters: int | None
    max_query: int

    def finish(self, tensors: Sequence[Tensor], attention: Mapping[int, AttentionBatch]) -> Onward:
        """The last rows of every run see the same context as the whole run does."""
        starts = tensors[self.query_start]
        batches = {
            group: replace(batch, query_start=starts, max_query=self.max_query)
            for group, batch in attention.items()
        }
        return Onward(tensors[self.rows], batches, _some(tensors, self.adapters))


@dataclass(frozen=True, slots=True)
class _StoredDraft:
    """A `Stored` whose arrays are indices into an upload."""

    group: int
    slots: int
    rows: int | None

    def finish(self, tensors: Sequence[Tensor]) -> Stored:
        return Stored(self.group, tensors[self.slots], _some(tensors, self.rows))


@dataclass(frozen=True, slots=True)
class _Draft:
    """A `Lane` whose arrays are indices into an upload.

    Attributes:
        pages: (group of the model, page table, slots) of the groups with a layer here.
    """

    stand: _Stand
    whole: int | None
    gather: int | None
    pages: tuple[tuple[int, int, int], ...]
    num_exits: int
    exits: int | None
    onward: _OnwardDraft | None
    adapters: int | None
    tail: Tail | None

    def finish(self, tensors: Sequence[Tensor]) -> Lane:
        stand = self.stand
        attention = {
            group: AttentionBatch(
                query_start=tensors[stand.query_start],
                context_len=tensors[stand.context_len],
                page_table=tensors[table],
                slots=tensors[slots],
                max_query=stand.max_query,
                max_context=stand.max_context,
            )
            for group, table, slots in self.pages
        }
        return Lane(
            whole=self.whole,
            gather=_some(tensors, self.gather),
            positions=tensors[stand.positions],
            attention=attention,
            num_exits=self.num_exits,
            exits=_some(tensors, self.exits),
            onward=None if self.onward is None else self.onward.finish(tensors, attention),
            adapters=_some(tensors, self.adapters),
            tail=self.tail,
        )


@dataclass(frozen=True, slots=True)
class _Layout:
    """What a builder knows of the pool and of the branches.

    Attributes:
        groups: as `Executor.groups`, the first `num_own` of them the model's own.
        uncut: layer -> the group of the model, by which the model's layers ask for theirs.
        activations: layer -> index of the group that holds what enters it.
    """

    groups: tuple[LayerGroup, ...]
    num_own: int
    uncut: dict[int, int]
    page_tokens: int
    activations: dict[int, int]
    branches: Mapping[str, BranchPlace]


class BatchBuilder:
    """Builds `StepBatch`es for one model on one device.

    Args:
        model_groups: the model's groups, uncut. groups: as `Executor.groups`.
        page_tokens: tokens a page.
        device: where the tensors go.
        branches: those that plans may name, by key; read anew for every plan.
    """

    def __init__(
        self,
        model_groups: Sequence[LayerGroup],
        groups: Sequence[LayerGroup],
        page_tokens: int,
        device: torch.device,
        branches: Mapping[str, BranchPlace],
    ) -> None:
        self._device = device
        kept = {g.layers[0]: i for i, g in enumerate(groups) if g.kind == "activations"}
        uncut = {layer: i for i, group in enumerate(model_groups) for layer in group.layers}
        self._num_layers = len(uncut)
        self._layout = _Layout(
            tuple(groups), len(own_groups(groups)), uncut, page_tokens, kept, branches
        )

    def build(self, plan: Plan) -> StepBatch:
        """Tensors of a plan with at least one run.

        Raises:
            ValueError: a run without tokens, without a page where a row stands, or with
                layers, a source or a branch that make no sense.
        """
        runs, layout = plan.runs, self._layout
        check_runs(runs, self._num_layers, len(layout.groups), layout.branches, layout.activations)
        segments = segments_of(runs, layout.branches, layout.activations)
        return _StepBuilder(layout, runs).build(segments, self._device)


class _StepBuilder:
    """One plan on its way into an upload; what several lanes have in common is sent once."""

    def __init__(self, layout: _Layout, runs: Sequence[TokenRun]) -> None:
        self._layout = layout
        self._runs = runs
        self._upload = _Upload()
        self._stands: dict[tuple[int, ...], _Stand] = {}
        self._tables: dict[tuple[tuple[int, ...], int], tuple[int, int]] = {}

    def build(self, segments: Sequence[SegmentRows], device: torch.device) -> StepBatch:
        runs = self._runs
        ids = [np.asarray(run.tokens, np.int32) for run in runs if run.layers[0] == 0]
        ids_at = self._upload.add(np.concatenate(ids)) if ids else None
        drafts = [
            (
                segment,
                [self._draft(lane, segment) for lane in segment.lanes],
                self._stored(segment.begin, segment.kept, None),
                self._stored(segment.end, [i for i, _ in segment.keeps], segment.keeps),
            )
            for segment in segments
        ]
        tensors = self._upload.send(device)
        return StepBatch(
            None if ids_at is None else tensors[ids_at],
            tuple(
                Segment(
                    segment.begin,
                    segment.end,
                    tuple(lane.finish(tensors) for lane in lanes),
                    None if kept is None else kept.finish(tensors),
                    None if keeps is None else keeps.finish(tensors),
                )
                for segment, lanes, kept, keeps in drafts
            ),
            exit_spans(segments, runs),
        )

    def _draft(self, lane: LaneRows, segment: SegmentRows) -> _Draft:
        stand = self._stand(lane.runs)
        upload = self._upload
        left = np.array(lane.leaving, np.int32)
        wanted = np.array(lane.exits, np.int32)
        num_left, num_exits = int(left.sum()), int(wanted.sum())
        slots = self._adapters(lane, stand) if lane.adapted else None
        return _Draft(
            stand=stand,
            whole=lane.whole,
            gather=upload.add_some(lane.gather),
            pages=self._pages(lane, segment, stand),
            num_exits=num_exits,
            exits=upload.add(last_rows(left, wanted)) if 0 < num_exits < num_left else None,
            onward=self._onward(stand.lengths, left, slots) if num_left < len(stand.at) else None,
            adapters=upload.add_some(slots),
            tail=lane.tail,
        )

    def _onward(self, lengths: Ints, left: Ints, slots: Ints | None) -> _OnwardDraft:
        rows = last_rows(lengths, left)
        starts = np.zeros(len(left) + 1, np.int32)
        np.cumsum(left, out=starts[1:])
        return _OnwardDraft(
            self._upload.add(rows),
            self._upload.add(starts),
            None if slots is None else self._upload.add(slots[rows]),
            int(left.max()),
        )

    def _stand(self, members: tuple[int, ...]) -> _Stand:
        """Positions and contexts of some runs' rows."""
        found = self._stands.get(members)
        if found is not None:
            return found
        chosen = [self._runs[i] for i in members]
        count = len(chosen)
        lengths = np.fromiter((len(run.tokens) for run in chosen), np.int32, count)
        firsts = np.fromiter((run.start for run in chosen), np.int32, count)
        query_start = np.zeros(count + 1, np.int32)
        np.cumsum(lengths, out=query_start[1:])
        owner = np.repeat(np.arange(count), lengths)
        at = np.arange(query_start[-1], dtype=np.int32) + (firsts - query_start[:-1])[owner]
        context = firsts + lengths
        stand = _Stand(
            runs=members,
            owner=owner,
            at=at,
            lengths=lengths,
            positions=self._upload.add(at),
            query_start=self._upload.add(query_start),
            context_len=self._upload.add(context),
            max_query=int(lengths.max()),
            max_context=int(context.max()),
        )
        self._stands[members] = stand
        return stand

    def _adapters(self, lane: LaneRows, stand: _Stand) -> Ints:
        """Each row's place in the sets of adapters."""
        places = [self._layout.branches[self._runs[i].branch].slot for i in lane.runs]
        slots: Ints = np.array(places, np.int32)[stand.owner]
        return slots

    def _pages(
        self, lane: LaneRows, segment: SegmentRows, stand: _Stand
    ) -> tuple[tuple[int, int, int], ...]:
        """(group of the model, page table, slots) of every group with a layer in the segment."""
        groups = self._layout.groups
        holders = range(self._layout.num_own) if lane.tail is None else tails_of(groups, *lane.tail)
        found = []
        for holder in holders:
            layers = groups[holder].layers
            if not any(segment.begin <= layer < segment.end for layer in layers):
                continue
            found.append((self._layout.uncut[layers[0]], *self._table(stand, holder)))
        return tuple(found)

    def _table(self, stand: _Stand, group: int) -> tuple[int, int]:
        """Page table [B, P] of a group, and the slot [R] of every row in it."""
        known = self._tables.get((stand.runs, group))
        if known is not None:
            return known
        page_tokens = np.int32(self._layout.page_tokens)
        columns = -(-stand.max_context // int(page_tokens))
        table = page_table([self._runs[i].pages[group] for i in stand.runs], columns)
        page, offset = np.divmod(stand.at, page_tokens)
        own = table[stand.owner, page]
        if own.min() < 0:
            raise ValueError(f"group {group}: a row of the step stands on no page")
        added = self._upload.add(table), self._upload.add(own * page_tokens + offset)
        self._tables[stand.runs, group] = added
        return added

    def _stored(
        self, layer: int, members: Sequence[int], keeps: Sequence[tuple[int, int]] | None
    ) -> _StoredDraft | None:
        """The pages on which rows that enter a layer lie, and of `keeps` which rows go there."""
        if not members:
            return None
        group = self._layout.activations[layer]
        slots, rows = [], []
        for place, i in enumerate(members):
            run = self._runs[i]
            at = np.arange(run.start, run.start + len(run.tokens), dtype=np.int32)
            page, token = np.divmod(at, np.int32(self._layout.page_tokens))
            table = np.asarray(run.pages[group], np.int32)
            if page[-1] >= len(table) or table[page].min() < 0:
                raise ValueError(f"group {group}: a row of the step stands on no page")
            slots.append(np.stack([table[page], token]))
            if keeps is not None:
                first = keeps[place][1]
                rows.append(np.arange(first, first + len(at), dtype=np.int32))
        return _StoredDraft(
            group,
            self._upload.add(np.concatenate(slots, axis=1)),
            self._upload.add(np.concatenate(rows)) if rows else None,
        )
