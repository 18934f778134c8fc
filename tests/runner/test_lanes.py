"""How a plan's rows are divided: lanes, their order, and which of them are copied."""

from __future__ import annotations

from typing import Any

from lockstep.runner.lanes import BranchPlace, LaneRows, exit_spans, segments_of
from lockstep.runner.plan import TokenRun

BRANCHES = {
    "late": BranchPlace(4, 6, slot=2),
    "early": BranchPlace(2, 5, slot=1),
    "twin": BranchPlace(2, 5, slot=0, tail=(2, 5)),
}
LAYERS = 8
KEPT = {2: 3}


def run(length: int, end: int = LAYERS, **more: Any) -> TokenRun:
    first = more.pop("first", 0)
    return TokenRun(0, 0, (1,) * length, ([0], [], [], [0]), (first, end), **more)


def lanes(*runs: TokenRun) -> list[tuple[int, int, list[LaneRows]]]:
    return [(s.begin, s.end, list(s.lanes)) for s in segments_of(runs, BRANCHES, KEPT)]


def test_without_branches_there_is_one_lane_and_no_copy() -> None:
    below, above = lanes(run(3, logits=1), run(1, logits=1), run(5))
    assert [found[:2] for found in (below, above)] == [(0, 2), (2, LAYERS)]  # cut at the stop
    for (lane,) in (below[2], above[2]):
        assert (lane.runs, lane.whole, lane.gather, lane.adapted) == ((0, 1, 2), 0, None, False)
    assert below[2][0].leaving == (3, 1, 5)
    assert above[2][0].leaving == above[2][0].exits == (1, 1, 0)


def test_a_suffix_shares_the_trunks_launches_below_its_fork() -> None:
    found = lanes(run(2, logits=1), run(3, 5, branch="early", logits=1, scores=True))
    assert [(begin, end, len(own)) for begin, end, own in found] == [
        (0, 2, 1),
        (2, 5, 2),
        (5, 8, 1),
    ]
    (below,), (trunk, branch), (above,) = (own for _, _, own in found)
    assert below.runs == (0, 1)
    assert not below.adapted
    assert (trunk.runs, trunk.adapted) == ((0,), False)
    assert (branch.runs, branch.adapted, branch.tail) == ((1,), True, None)
    assert trunk.gather is not None
    assert branch.gather is not None
    assert trunk.gather.tolist() == [0, 1]
    assert branch.gather.tolist() == [2, 3, 4]
    assert (above.runs, above.whole) == ((0,), 0)  # the trunk's rows go on as they are


def test_lanes_are_the_trunk_then_its_pages_then_tails_each_branch_by_branch() -> None:
    runs = [
        run(1, 6, branch="late", logits=1, scores=True),
        run(2, 5, branch="early", logits=1, scores=True),
        run(4),
        run(4, 5, branch="twin", first=2, source=2),
        run(1, 6, branch="late", logits=1, scores=True),
        run(2, 5, branch="early", logits=1, scores=True),
    ]
    found = {begin: own for begin, _, own in lanes(*runs)}
    assert [lane.runs for lane in found[0]] == [(0, 1, 2, 4, 5)]
    assert [lane.runs for lane in found[2]] == [(0, 2, 4), (1, 5), (3,)]
    assert [lane.runs for lane in found[4]] == [(2,), (1, 5, 0, 4), (3,)]
    assert [lane.tail for lane in found[4]] == [None, None, (2, 5)]
    assert [lane.runs for lane in found[5]] == [(2,), (0, 4)]
    twin = found[2][2]
    assert twin.gather is not None
    assert twin.gather.tolist() == [3, 4, 5, 6]  # its source's rows: they double
    spans = exit_spans(segments_of(runs, BRANCHES, KEPT), runs)
    assert spans == ((2, 3), (0, 1), (0, 0), (0, 0), (3, 4), (1, 2))


def test_rows_are_stored_as_they_leave_and_read_as_they_enter() -> None:
    kept = run(5, 5, branch="twin", first=2, kept=True)
    below, at_fork, _ = segments_of([run(3, keeps=True), kept], BRANCHES, KEPT)
    assert (below.end, below.kept, below.keeps) == (2, (), ((0, 0),))
    assert (at_fork.begin, at_fork.kept, at_fork.keeps) == (2, (1,), ())
    assert at_fork.lanes[1].gather is not None
    assert at_fork.lanes[1].gather.tolist() == [3, 4, 5, 6, 7]  # behind what left before
    (alone,) = segments_of([kept], BRANCHES, KEPT)
    assert (alone.begin, alone.end, alone.lanes[0].whole) == (2, 5, None)


def test_all_rows_of_a_run_that_stops_are_stored() -> None:
    """Also where nobody goes on, and whichever of them need logits or are copied at the fork."""
    stopped = run(4, 2, keeps=True, logits=1)
    (alone,) = segments_of([run(3, 2), stopped], BRANCHES, KEPT)
    assert alone.keeps == ((1, 0),)
    assert (alone.lanes[0].leaving, alone.lanes[0].exits) == ((0, 4), (0, 1))
    twin = run(4, 5, branch="twin", first=2, source=0)
    below, at_fork = segments_of([stopped, twin], BRANCHES, KEPT)
    assert below.keeps == ((0, 0),)
    assert at_fork.lanes[0].gather is not None
    assert at_fork.lanes[0].gather.tolist() == [0, 1, 2, 3]


def test_rows_that_enter_behind_a_gap_are_found_behind_those_that_left_before_it() -> None:
    high = {**KEPT, 6: 0}
    left, late = segments_of([run(3, 2, logits=2), run(5, first=6, kept=True)], BRANCHES, high)
    assert (left.begin, left.end, late.begin, late.end) == (0, 2, 6, LAYERS)
    assert left.lanes[0].leaving == (2,)
    assert late.lanes[0].gather is not None
    assert late.lanes[0].gather.tolist() == [2, 3, 4, 5, 6]
