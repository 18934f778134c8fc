"""The control: the bit tests must fail where the tree is free."""

from __future__ import annotations

import pytest
import torch

from lockstep.kernels.contract import Backend
from tests.control import RowSplitBackend, slices
from tests.kernels.support import DTYPES, Sequences, backend, moving_rows, randn

COUNTS = (2, 3, 4, 8, 16, 33, 64, 100)


SHAPES = ((576, 576), (576, 1536), (960, 576))


def moved_counts(control: Backend, dtype: torch.dtype) -> set[int]:
    """Row counts for which the control's product moves bits, over all shapes."""
    moved: set[int] = set()
    for n, k in SHAPES:
        packed = control.pack(randn(n, k, dtype=dtype, seed=1))
        x = randn(max(COUNTS), k, dtype=dtype, seed=2)
        moved |= moving_rows(lambda rows, w=packed: control.linear(rows, w), x, COUNTS)
    return moved


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_split_that_follows_the_rows_fails_the_row_test(dtype: torch.dtype) -> None:
    """Every count that takes another split than one row does is caught, on every machine."""
    split = {count for count in COUNTS if slices(count) != slices(1)}
    assert split <= moved_counts(RowSplitBackend(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_matmul_fails_the_row_test(dtype: torch.dtype) -> None:
    """torch's own matmul moves bits with the batch, unless it happens to be invariant here."""
    if not moved_counts(backend("plain"), dtype):
        pytest.skip(f"torch {torch.__version__} moves no bit of these {dtype} products here")


def test_the_row_test_sees_a_tree_that_follows_the_batch() -> None:
    """A sum in halves for large batches and in order for small ones is caught."""

    def drifting(x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(x))
        for column in x.unbind(1) if len(x) < 4 else reversed(x.unbind(1)):
            total = total + column
        return total

    assert moving_rows(drifting, randn(8, 200), (2, 3, 4, 8)) == {4, 8}


def test_plain_attention_has_right_values_but_free_bits() -> None:
    shape = {"q_heads": 9, "kv_heads": 3, "head_dim": 64}
    group = Sequences(backend("plain"), (200,), dtype=torch.float32, filler=0.0, **shape)
    whole = group.whole(0)
    torch.testing.assert_close(group.in_chunks(0, 7), whole, rtol=1e-5, atol=1e-5)
