"""Norms, rotation, cache writes, sampling on the GPU: exact against the spelled-out trees."""

from __future__ import annotations

import pytest
import torch

from lockstep.kernels import exact, reference
from lockstep.kernels.contract import Backend, QKNorm, SampleBatch
from tests.gpu.test_linear import places_that_move
from tests.kernels import triton_trees
from tests.kernels.support import DTYPES, Sequences, randn, same_bits
from tests.kernels.test_sampling import pick, rows_of


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("size", [64, 96, 576, 640, 1024, 4096, 5120])
def test_norm(gpu: Backend, size: int, unit_offset: bool, dtype: torch.dtype) -> None:
    x, residual = randn(300, size, dtype=dtype) * 3, randn(300, size, dtype=dtype, seed=1)
    weight = randn(size, dtype=dtype, seed=2)
    expected = triton_trees.rms_norm(x, weight, 1e-6, unit_offset)
    out = gpu.rms_norm(x.cuda(), weight.cuda(), 1e-6, unit_offset)
    assert same_bits(out.cpu(), expected)
    added = gpu.rms_norm(x.cuda(), weight.cuda(), 1e-6, unit_offset, residual.cuda())
    assert same_bits(added.cpu(), (residual.float() + expected.float()).to(dtype))
    assert not places_that_move(lambda a: gpu.rms_norm(a, weight.cuda(), 1e-6), x.cuda())
    wanted = reference.rms_norm64(x, weight, 1e-6, unit_offset)
    step = 2**-6 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out.cpu().double(), wanted, rtol=step, atol=step)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [None, False, True])
@pytest.mark.parametrize("shape", [(9, 3, 64), (32, 8, 128), (4, 1, 256)])
def test_write_kv(
    gpu: Backend, shape: tuple[int, int, int], normed: bool | None, dtype: torch.dtype
) -> None:
    q_heads, kv_heads, size = shape
    weights = [randn(size, dtype=dtype, seed=s) for s in (5, 6)]
    norm = None if normed is None else QKNorm(*(w.cuda() for w in weights), 1e-6, normed)
    group = Sequences(
        gpu, (70, 33), dtype=dtype, q_heads=q_heads, kv_heads=kv_heads, head_dim=size, norm=norm
    )
    runs = [(1, 0, 33), (0, 0, 70)]
    batch = group.batch(runs)
    qkv = torch.cat([group.inputs[1], group.inputs[0]])
    positions = torch.cat([torch.arange(33), torch.arange(70)]).int()
    q = gpu.write_kv(qkv, positions.cuda(), group.rope, group.kv, batch, q_heads, norm).cpu()
    heads = qkv.cpu().view(103, q_heads + 2 * kv_heads, size)
    want_q, want_k, want_v = heads.split([q_heads, kv_heads, kv_heads], dim=1)
    if normed is not None:
        want_q = triton_trees.rms_norm(want_q, weights[0], 1e-6, normed)
        want_k = triton_trees.rms_norm(want_k, weights[1], 1e-6, normed)
    cos, sin = (t.cpu()[positions.long()] for t in (group.rope.cos, group.rope.sin))
    assert same_bits(q, exact.rotate(want_q, cos, sin))
    slots = batch.slots.cpu().long()
    page, token = slots // 16, slots % 16
    assert same_bits(group.kv.k.cpu()[page, :, token], exact.rotate(want_k, cos, sin))
    assert same_bits(group.kv.v.cpu()[page, :, token], want_v.contiguous())


def test_embedding_and_pages(gpu: Backend) -> None:
    w = randn(500, 640, dtype=torch.bfloat16)
    weight, ids = gpu.pack(w), torch.tensor([3, 499, 0, 3], dtype=torch.int32)
    assert same_bits(gpu.embedding(ids.cuda(), weight).cpu(), w[ids.long()])
    scaled = w[ids.long()] * torch.tensor(25.3, dtype=torch.bfloat16)
    assert same_bits(gpu.embedding(ids.cuda(), weight, 25.3).cpu(), scaled)
    pool = torch.arange(8 * 3000.0, device="cuda")
    expected = pool.cpu().view(8, 3000).clone()
    for source, target in ((1, 2), (2, 3), (3, 1), (0, 7)):
        expected[target] = expected[source]
    gpu.copy_pages(pool, 3000, torch.tensor([[1, 2], [2, 3], [3, 1], [0, 7]]))
    assert torch.equal(pool.cpu().view(8, 3000), expected)


@pytest.mark.parametrize("vocab", [7, 1024, 5000, 49152, 151936])
def test_log_sum_exp_and_argmax(gpu: Backend, vocab: int) -> None:
    logits = randn(300 if vocab < 40000 else 20, vocab) * 4
    logits[1] = -torch.inf
    logits[2, : vocab // 2] = -torch.inf
    logits[3, 3] = logits[3, 5] = 50.0
    x = logits.cuda()
    out = gpu.log_sum_exp(x)
    assert same_bits(out.cpu(), triton_trees.log_sum_exp(logits))
    assert torch.equal(gpu.argmax(x).cpu(), exact.argmax(logits))
    torch.testing.assert_close(
        out.cpu().double(), logits.double().logsumexp(1), rtol=1e-6, atol=1e-6
    )
    assert same_bits(torch.cat([gpu.log_sum_exp(row[None]) for row in x[:20]]), out[:20])


def test_gumbel_bits(gpu: Backend) -> None:
    from lockstep.kernels.cuda.sampling import gumbel_noise

    for seed, choice, position in ((0, 0, 0), (-5, 3, 77), (2**63 - 1, 2**31 - 1, 100_000)):
        expected = reference.gumbel(seed, choice, position, torch.arange(151936))
        assert same_bits(gumbel_noise(151936, seed, choice, position, "cuda").cpu(), expected)


def moved(batch: SampleBatch) -> SampleBatch:
    """The batch on the GPU, with what the host knows of its cuts."""
    tensors = {n: getattr(batch, n) for n in SampleBatch.__slots__ if not n.startswith("cuts")}
    return SampleBatch(
        **{name: tensor.cuda() for name, tensor in tensors.items()},
        cuts_by_count=bool((batch.top_k > 0).any()),
        cuts_by_mass=bool((batch.top_p < 1).any()),
    )


def test_draws_of_many_rows_are_those_of_each(gpu: Backend) -> None:
    """Searches that many programs share, of rows that cut in different ways or not at all."""
    rows, vocab = 300, 151936
    logits = randn(rows, vocab, seed=8).cuda() * 3
    logits[::7] = logits[::7].round()  # equal logits at the edges
    batch = rows_of(rows)
    batch.top_k[::2] = torch.arange(0, rows, 2, dtype=torch.int32) * 13
    batch.top_p[::3] = torch.linspace(0.0, 1.0, 100)
    batch.temperature[::11] = 0.0
    found = gpu.sample(logits, moved(batch)).tolist()
    assert found == gpu.sample(logits, moved(batch)).tolist()
    for row in range(0, rows, 23):
        alone = gpu.sample(logits[row : row + 1].contiguous(), moved(pick(batch, [row])))
        assert alone.tolist() == [found[row]], row
    for row in (6, 12, 77, 144):
        expected = reference.sample(
            logits[row].cpu(), float(batch.temperature[row]), int(batch.top_k[row]),
            float(batch.top_p[row]), float(batch.min_p[row]), int(batch.seed[row]),
            int(batch.choice[row]), int(batch.position[row]),
        )  # fmt: skip
        assert found[row] == expected, row


@pytest.mark.parametrize("vocab", [1, 17, 1500, 49152])
@pytest.mark.parametrize("scale", [0.5, 3.0, 30.0])
def test_draws_equal_the_spelled_out_order(gpu: Backend, vocab: int, scale: float) -> None:
    logits = randn(6, vocab, seed=int(scale * 2)) * scale
    logits[2] = logits[2].round()
    logits[3, ::2] = -torch.inf
    for options in (
        {}, {"top_k": 1}, {"top_k": 5}, {"top_p": 0.7}, {"top_p": 1e-9}, {"min_p": 0.05},
        {"top_k": 50, "top_p": 0.9, "min_p": 0.01}, {"temperature": 0.0}, {"temperature": 1e-4},
        {"temperature": 2.0, "top_k": 1000}, {"min_p": 1.5},
    ):  # fmt: skip
        batch = rows_of(6, **options)
        found = gpu.sample(logits.cuda(), moved(batch)).tolist()
        expected = [
            reference.sample(
                logits[row], float(batch.temperature[row]), int(batch.top_k[row]),
                float(batch.top_p[row]), float(batch.min_p[row]), int(batch.seed[row]),
                int(batch.choice[row]), int(batch.position[row]),
            )
            for row in range(6)
        ]  # fmt: skip
        assert found == expected, options
