"""Which decoding runs of a step share their first pages, so that attention reads them once.

A bunch is up to `BUNCH` runs of one token whose page tables name the same pages for some
whole segments of positions, in every group of full attention. Only speed depends on what is
found here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.kernels import tree

BUNCH = 16
_FEWEST_RUNS = 8
# Segments that need not be read again, of all that would be: below it one more launch a
# layer is not worth it.
_WORTH = 0.2
_LOOKED_AT = 8  # segments by which runs are brought beside each other

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Shared:
    """See `contract.SharedSegments`, whose arrays these are; G bunches, at least one."""

    segments: Ints
    members: Ints
    bunch_segments: Ints


def shared_runs(tables: Sequence[Ints], context: Ints, page_tokens: int) -> Shared | None:
    """Bunches among runs with page tables [B, P] in each group, whose rows see `context` [B]
    positions.

    None where too little is shared, or a segment is no whole number of pages.
    """
    runs = len(context)
    whole = (context - 1) // tree.SEGMENT  # before the one in which the row itself stands
    deepest = int(whole.max(initial=0))
    if not tables or runs < _FEWEST_RUNS or not deepest or tree.SEGMENT % page_tokens:
        return None
    width = tree.SEGMENT // page_tokens
    if any(len(np.unique(table[:, width - 1])) == runs for table in tables):
        return None
    last_pages = [table[:, width - 1 : deepest * width : width][:, :_LOOKED_AT] for table in tables]
    order = np.lexsort(np.stack(last_pages, axis=2).reshape(runs, -1).T[::-1])
    equal = np.ones((runs - 1, deepest), bool)
    for table in tables:
        rows = table[order, : deepest * width].reshape(runs, deepest, width)
        equal &= (rows[1:] == rows[:-1]).all(axis=2)
    depth = np.logical_and.accumulate(equal, axis=1).sum(axis=1)
    depth = np.minimum(depth, np.minimum(whole[order[1:]], whole[order[:-1]]))
    bunches = _bunches(depth.tolist())
    saved = sum((end - begin - 1) * segments for begin, end, segments in bunches)
    if not bunches or saved < _WORTH * int(whole.sum()):
        return None
    segments = np.zeros(runs, np.int32)
    members = np.full((len(bunches), BUNCH), -1, np.int32)
    for index, (begin, end, count) in enumerate(bunches):
        segments[order[begin:end]] = count
        members[index, : end - begin] = order[begin:end]
    return Shared(segments, members, np.array([b[2] for b in bunches], np.int32))


def _bunches(depth: list[int]) -> list[tuple[int, int, int]]:
    """(begin, end, segments) of stretches; `depth[i]` is what neighbours i and i + 1 share."""
    found = []
    begin = 0
    while begin < len(depth):
        segments = depth[begin]
        if not segments:
            begin += 1
            continue
        end = begin + 1
        while end < len(depth) + 1 and end - begin < BUNCH and depth[end - 1] >= segments:
            end += 1
        found.append((begin, end, segments))
        begin = end
    return found
