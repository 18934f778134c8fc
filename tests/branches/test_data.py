"""Rows of a file: what is read, and that bad rows are named by their line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.branch import BranchError
from lockstep.branches.data import CODES, Example, majority, read_rows, split
from tests.branches.support import written

CHAT = [{"role": "user", "content": "hello"}]
COLOURS = {
    "type": "choice",
    "instructions": "Which colour?",
    "choices": [{"value": "red"}, {"value": "blue", "description": "like the sky"}],
}


def test_rows_of_options(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        {"input": "a", "label": "stop", "case": "easy", "group": "one"},
        "",
        {"messages": CHAT, "label": "go"},
    )
    found = read_rows(file, "options")
    assert found.options == ("stop", "go")
    first, second = found.examples
    assert (first.line, first.given, first.target, first.case, first.group) == (
        1, "a", 0, "easy", "one",
    )  # fmt: skip
    assert (second.line, second.given, second.target) == (3, CHAT, 1)
    assert read_rows(file, "options", ["go", "stop"]).examples[0].target == 1
    assert found.digest == read_rows(file, "options", ["go", "stop"]).digest


def test_rows_of_codes_and_values(tmp_path: Path) -> None:
    predicate = {"type": "predicate", "instructions": "Is it warm?"}
    score = {
        "type": "score",
        "instructions": "How warm?",
        "levels": [{"label": "a"}, {"label": "b"}],
    }
    file = written(
        tmp_path,
        {"input": "a", "question": COLOURS, "label": "blue"},
        {"input": "a", "question": predicate, "label": False},
        {"input": "a", "question": score, "label": "b"},
    )
    found = read_rows(file, "codes")
    assert found.options == CODES
    named = [CODES[int(example.target)] for example in found.examples]
    assert named == ["B", "No", "1"]
    assert [CODES[i] for i in found.examples[0].outputs] == ["A", "B"]
    assert "B. blue: like the sky" in found.examples[0].text
    values = read_rows(written(tmp_path, {"input": "a", "value": 3}), "value")
    assert values.options == ("value",)
    assert values.examples[0].target == 3.0


BAD: list[tuple[str, Any, str]] = [
    ("options", "{", "not JSON"),
    ("options", [1], "must be an object, got list"),
    ("options", {"input": "a", "label": "x", "labell": 1}, "unknown key 'labell'"),
    ("options", {"label": "x"}, "either messages or input"),
    ("options", {"input": "a", "messages": CHAT, "label": "x"}, "either messages or input"),
    ("options", {"input": "", "label": "x"}, "input must be a non-empty text"),
    ("options", {"messages": [], "label": "x"}, "messages must be a non-empty list"),
    ("options", {"input": "a"}, "rows of a head of kind options have label"),
    ("options", {"input": "a", "label": "x", "value": 1}, "have label, and no value"),
    ("options", {"input": "a", "label": 3}, "label must be a non-empty text, got 3"),
    ("options", {"input": "a", "label": "z"}, "label 'z' is none of x, y"),
    ("options", {"input": "a", "label": "x", "group": 1}, "group must be a text, got 1"),
    ("options", {"input": "a", "label": "x", "question": COLOURS}, "question is for rows of"),
    ("value", {"input": "a", "value": True}, "value must be a finite number, got True"),
    ("value", '{"input": "a", "value": NaN}', "value must be a finite number, got nan"),
    ("codes", {"input": "a", "label": "x"}, "these need it"),
    ("codes", {"input": "a", "question": COLOURS, "label": "green"}, "label 'green' is none of"),
    ("codes", {"input": "a", "question": {"type": "x"}, "label": "x"}, "question.type must be"),
    (
        "codes",
        {"input": "a", "question": {**COLOURS, "choices": [{"value": "red"}]}, "label": "red"},
        "choices must have 2 to 255 entries, got 1",
    ),
    (
        "codes",
        {"input": "a", "question": {**COLOURS, "n": 1}, "label": "red"},
        "question has an unknown key 'n'",
    ),
]


@pytest.mark.parametrize(("head", "row", "message"), BAD)
def test_a_bad_row_is_named_by_its_line(head: Any, row: Any, message: str, tmp_path: Path) -> None:
    good = {
        "options": {"input": "a", "label": "x"},
        "value": {"input": "a", "value": 1},
        "codes": {"input": "a", "question": COLOURS, "label": "red"},
    }[head]
    file = written(tmp_path, good, row)
    with pytest.raises(BranchError) as caught:
        read_rows(file, head, ["x", "y"] if head == "options" else ())
    assert str(caught.value).startswith(f"{file}:2: ")
    assert message in str(caught.value)


def test_many_bad_rows_are_one_error_of_bounded_length(tmp_path: Path) -> None:
    file = written(tmp_path, *["{"] * 200)
    with pytest.raises(BranchError) as caught:
        read_rows(file, "options")
    lines = str(caught.value).splitlines()
    assert len(lines) == 11
    assert lines[-1] == "and 190 more bad rows"


def test_files_with_nothing_to_learn(tmp_path: Path) -> None:
    with pytest.raises(BranchError, match="No such file"):
        read_rows(tmp_path / "none", "options")
    with pytest.raises(BranchError, match="has no rows"):
        read_rows(written(tmp_path, ""), "options")
    with pytest.raises(BranchError, match="every row has the label 'x'"):
        read_rows(written(tmp_path, {"input": "a", "label": "x"}), "options")
    with pytest.raises(BranchError, match="options are for an options head"):
        read_rows(written(tmp_path, {"input": "a", "value": 1}), "value", ["a", "b"])


@given(
    groups=st.lists(st.integers(0, 9), min_size=4, max_size=60).filter(lambda g: len(set(g)) > 2),
    seed=st.integers(0, 5),
)
def test_a_split_keeps_groups_and_loses_nothing(groups: list[int], seed: int) -> None:
    rows = [Example(i, "-", 0, group=f"g{g}") for i, g in enumerate(groups)]
    try:
        large, small = split(rows, 0.2, seed)
    except BranchError:  # one group is nearly all
        return
    assert sorted(large + small) == list(range(len(rows)))
    assert not {groups[i] for i in large} & {groups[i] for i in small}
    assert len(small) >= 0.2 * len(rows)
    assert split(rows, 0.2, seed) == (large, small)


def test_a_split_needs_two_groups() -> None:
    rows = [Example(i, "-", 0, group="same") for i in range(9)]
    with pytest.raises(BranchError, match="9 rows in 1 groups cannot be split"):
        split(rows, 0.2, 0)


def test_majority() -> None:
    assert majority([Example(1, "-", t) for t in (2, 1, 1, 2, 0)]) == 1
