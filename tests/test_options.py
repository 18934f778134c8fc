"""Scores of token sequences from as few rows as possible."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from lockstep.options import Path, hidden_by, log_softmax, probes, read, shortest
from lockstep.types import TokenLogprob

VOCAB = 4


def distribution(path: Path) -> list[float]:
    """Log-probabilities of a toy model after a path."""
    weights = [1 + (hash((path, token)) % 97) for token in range(VOCAB)]
    return [math.log(weight / sum(weights)) for weight in weights]


def rows_of(path: Path, wanted: tuple[int, ...]) -> list[TokenLogprob]:
    """What an engine reports of a probe."""
    rows = []
    for length in range(len(path) + 1):
        known = distribution(path[:length])
        token = path[length] if length < len(path) else 0
        rows.append(TokenLogprob(token, known[token], 1, (), tuple(known[i] for i in wanted)))
    return rows


def prefix_free(paths: list[Path]) -> list[Path]:
    kept: list[Path] = []
    for path in sorted(set(paths), key=len):
        if not any(path[: len(other)] == other for other in kept):
            kept.append(path)
    return kept


sequences = st.lists(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5).map(tuple), min_size=1, max_size=20
).map(prefix_free)


@given(sequences)
def test_a_sequence_scores_the_sum_of_its_ids(paths: list[Path]) -> None:
    asked = probes(paths)
    got = read(paths, asked, [rows_of(probe.path, probe.wanted) for probe in asked])
    for path, value in zip(paths, got, strict=True):
        expected = 0.0
        for length in range(len(path)):
            expected += distribution(path[:length])[path[length]]
        assert value == expected
    assert math.fsum(map(math.exp, got)) <= 1 + 1e-12


@given(sequences)
def test_no_probe_is_the_beginning_of_another(paths: list[Path]) -> None:
    asked = [probe.path for probe in probes(paths)]
    assert sorted(prefix_free(asked)) == sorted(asked)
    assert len(asked) <= len(paths)


@given(sequences)
def test_paths_without_hidden_ones(paths: list[Path]) -> None:
    assert hidden_by(paths) is None
    short, long = len(paths), len(paths) + 1
    assert hidden_by([*paths, (9,), (9, 1)]) == (short, long)
    assert hidden_by([*paths, (9, 1), (9,)]) == (long, short)
    assert hidden_by([*paths, (9,), (9,)]) == (short, long)


def test_distinct_first_ids_are_enough() -> None:
    assert shortest([(1, 2), (2, 2, 3)]) == [(1,), (2,)]
    assert shortest([(1, 2), (1, 3), (2, 2)]) == [(1, 2), (1, 3), (2, 2)]


def test_three_digits_need_a_tenth_of_the_rows() -> None:
    paths = [tuple(map(int, f"{number:03d}")) for number in range(1, 256)]
    asked = probes(paths)
    assert len(asked) == 26
    assert all(len(probe.path) == 2 for probe in asked)


@given(st.lists(st.floats(-80, 80, width=32), min_size=2, max_size=20), st.permutations(range(20)))
def test_logits_as_log_probabilities_whatever_their_order(
    logits: list[float], mixed: list[int]
) -> None:
    found = log_softmax(logits)
    assert math.isclose(math.fsum(map(math.exp, found)), 1.0, rel_tol=1e-12)
    order = [index for index in mixed if index < len(logits)]
    assert log_softmax([logits[index] for index in order]) == tuple(found[i] for i in order)
