"""The control: the bit tests must fail where the tree is free."""

from __future__ import annotations

import torch

from tests.kernels.support import Sequences, backend, moving_rows, randn, same_bits

COUNTS = (2, 3, 4, 8, 16, 33, 64, 100)


def test_plain_matmul_fails_the_row_test() -> None:
    """torch's own matmul moves bits with the batch: the test that the others pass can fail."""
    moved: set[tuple[torch.dtype, int]] = set()
    for dtype in (torch.float32, torch.bfloat16):
        for n, k in ((576, 576), (576, 1536), (960, 576)):
            packed = backend("plain").pack(randn(n, k, dtype=dtype, seed=1))
            x = randn(max(COUNTS), k, dtype=dtype, seed=2)
            found = moving_rows(lambda rows, w=packed: backend("plain").linear(rows, w), x, COUNTS)
            moved |= {(dtype, count) for count in found}
    if moved:
        return
    # A machine whose matmul happens to be invariant: the comparison itself must see one ulp.
    row = randn(4, 8)
    other = row.clone()
    other[2, 3] = torch.nextafter(other[2, 3], torch.tensor(torch.inf))
    assert not same_bits(row, other)


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
