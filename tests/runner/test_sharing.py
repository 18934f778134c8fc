"""Bunches of runs that share pages: only what is really shared, and enough of it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lockstep.kernels import tree
from lockstep.runner.sharing import BUNCH, shared_runs

PAGE = 64
WIDTH = tree.SEGMENT // PAGE


def tables(prefixes: list[list[int]], contexts: list[int]) -> np.ndarray:
    """Page tables: a run begins with its prefix's pages and goes on with pages of its own."""
    columns = max(-(-context // PAGE) for context in contexts)
    table = np.full((len(contexts), columns), -1, np.int32)
    for row, (prefix, context) in enumerate(zip(prefixes, contexts, strict=True)):
        pages = -(-context // PAGE)
        own = range(1000 + row * columns, 1000 + row * columns + pages)
        table[row, :pages] = [*prefix, *own][:pages]
    return table


def test_a_common_prefix_is_one_bunch_in_sixteen_runs() -> None:
    prefix = list(range(4 * WIDTH))
    contexts = [4 * tree.SEGMENT + 128 + i for i in range(40)]
    found = shared_runs([tables([prefix] * 40, contexts)], np.array(contexts, np.int32), PAGE)
    assert found is not None
    assert found.segments.tolist() == [4] * 40
    assert found.bunch_segments.tolist() == [4, 4, 4]
    assert sorted(found.members[found.members >= 0].tolist()) == list(range(40))


def test_the_segment_of_the_row_itself_is_its_own() -> None:
    """A row that ends its segment reads the whole of it, and still does so by itself."""
    prefix = list(range(2 * WIDTH))
    contexts = [2 * tree.SEGMENT] * 16
    found = shared_runs([tables([prefix] * 16, contexts)], np.array(contexts, np.int32), PAGE)
    assert found is not None
    assert found.segments.tolist() == [1] * 16


@pytest.mark.parametrize("shared", [0, 1])
def test_little_in_common_is_not_worth_a_launch(shared: int) -> None:
    contexts = [12 * tree.SEGMENT] * 32
    prefixes = [list(range(shared * WIDTH)) if row < 8 else [] for row in range(32)]
    assert shared_runs([tables(prefixes, contexts)], np.array(contexts, np.int32), PAGE) is None


@pytest.mark.parametrize("seed", range(20))
def test_bunches_name_only_what_is_shared(seed: int) -> None:
    chance = random.Random(seed)
    trunk = list(range(200))
    prefixes, contexts = [], []
    for row in range(60):
        fork = chance.randint(0, 60)
        branch = [300 + 100 * chance.randint(0, 2) + i for i in range(chance.randint(0, 40))]
        prefixes.append([*trunk[:fork], *branch] if row % 3 else trunk[: chance.randint(0, 90)])
        contexts.append(chance.randint(1, 9 * tree.SEGMENT))
    table = tables(prefixes, contexts)
    found = shared_runs([table], np.array(contexts, np.int32), PAGE)
    if found is None:
        return
    seen = []
    for members, count in zip(found.members, found.bunch_segments, strict=True):
        runs = members[members >= 0].tolist()
        assert 2 <= len(runs) <= BUNCH
        assert members[0] >= 0
        for run in runs:
            assert found.segments[run] == count
            assert count * tree.SEGMENT < contexts[run]
            assert (table[run, : count * WIDTH] == table[runs[0], : count * WIDTH]).all()
        seen += runs
    assert len(seen) == len(set(seen))
    assert set(seen) == set(np.flatnonzero(found.segments).tolist())


def test_a_bunch_shares_its_pages_in_every_group() -> None:
    """The groups of a trunk that is cut: runs that lie together above may lie apart below."""
    contexts = [4 * tree.SEGMENT + 128 + i for i in range(32)]
    context = np.array(contexts, np.int32)
    prefix = list(range(4 * WIDTH))
    below = tables([prefix] * 32, contexts)
    # Even and odd runs have pages of their own here, from the first or from the third segment.
    halves = [[page + 500 * (run % 2) for page in prefix] for run in range(32)]
    late = [[*prefix[: 2 * WIDTH], *half[2 * WIDTH :]] for half in halves]
    for above, segments in ((halves, 4), (late, 4)):
        found = shared_runs([below, tables(above, contexts)], context, PAGE)
        assert found is not None
        assert found.bunch_segments.tolist() == [segments] * 2
        for members in found.members:
            assert len(set(members.tolist())) == 16
            assert len({run % 2 for run in members.tolist()}) == 1
    apart = tables([[]] * 32, contexts)
    assert shared_runs([below, apart], context, PAGE) is None
    assert shared_runs([], context, PAGE) is None
