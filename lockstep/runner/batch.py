"""A plan turned into tensors.

Runs may pass through different layers: some leave early, some enter late with a copy
of another run's rows. The layers are cut where that changes, so that inside one
segment the set of rows is constant, but for its last layer: rows that nobody reads
after it only write their keys and values there. All index arrays of a step travel to the
device in one copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.kernels.contract import AttentionBatch
from lockstep.model import Onward
from lockstep.runner.plan import Plan, TokenRun

_ALIGN = 16  # int32 elements: every array starts on a 64-byte boundary
_Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Segment:
    """Layers [begin, end) and the rows that pass through them.

    Attributes:
        gather: int32 rows of the previous segment's hidden states that enter here, in
            order; None when they are the same rows.
        positions, attention: of these rows; see `model.ForwardStep`.
        num_exits: rows whose hidden states after `end` need logits.
        exits: int32 indices of those rows among the ones that leave the last layer; None
            when they are all of them, or none.
        onward: the rows that leave the last layer; None when they are all.
    """

    begin: int
    end: int
    gather: Tensor | None
    positions: Tensor
    attention: tuple[AttentionBatch, ...]
    num_exits: int
    exits: Tensor | None
    onward: Onward | None = None


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Everything that the forward pass of one step reads.

    Attributes:
        ids: int32 token ids of the runs that enter from the embedding.
        segments: ascending, without gaps between the first and the last layer in use.
        logit_rows: per run of the plan, (begin, end) of its rows among all exits, in
            the order in which segments yield them.
    """

    ids: Tensor
    segments: tuple[Segment, ...]
    logit_rows: tuple[tuple[int, int], ...]


class _Upload:
    """int32 arrays gathered into one buffer and sent to the device in one copy."""

    def __init__(self) -> None:
        self._arrays: list[_Ints] = []
        self._starts: list[int] = []
        self._size = 0

    def add(self, array: _Ints) -> int:
        """Register an array; its index in what `send` returns."""
        self._arrays.append(array)
        self._starts.append(self._size)
        self._size += -(-array.size // _ALIGN) * _ALIGN
        return len(self._arrays) - 1

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
class _Draft:
    """A `Segment` whose arrays are indices into an upload."""

    begin: int
    end: int
    gather: int | None
    positions: int
    query_start: int
    context_len: int
    tables: tuple[int, ...]
    slots: tuple[int, ...]
    max_query: int
    max_context: int
    num_exits: int
    exits: int | None
    onward: _OnwardDraft | None

    def finish(self, tensors: Sequence[Tensor]) -> Segment:
        attention = tuple(
            AttentionBatch(
                query_start=tensors[self.query_start],
                context_len=tensors[self.context_len],
                page_table=tensors[table],
                slots=tensors[slots],
                max_query=self.max_query,
                max_context=self.max_context,
            )
            for table, slots in zip(self.tables, self.slots, strict=True)
        )
        return Segment(
            begin=self.begin,
            end=self.end,
            gather=None if self.gather is None else tensors[self.gather],
            positions=tensors[self.positions],
            attention=attention,
            num_exits=self.num_exits,
            exits=None if self.exits is None else tensors[self.exits],
            onward=None if self.onward is None else self.onward.finish(tensors, attention),
        )


@dataclass(frozen=True, slots=True)
class _OnwardDraft:
    """An `Onward` whose arrays are indices into an upload."""

    rows: int
    query_start: int
    max_query: int

    def finish(self, tensors: Sequence[Tensor], attention: Sequence[AttentionBatch]) -> Onward:
        """The last rows of every run see the same context as the whole run does."""
        query_start = tensors[self.query_start]
        return Onward(
            tensors[self.rows],
            tuple(
                replace(batch, query_start=query_start, max_query=self.max_query)
                for batch in attention
            ),
        )


class BatchBuilder:
    """Builds `StepBatch`es for one model on one device.

    Args:
        num_layers, num_groups: of the model.
        page_tokens: tokens a page.
        device: where the tensors go.
    """

    def __init__(
        self, num_layers: int, num_groups: int, page_tokens: int, device: torch.device
    ) -> None:
        self._num_layers = num_layers
        self._num_groups = num_groups
        self._page_tokens = page_tokens
        self._device = device

    def build(self, plan: Plan) -> StepBatch:
        """Tensors of a plan with at least one run.

        Raises:
            ValueError: a run without tokens, without a page where a row stands, or with
                layers or a source that make no sense.
        """
        runs = plan.runs
        check_runs(runs, self._num_layers, self._num_groups)
        upload = _Upload()
        ids = [np.asarray(run.tokens, np.int32) for run in runs if run.source is None]
        ids_at = upload.add(np.concatenate(ids))
        cuts = sorted({layer for run in runs for layer in run.layers})
        drafts: list[_Draft] = []
        spans = [(0, 0)] * len(runs)
        total = 0
        before: dict[int, int] = {}  # run: rows that left the segment before
        for begin, end in pairwise(cuts):
            active = [
                i for i, run in enumerate(runs) if run.layers[0] <= begin and run.layers[1] >= end
            ]
            gather = None
            if drafts and active != list(before):
                gather = upload.add(_entering_rows(runs, active, before, begin))
            onward = _rows_onward(runs, active, end)
            drafts.append(self._draft(runs, active, begin, end, gather, onward, upload))
            for index in active:
                if runs[index].layers[1] == end:
                    spans[index] = (total, total + runs[index].logits)
                    total += runs[index].logits
            before = dict(zip(active, onward, strict=True))
        tensors = upload.send(self._device)
        segments = tuple(draft.finish(tensors) for draft in drafts)
        return StepBatch(tensors[ids_at], segments, tuple(spans))

    def _draft(
        self,
        runs: Sequence[TokenRun],
        active: Sequence[int],
        begin: int,
        end: int,
        gather: int | None,
        onward: Sequence[int],
        upload: _Upload,
    ) -> _Draft:
        """Positions, page tables, slots and exits of the active runs, of which the last
        `onward` rows leave."""
        chosen = [runs[i] for i in active]
        count = len(chosen)
        lengths = np.fromiter((len(run.tokens) for run in chosen), np.int32, count)
        firsts = np.fromiter((run.start for run in chosen), np.int32, count)
        query_start = np.zeros(count + 1, np.int32)
        np.cumsum(lengths, out=query_start[1:])
        rows = int(query_start[-1])
        owner = np.repeat(np.arange(count), lengths)
        positions = np.arange(rows, dtype=np.int32) + (firsts - query_start[:-1])[owner]
        context = firsts + lengths
        max_context = int(context.max())
        tables, slots = [], []
        for group in range(self._num_groups):
            table, own = self._pages(chosen, group, max_context, owner, positions)
            tables.append(upload.add(table))
            slots.append(upload.add(own))
        wanted = np.fromiter(
            (run.logits if run.layers[1] == end else 0 for run in chosen), np.int32, count
        )
        num_exits = int(wanted.sum())
        left = np.fromiter(onward, np.int32, count)
        num_left = int(left.sum())
        return _Draft(
            begin=begin,
            end=end,
            gather=gather,
            positions=upload.add(positions),
            query_start=upload.add(query_start),
            context_len=upload.add(context),
            tables=tuple(tables),
            slots=tuple(slots),
            max_query=int(lengths.max()),
            max_context=max_context,
            num_exits=num_exits,
            exits=upload.add(_last_rows(left, wanted)) if 0 < num_exits < num_left else None,
            onward=self._onward(lengths, left, upload) if num_left < rows else None,
        )

    @staticmethod
    def _onward(lengths: _Ints, left: _Ints, upload: _Upload) -> _OnwardDraft:
        query_start = np.zeros(len(left) + 1, np.int32)
        np.cumsum(left, out=query_start[1:])
        rows = upload.add(_last_rows(lengths, left))
        return _OnwardDraft(rows, upload.add(query_start), int(left.max()))

    def _pages(
        self,
        runs: Sequence[TokenRun],
        group: int,
        max_context: int,
        owner: NDArray[np.int64],
        positions: _Ints,
    ) -> tuple[_Ints, _Ints]:
        """Page table [B, P] of a group, and the slot [R] of every row in it."""
        columns = -(-max_context // self._page_tokens)
        table = np.full((len(runs), columns), -1, np.int32)
        for row, run in enumerate(runs):
            pages = run.pages[group]
            table[row, : len(pages)] = pages[:columns]
        page, offset = np.divmod(positions, np.int32(self._page_tokens))
        own = table[owner, page]
        if own.min() < 0:
            raise ValueError(f"group {group}: a row of the step stands on no page")
        return table, own * np.int32(self._page_tokens) + offset


def check_runs(runs: Sequence[TokenRun], num_layers: int, num_groups: int) -> None:
    """Refuse a plan that would compute nonsense.

    Raises:
        ValueError: naming the run.
    """
    if not runs:
        raise ValueError("a plan without runs has nothing to compute")
    for index, run in enumerate(runs):
        first, last = run.layers
        if not 0 <= first < last <= num_layers:
            raise ValueError(f"run {index}: layers {run.layers} of {num_layers}")
        if not run.tokens or run.logits > len(run.tokens):
            raise ValueError(f"run {index}: {run.logits} logits of {len(run.tokens)} tokens")
        if run.sample is not None and run.logits < 1:
            raise ValueError(f"run {index} samples without logits")
        if run.prompt_targets and len(run.prompt_targets) != run.logits:
            raise ValueError(
                f"run {index}: {len(run.prompt_targets)} targets of {run.logits} logits"
            )
        if len(run.pages) != num_groups:
            raise ValueError(f"run {index}: pages of {len(run.pages)} groups, not {num_groups}")
        if run.source is None:
            if first != 0:
                raise ValueError(f"run {index} enters at layer {first} without a source")
            continue
        source = runs[run.source]
        if len(source.tokens) != len(run.tokens) or source.start != run.start:
            raise ValueError(f"run {index} copies run {run.source}, which stands elsewhere")
        if not source.layers[0] < first <= source.layers[1]:
            raise ValueError(
                f"run {index} enters at layer {first}, where its source {run.source} "
                f"(layers {source.layers}) has no rows"
            )


def _rows_onward(runs: Sequence[TokenRun], active: Sequence[int], end: int) -> list[int]:
    """How many of each active run's rows, its last ones, somebody reads at layer `end`.

    At least one of all: no kernel takes a launch without rows.
    """
    sources = {run.source for run in runs if run.source is not None and run.layers[0] == end}
    left = [
        len(runs[i].tokens) if runs[i].layers[1] > end or i in sources else runs[i].logits
        for i in active
    ]
    if not any(left):
        left[-1] = 1
    return left


def _last_rows(lengths: _Ints, wanted: _Ints) -> _Ints:
    """Indices of the last `wanted` [B] rows of each of B stretches of `lengths` [B] rows."""
    owner = np.repeat(np.arange(len(lengths)), lengths)
    from_end = np.cumsum(lengths)[owner] - np.arange(len(owner))
    return np.flatnonzero(from_end <= wanted[owner]).astype(np.int32)


def _entering_rows(
    runs: Sequence[TokenRun], active: Sequence[int], before: Mapping[int, int], layer: int
) -> _Ints:
    """Rows that left the previous segment (so many `before` a run) from which the active
    runs' rows come; of these runs all have."""
    start_of: dict[int, int] = {}
    row = 0
    for index, left in before.items():
        start_of[index] = row
        row += left
    pieces = []
    for index in active:
        run = runs[index]
        enters = run.source is not None and run.layers[0] == layer
        begin = start_of[run.source if enters and run.source is not None else index]
        pieces.append(np.arange(begin, begin + len(run.tokens), dtype=np.int32))
    return np.concatenate(pieces)
