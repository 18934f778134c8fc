"""How near the CPU kernels come to this machine's limits, torch's own operations beside them.

    python -m bench.kernels_cpu [--threads N] [--dtype bfloat16|float32]

SmolLM2-135M's shapes. Weights and caches are walked through until they exceed the last-level
cache, so small batches read memory as a model does. Lockstep and torch take turns within each
row; a time is the first decile of the turns. The limit of a row is the larger of its bytes over
the measured read bandwidth and its operations over torch's own 2048-cubed matmul rate (a rate
that Lockstep may beat).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from bench.limits import Limits, measure
from lockstep.kernels import cpu
from lockstep.kernels.contract import AttentionBatch, Backend, KVLayer, SampleBatch

SHAPES = {
    "qkv 960x576": (960, 576),
    "o 576x576": (576, 576),
    "gate+up 3072x576": (3072, 576),
    "down 576x1536": (576, 1536),
    "head 49152x576": (49_152, 576),
}
WALK_BYTES = 100_000_000
VOCAB = 49_152


@dataclass
class Row:
    """One line of the table: seconds of Lockstep and torch, work done."""

    name: str
    rows: int
    ours: float
    torch: float
    flops: float
    bytes: float


def interleave(*works: Callable[[], object], seconds: float = 0.5) -> list[float]:
    """First decile of each work's time, the works taking turns for `seconds` in all."""
    times: list[list[float]] = [[] for _ in works]
    for work in works:
        work()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 5:
        for work, record in zip(works, times, strict=True):
            start = time.perf_counter()
            work()
            record.append(time.perf_counter() - start)
    return [statistics.quantiles(record, n=10)[0] for record in times]


def products(ops: Backend, dtype: torch.dtype) -> list[Row]:
    out = []
    for name, (n, k) in SHAPES.items():
        size = n * k * dtype.itemsize
        copies = max(1, WALK_BYTES // size)
        plain = [torch.randn(n, k).to(dtype) for _ in range(min(copies, 30))]
        packed = itertools.cycle([ops.pack(weight) for weight in plain])
        weights = itertools.cycle(plain)
        for rows in (1, 4, 16, 64, 512):
            if n == VOCAB and rows > 64:
                continue
            x = torch.randn(rows, k).to(dtype)
            ours, theirs = interleave(
                lambda x=x, w=packed: ops.linear(x, next(w)),
                lambda x=x, w=weights: functional.linear(x, next(w)),
            )
            out.append(Row(name, rows, ours, theirs, 2.0 * rows * n * k, size))
    return out


def attention_case(
    ops: Backend, dtype: torch.dtype, runs: int, query: int, context: int
) -> tuple[torch.Tensor, KVLayer, AttentionBatch]:
    """`runs` sequences of `context` positions, the last `query` of which attend."""
    tokens, heads, head_dim = 16, 3, 64
    pages = -(-context // tokens)
    stride = 2 * heads * tokens * head_dim
    pool = torch.randn(runs * pages * stride).to(dtype)
    kv = ops.kv_layer(
        pool, page_stride=stride, offset=0, kv_heads=heads, head_dim=head_dim, page_tokens=tokens
    )
    batch = AttentionBatch(
        query_start=torch.arange(runs + 1, dtype=torch.int32) * query,
        context_len=torch.full((runs,), context, dtype=torch.int32),
        page_table=torch.randperm(runs * pages).int().view(runs, pages),
        slots=torch.zeros(runs * query, dtype=torch.int32),
        max_query=query,
        max_context=context,
    )
    return torch.randn(runs * query, 9, head_dim).to(dtype), kv, batch


def attentions(ops: Backend, dtype: torch.dtype) -> list[Row]:
    out = []
    for runs, query, context in ((1, 512, 512), (1, 1, 2000), (16, 1, 1000), (64, 1, 200)):
        q, kv, batch = attention_case(ops, dtype, runs, query, context)
        keys = torch.randn(runs, 3, context, 64).to(dtype)
        queries = q.view(runs, query, 9, 64).transpose(1, 2)
        ours, theirs = interleave(
            lambda q=q, kv=kv, batch=batch: ops.attention(q, kv, batch, 0.125),
            lambda q=queries, k=keys, causal=query > 1: functional.scaled_dot_product_attention(
                q, k, k, is_causal=causal, enable_gqa=True
            ),
        )
        pairs = query * (2 * context - query + 1) / 2
        out.append(
            Row(
                f"attention {runs}x{context}",
                runs * query,
                ours,
                theirs,
                runs * pairs * 9 * 64 * 4,
                runs * context * 2 * 3 * 64 * dtype.itemsize,
            )
        )
    return out


def small_operations(ops: Backend, dtype: torch.dtype) -> list[Row]:
    out = []
    weight = torch.randn(576).to(dtype)
    for rows in (1, 64, 512):
        x = torch.randn(rows, 576).to(dtype)
        ours, theirs = interleave(
            lambda x=x: ops.rms_norm(x, weight, 1e-5),
            lambda x=x: functional.rms_norm(x, (576,), weight, 1e-5),
        )
        out.append(Row("rms_norm 576", rows, ours, theirs, 0, 2.0 * x.numel() * dtype.itemsize))
    for rows in (1, 64):
        logits = torch.randn(rows, VOCAB) * 2.5
        size = 4.0 * logits.numel()
        ours, theirs = interleave(lambda x=logits: ops.argmax(x), lambda x=logits: x.argmax(-1))
        out.append(Row("argmax", rows, ours, theirs, 0, size))
        ours, theirs = interleave(
            lambda x=logits: ops.log_sum_exp(x), lambda x=logits: x.logsumexp(-1)
        )
        out.append(Row("log_sum_exp", rows, ours, theirs, 0, size))
        for name, top_k, top_p in (
            ("sample", 0, 1.0),
            ("sample top_k 50", 50, 1.0),
            ("sample top_p .9", 0, 0.9),
        ):
            index = torch.arange(rows)
            batch = SampleBatch(
                temperature=torch.ones(rows),
                top_k=torch.full((rows,), top_k, dtype=torch.int32),
                top_p=torch.full((rows,), top_p),
                min_p=torch.zeros(rows),
                seed=index,
                choice=index.int(),
                position=index.int(),
            )
            ours, theirs = interleave(
                lambda x=logits, batch=batch: ops.sample(x, batch),
                lambda x=logits: torch.multinomial(torch.softmax(x, -1), 1),
            )
            out.append(Row(name, rows, ours, theirs, 0, size))
    return out


def show(rows: list[Row], limits: Limits) -> None:
    print(
        f"{'operation':20} {'rows':>5} {'us':>9} {'torch us':>9} {'ratio':>6} "
        f"{'GFLOP/s':>8} {'GB/s':>6} {'limit us':>9} {'share':>6}"
    )
    for row in rows:
        limit = max(row.bytes / limits.read_bytes, row.flops / limits.flops)
        print(
            f"{row.name:20} {row.rows:5} {row.ours * 1e6:9.1f} {row.torch * 1e6:9.1f} "
            f"{row.torch / row.ours:6.2f} {row.flops / row.ours / 1e9:8.1f} "
            f"{row.bytes / row.ours / 1e9:6.1f} {limit * 1e6:9.1f} {limit / row.ours:6.0%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=0, help="0: every core")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    threads = arguments.threads or cpu.usable_threads()
    limits = measure(threads, arguments.dtype)
    torch.set_num_threads(threads)
    ops = cpu.make_backend("native", threads)
    print(
        f"{threads} threads, {arguments.dtype}, {ops.describe()['isa']}; reads "
        f"{limits.read_bytes / 1e9:.1f} GB/s, torch 2048^3 {limits.flops / 1e9:.0f} GFLOP/s"
    )
    show([*products(ops, dtype), *attentions(ops, dtype), *small_operations(ops, dtype)], limits)


if __name__ == "__main__":
    main()
