"""Decode steps as captured CUDA graphs: one launch in place of several hundred.

A graph is captured per (rows bucket, context bucket) over static index buffers and
replayed for every decode-only plan that fits. Nothing in it can move a bit: rows beyond
the plan's are padding that stores nothing (slot -1, a run of no rows), and the context
bucket only sizes launches, since attention's segments stand at absolute positions. Steps
whose runs share long prefixes have graphs of their own, see `sharing`.

Ownership: all graphs share one memory pool and one set of index buffers, so a replay
overwrites what the one before it returned, in stream order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.kernels.contract import AttentionBatch, SharedSegments
from lockstep.runner.batch import Lane, Segment, StepBatch, page_table
from lockstep.runner.groups import cuts, own_groups
from lockstep.runner.plan import Plan
from lockstep.runner.sharing import BUNCH, Shared, shared_runs
from lockstep.types import LayerGroup

_ALIGN = 16  # int32 elements: every array starts on a 64-byte boundary
_FIRST_CONTEXT = 1024
_HOST_BUFFERS = 2  # as many as steps can be under way
_ROWS_A_BUNCH = 8  # a bucket has room for one bunch in so many rows
# What the driver itself takes for a graph, at most: the rest of a difference in free memory
# is some other program's.
_DRIVER_BYTES = 32 << 20

Forward = Callable[[StepBatch], Tensor]
Capture = Callable[[Callable[[], Tensor]], "Captured"]


@dataclass(frozen=True, slots=True)
class Captured:
    """`replay` computes `output` again from the static buffers; `nbytes` is what it took."""

    replay: Callable[[], None]
    output: Tensor
    nbytes: int


class CudaCapture:
    """Captures on one device; all graphs share a memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], Tensor]) -> Captured:
        torch.cuda.synchronize(self._device)
        free, held = torch.cuda.mem_get_info(self._device)[0], self._held()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = function()
        torch.cuda.synchronize(self._device)
        own = self._held() - held
        driver = free - torch.cuda.mem_get_info(self._device)[0] - own
        return Captured(graph.replay, output, own + min(max(driver, 0), _DRIVER_BYTES))

    def _held(self) -> int:
        """Bytes that this process's allocator has taken of the device."""
        return int(torch.cuda.memory_stats(self._device)["reserved_bytes.all.current"])


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where each array of a (rows, columns) shape lies in the flat index buffers.

    `arrays` holds (begin, shape) of ids, positions, query_start, context_len, then slots
    and page table of every group; with `bunches` then the arrays of `SharedSegments`.
    """

    rows: int
    columns: int
    bunches: int
    arrays: tuple[tuple[int, tuple[int, ...]], ...]
    size: int

    @staticmethod
    def of(rows: int, columns: int, groups: int, bunches: int) -> _Layout:
        shapes: list[tuple[int, ...]] = [(rows,), (rows,), (rows + 1,), (rows,)]
        for _ in range(groups):
            shapes += [(rows,), (rows, columns)]
        if bunches:
            shapes += [(rows,), (bunches, BUNCH), (bunches,)]
        arrays, begin = [], 0
        for shape in shapes:
            arrays.append((begin, shape))
            begin += -(-int(np.prod(shape)) // _ALIGN) * _ALIGN
        return _Layout(rows, columns, bunches, tuple(arrays), begin)

    def views(self, flat: Tensor) -> list[Tensor]:
        return [
            flat[begin : begin + int(np.prod(shape))].view(shape) for begin, shape in self.arrays
        ]

    def host(self, flat: NDArray[np.int32]) -> list[NDArray[np.int32]]:
        return [
            flat[begin : begin + int(np.prod(shape))].reshape(shape) for begin, shape in self.arrays
        ]


@dataclass(frozen=True, slots=True)
class _Graph:
    layout: _Layout
    captured: Captured


def row_buckets(most: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then 16, 24, 32, 48, 64, 96, ... (halves and wholes of powers), up to `most`."""
    sizes = {1, 2, 4, 8}
    for power in count(4):
        if 1 << power > most:
            break
        sizes |= {1 << power, 3 << (power - 1)}
    return tuple(sorted({min(size, most) for size in sizes} | {most}))


def context_buckets(most: int) -> tuple[int, ...]:
    """Powers of two from 1,024 on, the last cut to `most`."""
    sizes = []
    size = _FIRST_CONTEXT
    while size < most:
        sizes.append(size)
        size *= 2
    return (*sizes, most)


class DecodeGraphs:
    """The graphs of one model over one pool.

    Args:
        forward: hidden rows that need logits, of a batch in which all rows do; reads the
            batch's tensors and nothing else of the host's, so that it can be captured.
        model_groups, groups, page_tokens: as in `BatchBuilder`.
        max_context: most tokens of a sequence. max_rows: largest bucket.
        budget: bytes that graphs may take; beyond it new shapes run without one.
        capture: captures a function; a test passes one that needs no GPU.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        model_groups: Sequence[LayerGroup],
        groups: Sequence[LayerGroup],
        page_tokens: int,
        max_context: int,
        max_rows: int,
        device: torch.device,
        budget: int,
        capture: Capture,
    ) -> None:
        self._forward = forward
        self._segments = cuts(model_groups, groups)
        self._num_layers = self._segments[-1][1]
        own = own_groups(groups)
        self._num_groups = len(own)
        self._full = [index for index, group in enumerate(own) if group.window is None]
        self._page_tokens = page_tokens
        self._rows = row_buckets(max_rows)
        self._contexts = context_buckets(max_context)
        self._left = budget
        self._capture = capture
        self._graphs: dict[tuple[int, int, bool], _Graph] = {}
        largest = self._layout(max_rows, self._contexts[-1], True).size
        pinned = device.type == "cuda"
        self._device = torch.zeros(largest, dtype=torch.int32, device=device)
        self._host = [
            torch.zeros(largest, dtype=torch.int32, pin_memory=pinned) for _ in range(_HOST_BUFFERS)
        ]
        self._turn = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def warm(self, progress: Callable[[str, float], None] | None = None) -> None:
        """Capture every rows bucket for the shortest context, the largest first; and the
        largest with shared prefixes, which compiles what all of those need."""
        for done, rows in enumerate(reversed(self._rows)):
            if progress is not None:
                progress("capturing decode graphs", done / len(self._rows))
            self._graph(rows, self._contexts[0], False)
        for context in self._contexts[1:3]:
            self._graph(self._rows[-1], context, True)
        if progress is not None:
            progress("capturing decode graphs", 1.0)

    def run(self, plan: Plan, feed: Callable[[Tensor], None] | None = None) -> Tensor | None:
        """Hidden rows [len(plan.runs), D], or None where the plan is not for a graph.

        `feed` puts ids that the device alone knows into the int32 [rows] that it is given.

        Raises:
            ValueError: a row stands on no page.
        """
        runs = plan.runs
        trunk = (0, self._num_layers)
        if len(runs) > self._rows[-1] or not all(
            len(run.tokens) == 1 and run.logits == 1 and run.layers == trunk for run in runs
        ):
            return None
        longest = max(run.start for run in runs) + 1
        rows = next(size for size in self._rows if size >= len(runs))
        context = next((size for size in self._contexts if size >= longest), None)
        if context is None:
            return None
        columns = -(-context // self._page_tokens)
        tables = [
            page_table([run.pages[group] for run in runs], columns)
            for group in range(self._num_groups)
        ]
        shared = self._shared(plan, tables, rows)
        graph = self._graph(rows, context, shared is not None)
        if graph is None:
            return None
        layout = graph.layout
        self._turn = (self._turn + 1) % _HOST_BUFFERS
        host = self._host[self._turn]
        self._fill(plan, tables, shared, layout, host.numpy())
        self._device[: layout.size].copy_(host[: layout.size], non_blocking=True)
        if feed is not None:
            feed(layout.views(self._device)[0])
        graph.captured.replay()
        return graph.captured.output[: len(runs)]

    def _layout(self, rows: int, context: int, sharing: bool) -> _Layout:
        return _Layout.of(
            rows,
            -(-context // self._page_tokens),
            self._num_groups,
            self._bunches(rows) if sharing else 0,
        )

    @staticmethod
    def _bunches(rows: int) -> int:
        return max(1, rows // _ROWS_A_BUNCH)

    def _shared(self, plan: Plan, tables: Sequence[NDArray[np.int32]], rows: int) -> Shared | None:
        """What the runs share in every full group; None where it is not enough."""
        context = np.fromiter((run.start + 1 for run in plan.runs), np.int32, len(plan.runs))
        found = shared_runs([tables[group] for group in self._full], context, self._page_tokens)
        fits = found is not None and len(found.bunch_segments) <= self._bunches(rows)
        return found if fits else None

    def _fill(
        self,
        plan: Plan,
        tables: Sequence[NDArray[np.int32]],
        shared: Shared | None,
        layout: _Layout,
        flat: NDArray[np.int32],
    ) -> None:
        """The plan's index arrays, and padding behind them."""
        runs = plan.runs
        n, rows = len(runs), layout.rows
        ids, positions, query_start, context, *groups = layout.host(flat)
        ids[:n] = np.fromiter((run.tokens[0] for run in runs), np.int32, n)
        positions[:n] = np.fromiter((run.start for run in runs), np.int32, n)
        context[:n] = positions[:n] + 1
        for array in (ids, positions, context):
            array[n:] = 0
        np.minimum(np.arange(rows + 1, dtype=np.int32), np.int32(n), out=query_start)
        page, offset = np.divmod(positions[:n], np.int32(self._page_tokens))
        at = np.arange(n)
        for group in range(self._num_groups):
            slots, table = groups[2 * group], groups[2 * group + 1]
            table[:n] = tables[group]
            own = table[at, page]
            if own.min() < 0:
                raise ValueError(f"group {group}: a row of the step stands on no page")
            slots[:n] = own * np.int32(self._page_tokens) + offset
            slots[n:] = -1
        if shared is None:
            return
        segments, members, counts = groups[2 * self._num_groups :]
        segments.fill(0)
        counts.fill(0)
        members.fill(-1)
        used = len(shared.bunch_segments)
        segments[:n] = shared.segments
        members[:used], counts[:used] = shared.members, shared.bunch_segments

    def _graph(self, rows: int, context: int, sharing: bool) -> _Graph | None:
        """The graph of a bucket, captured on first use; None when the budget is spent."""
        found = self._graphs.get((rows, context, sharing))
        if found is not None or self._left <= 0:
            return found
        layout = self._layout(rows, context, sharing)
        ids, positions, query_start, context_len, *groups = layout.views(self._device)
        of_full = groups[2 * self._num_groups :]
        shared = SharedSegments(*of_full) if sharing else None
        attention = [
            AttentionBatch(
                query_start,
                context_len,
                groups[2 * g + 1],
                groups[2 * g],
                1,
                context,
                shared if g in self._full else None,
            )
            for g in range(self._num_groups)
        ]
        segments = []
        for begin, end, own in self._segments:
            batches = {place: attention[g] for place, g in own.items()}
            exits = rows if end == self._num_layers else 0
            segments.append(Segment(begin, end, (Lane(0, None, positions, batches, exits),)))
        batch = StepBatch(ids, tuple(segments), ())
        # No row yet: the first pass compiles what the bucket's shapes need, and stores nothing.
        for view in (ids, positions, query_start, context_len):
            view.zero_()
        for slots in groups[: 2 * self._num_groups : 2]:
            slots.fill_(-1)
        for view in of_full:
            view.zero_()
        self._forward(batch)
        captured = self._capture(lambda: self._forward(batch))
        self._left -= captured.nbytes
        graph = _Graph(layout, captured)
        self._graphs[(rows, context, sharing)] = graph
        return graph
