"""The Triton LoRA kernels under Triton's interpreter: arithmetic, addressing, rows left alone.

What is exact on a device is proved in `tests/gpu/test_lora.py`; see `test_triton_interpreter`.
"""

from __future__ import annotations

from tests.kernels import interpreter  # before anything imports triton

from collections.abc import Sequence  # isort: skip

import pytest  # isort: skip
import torch  # isort: skip

from lockstep.kernels.contract import Backend  # isort: skip
from tests.kernels.support import DTYPES, backend, randn, same_bits  # isort: skip
from tests.kernels.test_lora import CASES, adapted, everything, rows_of, without  # isort: skip

pytestmark = [
    pytest.mark.skipif(not interpreter.AVAILABLE, reason="needs Triton's interpreter, and no GPU"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.fixture(scope="module")
def ops() -> Backend:
    from lockstep.kernels.cuda import make_backend

    return make_backend("cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES[1:4])
def test_mixed_adapters(
    ops: Backend, case: tuple[int, int, Sequence[Sequence[int]], bool], dtype: torch.dtype
) -> None:
    n, k, ranks, gated = case
    it = adapted(n, k, ranks, dtype, gated)
    x, residual = randn(20, k, dtype=dtype), randn(20, it.width, dtype=dtype, seed=2)
    index = [(row // 3) % (len(ranks) + 1) - 1 for row in range(20)]
    found = everything(ops, it, x, residual, index)
    wanted = everything(backend("native"), it, x, residual, index)
    step = 2.0**-5 if dtype == torch.bfloat16 else 1e-5
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=step, atol=4 * step)
    # Rows without an adapter have the bits of the plain product, and adapters change the others.
    bare = [row for row, adapter in enumerate(index) if adapter < 0 or not it.pairs[adapter]]
    moved = [row for row in range(20) if row not in bare]
    for mine, plain in zip(found, without(ops, it, x, residual), strict=True):
        assert same_bits(mine[bare], plain[bare])
        assert bool((mine[moved] != plain[moved]).any(1).all())


def test_rows_do_not_depend_on_their_neighbours(
    ops: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lockstep.kernels.cuda import lora

    it = adapted(70, 48, ((4, 0, 20), (9,)), torch.float32)
    x, residual = randn(40, 48), randn(40, 70, seed=2)
    index = [row % 3 - 1 for row in range(40)]
    whole = everything(ops, it, x, residual, index)
    order = list(reversed(range(40)))
    moved = everything(ops, it, x[order], residual[order], [index[i] for i in order])
    part = everything(ops, it, x[5:9].contiguous(), residual[5:9], index[5:9])
    for expected, other, few in zip(whole, moved, part, strict=True):
        torch.testing.assert_close(other, expected[order], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(few, expected[5:9], rtol=1e-5, atol=1e-5)
    weight, adapters = it.packed(ops)
    tall = lora.adapted_linear(x, weight, rows_of(index, adapters), None, None, rows_per_tile=64)
    torch.testing.assert_close(tall, whole[0], rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(lora, "_MOST_SUMS", 70 * 16)
    monkeypatch.setattr(lora, "_FEWEST_ROWS", 8)
    for expected, parts in zip(whole, everything(ops, it, x, residual, index), strict=True):
        torch.testing.assert_close(parts, expected, rtol=1e-5, atol=1e-5)


def test_no_adapter_at_all_is_the_plain_product(ops: Backend) -> None:
    x, weight = randn(5, 32), ops.pack(randn(24, 32, seed=1))
    for weights in ((), (None,)):
        lora = rows_of([-1] * 5, ops.lora_set(weights))
        assert same_bits(ops.adapted_linear(x, weight, lora), ops.linear(x, weight))
