"""The Triton kernels' arithmetic and addressing under Triton's interpreter, on small shapes.

The interpreter's products come from NumPy, so a product's bits are not the device's:
`tests/gpu` proves those. It also truncates where a cast to bfloat16 rounds. What is exact
here is exact on any machine: norms, rotation and cache writes in float32, selection.
"""

from __future__ import annotations

from tests.kernels import interpreter  # before anything imports triton

from dataclasses import replace  # isort: skip

import pytest  # isort: skip
import torch  # isort: skip

from lockstep.config import ConfigError  # isort: skip
from lockstep.kernels import exact, reference, tree  # isort: skip
from lockstep.kernels.contract import Backend, QKNorm, SharedSegments  # isort: skip
from tests.kernels import triton_trees  # isort: skip
from tests.kernels.support import DTYPES, Sequences, randn, same_bits  # isort: skip
from tests.kernels.test_sampling import rows_of  # isort: skip

pytestmark = [
    pytest.mark.skipif(not interpreter.AVAILABLE, reason="needs Triton's interpreter, and no GPU"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def check(out: torch.Tensor, want: torch.Tensor) -> None:
    """Equal bits in float32; in bfloat16 what truncated casts leave."""
    if out.dtype == torch.float32:
        assert same_bits(out, want)
    else:
        torch.testing.assert_close(out, want, rtol=2.0**-5, atol=2.0**-4)


@pytest.fixture(scope="module")
def ops() -> Backend:
    from lockstep.kernels.cuda import make_backend

    return make_backend("cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 20])
def test_products(ops: Backend, rows: int, dtype: torch.dtype) -> None:
    x, w = randn(rows, 96, dtype=dtype), randn(80, 96, dtype=dtype, seed=1)
    acc = ops.logits(x, ops.pack(w))
    torch.testing.assert_close(acc.double(), x.double() @ w.double().T, rtol=1e-5, atol=1e-4)
    bias, residual = randn(80, seed=2), randn(rows, 80, dtype=dtype, seed=3)
    want = (residual.float() + (acc + bias).to(dtype).float()).to(dtype)
    check(ops.linear(x, ops.pack(w), bias, residual), want)
    gate, up = (t.to(dtype).float() for t in acc.chunk(2, dim=1))
    for activation, function in (("silu", exact.silu), ("gelu_tanh", exact.gelu_tanh)):
        want = (function(gate, exact.fused).to(dtype).float() * up).to(dtype)
        step = 2**-5 if dtype == torch.bfloat16 else 1e-5
        out = ops.gated_linear(x, ops.pack_gated(w[:40], w[40:]), activation)
        torch.testing.assert_close(out.float(), want.float(), rtol=step, atol=10 * step)


def test_tiles_and_slices(ops: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.kernels.cuda import linear
    from lockstep.kernels.cuda.tuning import Tile

    x, w = randn(40, 600), randn(80, 600, seed=1)
    length = tree.slice_length(600, 2)
    parts = [
        ops.logits(x[:, b : b + length].contiguous(), ops.pack(w[:, b : b + length]))
        for b in range(0, 600, length)
    ]
    monkeypatch.setattr(tree, "k_slices", lambda kind, n, k: 2)
    weight = ops.pack(w)
    for tile in (Tile(16, 32, 64, 4, 2), Tile(32, 64, 128, 4, 2, True)):
        for split in (False, True):
            out = linear.linear(x, weight, tile=tile, split=split)
            torch.testing.assert_close(out, parts[0] + parts[1], rtol=1e-5, atol=1e-4)
    tile = Tile(16, 32, 64, 4, 2)
    split, whole = (linear.linear(x, weight, tile=tile, split=s) for s in (True, False))
    assert same_bits(split, whole)
    pair = ops.pack_gated(w[:40], w[40:])
    split = linear.gated_linear(x, pair, "silu", tile=tile)
    monkeypatch.setattr(linear, "_SPLIT_BELOW", 0)
    assert same_bits(split, linear.gated_linear(x, pair, "silu", tile=tile))
    gates, ups = whole.chunk(2, dim=1)
    torch.testing.assert_close(split, torch.nn.functional.silu(gates) * ups, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gated_pair_unpacks_as_it_came(ops: Backend, dtype: torch.dtype) -> None:
    w = randn(34, 24, dtype=dtype)
    assert same_bits(ops.unpack(ops.pack_gated(w[:17], w[17:])), w)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("size", [64, 96, 576, 1500])
def test_norm_is_its_tree(ops: Backend, size: int, unit_offset: bool, dtype: torch.dtype) -> None:
    x, residual = randn(9, size, dtype=dtype) * 3, randn(9, size, dtype=dtype, seed=1)
    weight = randn(size, dtype=dtype, seed=2)
    want = triton_trees.rms_norm(x, weight, 1e-6, unit_offset)
    check(ops.rms_norm(x, weight, 1e-6, unit_offset), want)
    added = ops.rms_norm(x, weight, 1e-6, unit_offset, residual)
    check(added, (residual.float() + want.float()).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [None, False, True])
def test_rotation_and_cache_writes(ops: Backend, normed: bool | None, dtype: torch.dtype) -> None:
    weights = [randn(64, dtype=dtype, seed=s) for s in (5, 6)]
    norm = None if normed is None else QKNorm(*weights, 1e-6, normed)
    group = Sequences(ops, (40,), dtype=dtype, q_heads=9, kv_heads=3, head_dim=64, norm=norm)
    batch, at = group.batch([(0, 0, 40)]), torch.arange(40).int()
    q = ops.write_kv(group.inputs[0], at, group.rope, group.kv, batch, 9, norm)
    want_q, want_k, want_v = group.inputs[0].view(40, 15, 64).split([9, 3, 3], dim=1)
    if normed is not None:
        want_q = triton_trees.rms_norm(want_q, weights[0], 1e-6, normed)
        want_k = triton_trees.rms_norm(want_k, weights[1], 1e-6, normed)
    cos, sin = group.rope.cos, group.rope.sin
    check(q, exact.rotate(want_q, cos, sin))
    page, token = batch.slots.long() // 16, batch.slots.long() % 16
    check(group.kv.k[page, :, token], exact.rotate(want_k, cos, sin))
    assert same_bits(group.kv.v[page, :, token], want_v.contiguous())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "window"), [((9, 3, 64), None), ((4, 1, 128), 33), ((4, 1, 256), None)]
)
def test_attention(
    ops: Backend, shape: tuple[int, int, int], window: int | None, dtype: torch.dtype
) -> None:
    q_heads, kv_heads, size = shape
    group = Sequences(
        ops, (90, 30), dtype=dtype, window=window,
        q_heads=q_heads, kv_heads=kv_heads, head_dim=size,
    )  # fmt: skip
    out = group.launch((1, 0, 30), (0, 0, 90))[1]
    q, k, v = group.inputs[0].view(90, -1, size).split([q_heads, kv_heads, kv_heads], dim=1)
    q, k = (exact.rotate(t, group.rope.cos[:90], group.rope.sin[:90]) for t in (q, k))
    want = reference.attention64(q, k, v, 0, group.scale, window)
    step = 2.0**-6 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out.double(), want, rtol=step, atol=step)
    parts = torch.cat([group.launch((0, 0, 37))[0], group.launch((1, 29, 30), (0, 37, 90))[1]])
    torch.testing.assert_close(parts.double(), want, rtol=step, atol=step)


def test_the_last_rows_of_runs_attend_alone(ops: Backend) -> None:
    """Runs without rows stand at the launch's begin, middle and end: no row is lost or moved."""
    group = Sequences(
        ops, (18, 34, 1, 20), dtype=torch.float32, window=30, q_heads=2, kv_heads=1, head_dim=16
    )
    for counts in ((0, 1, 0, 0), (0, 33, 0, 20)):
        for expected, found in zip(*group.last_rows(counts), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 530])
def test_segments_split_or_in_sequence(ops: Backend, window: int | None) -> None:
    from lockstep.kernels.cuda.attention import attention

    group = Sequences(
        ops, (1030,), dtype=torch.float32, window=window, q_heads=2, kv_heads=2, head_dim=16
    )
    group.pool.copy_(randn(group.pool.numel(), seed=4))
    batch = group.batch([(0, 1029, 1030)])
    at = torch.tensor([1029], dtype=torch.int32)
    q = ops.write_kv(group.inputs[0][1029:], at, group.rope, group.kv, batch, 2)
    forms = [
        attention(q, group.kv, batch, group.scale, window, split=split) for split in (True, False)
    ]
    assert same_bits(*forms)


def test_segments_read_once_for_several_runs(ops: Backend) -> None:
    """Runs that share pages, with their common segments computed by bunch: the same bits."""
    from lockstep.kernels.cuda.attention import attention

    group = Sequences(
        ops, (600,) * 3, dtype=torch.float32, q_heads=2, kv_heads=1, head_dim=16, page_tokens=64
    )
    group.pool.copy_(randn(group.pool.numel(), seed=4))
    plain = group.batch([(i, 599 - 20 * i, 600 - 20 * i) for i in range(3)])
    plain.page_table[2, :8] = plain.page_table[0, :8]
    q = randn(3, 2, 16, seed=3)
    shared = SharedSegments(
        segments=torch.tensor([1, 0, 1], dtype=torch.int32),
        members=torch.tensor([[0, 2], [-1, -1]], dtype=torch.int32),
        bunch_segments=torch.tensor([1, 0], dtype=torch.int32),
    )
    want = attention(q, group.kv, plain, group.scale, None, split=False)
    together = replace(plain, shared=shared)
    out = attention(q, group.kv, together, group.scale, None, split=True, parts=1)
    assert same_bits(out, want)


def test_sums_and_maxima(ops: Backend) -> None:
    logits = randn(5, 3000) * 4
    logits[1] = -torch.inf
    logits[2, :1500] = -torch.inf
    logits[3, 3] = logits[3, 5] = 50.0
    out = ops.log_sum_exp(logits)
    torch.testing.assert_close(out.double(), logits.double().logsumexp(1), rtol=1e-6, atol=1e-6)
    assert torch.equal(ops.argmax(logits), exact.argmax(logits))


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 50, "top_p": 0.9, "min_p": 0.01}, {"min_p": 1.5}],
)
def test_draws(ops: Backend, options: dict[str, float]) -> None:
    logits = randn(2, 700, seed=4) * 3
    batch = rows_of(2, **options)  # type: ignore[arg-type]
    want = [
        reference.sample(
            logits[row], float(batch.temperature[row]), int(batch.top_k[row]),
            float(batch.top_p[row]), float(batch.min_p[row]), int(batch.seed[row]),
            int(batch.choice[row]), int(batch.position[row]),
        )
        for row in range(2)
    ]  # fmt: skip
    assert ops.sample(logits, batch).tolist() == want


def test_pages(ops: Backend) -> None:
    pool = torch.arange(8 * 300.0)
    want = pool.view(8, 300).clone()
    pairs = [(1, 2), (2, 3), (3, 1), (0, 7)]
    for source, target in pairs:
        want[target] = want[source]
    ops.copy_pages(pool, 300, torch.tensor(pairs))
    assert torch.equal(pool.view(8, 300), want)
    for size, tokens in ((24, 16), (64, 24)):
        with pytest.raises(ConfigError):
            ops.kv_layer(
                pool, page_stride=300, offset=0, kv_heads=1, head_dim=size, page_tokens=tokens
            )
