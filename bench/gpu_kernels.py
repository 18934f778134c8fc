"""Time every kernel of a Qwen3-8B step on one GPU against cuBLAS and the physical limit.

    python bench/gpu_kernels.py

Each figure is the median of CUDA-graph replays, ours and cuBLAS's in turn; weights and
inputs rotate through copies larger than the L2, so that every launch finds them cold.
Limits: bytes at 4.3 TB/s and bf16 products at 790 TFLOP/s (both measured on an H200).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lockstep.kernels.contract import AttentionBatch, QKNorm, RopeTable, SampleBatch
from lockstep.kernels.cuda import make_backend

BYTES_A_SECOND, FLOPS_A_SECOND = 4.3e12, 790e12
COLD_BYTES = 300 << 20
# name -> (output columns, K, gated); the head stands apart.
WEIGHTS = {
    "qkv": (6144, 4096, False),
    "o": (4096, 4096, False),
    "gate_up": (12288, 4096, True),
    "down": (4096, 12288, False),
}
HEAD = (151936, 4096)
ROWS = (1, 8, 64, 256, 2048, 8192)


def graph_of(calls: list[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """A graph of the calls in order, captured after one eager pass."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def time_graphs(graphs: list[torch.cuda.CUDAGraph], calls: int, repeats: int = 9) -> list[float]:
    """Median microseconds a call of each graph, replayed in turn."""
    samples: list[list[float]] = [[] for _ in graphs]
    for graph in graphs:
        graph.replay()
    for _ in range(repeats):
        for index, graph in enumerate(graphs):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples[index].append(start.elapsed_time(end) * 1e3 / calls)
    return [statistics.median(s) for s in samples]


def copies_of(nbytes: int) -> int:
    return max(2, min(64, -(-COLD_BYTES // nbytes)))


def product_row(name: str, rows: int) -> str:
    """One line: ours, cuBLAS's and the limit, in microseconds."""
    ops = make_backend("cuda")
    n, k, gated = (*HEAD, False) if name == "head" else WEIGHTS[name]
    stored = 2 * n if gated else n
    copies = copies_of(2 * stored * k)
    weights = [torch.randn(stored, k, device="cuda").bfloat16() / 64 for _ in range(copies)]
    xs = [torch.randn(rows, k, device="cuda").bfloat16() for _ in range(copies)]
    residual = torch.randn(rows, n, device="cuda").bfloat16()
    if gated:
        packed = [ops.pack_gated(w[:n], w[n:]) for w in weights]
        ours = [
            lambda x=x, w=w: ops.gated_linear(x, w, "silu") for x, w in zip(xs, packed, strict=True)
        ]
    else:
        packed = [ops.pack(w) for w in weights]
        if name == "head":
            ours = [lambda x=x, w=w: ops.logits(x, w) for x, w in zip(xs, packed, strict=True)]
        elif name == "qkv":
            ours = [lambda x=x, w=w: ops.linear(x, w) for x, w in zip(xs, packed, strict=True)]
        else:
            ours = [
                lambda x=x, w=w: ops.linear(x, w, None, residual)
                for x, w in zip(xs, packed, strict=True)
            ]
    theirs = [lambda x=x, w=w: torch.mm(x, w.T) for x, w in zip(xs, weights, strict=True)]
    mine, cublas = time_graphs([graph_of(ours), graph_of(theirs)], copies)
    moved = 2 * (stored * k + rows * k + rows * n)
    limit = 1e6 * max(moved / BYTES_A_SECOND, 2.0 * rows * stored * k / FLOPS_A_SECOND)
    return (
        f"{name:8s} M={rows:<5d} ours {mine:9.1f}  cuBLAS {cublas:9.1f}  limit {limit:9.1f} us"
        f"   ours/cuBLAS {mine / cublas:5.2f}   share of limit {limit / mine:5.2f}"
    )


def batch_of(contexts: list[int], queries: list[int], pages_each: int) -> AttentionBatch:
    starts = torch.tensor([0, *queries]).cumsum(0).int().cuda()
    count = len(contexts)
    pages = torch.randperm(count * pages_each).view(count, pages_each).int()
    slots = [
        int(pages[b, p // 16]) * 16 + p % 16
        for b, (c, n) in enumerate(zip(contexts, queries, strict=True))
        for p in range(c - n, c)
    ]
    return AttentionBatch(
        query_start=starts,
        context_len=torch.tensor(contexts).int().cuda(),
        page_table=pages.cuda(),
        slots=torch.tensor(slots).int().cuda(),
        max_query=max(queries),
        max_context=max(contexts),
    )


def attention_row(name: str, count: int, context: int, query: int) -> str:
    ops = make_backend("cuda")
    pages_each = -(-context // 16)
    stride = 2 * 8 * 16 * 128
    layers = max(1, min(8, copies_of(count * context * 4096)))
    pools = [
        torch.randn(count * pages_each * stride, device="cuda").bfloat16() for _ in range(layers)
    ]
    kvs = [
        ops.kv_layer(p, page_stride=stride, offset=0, kv_heads=8, head_dim=128, page_tokens=16)
        for p in pools
    ]
    batch = batch_of([context] * count, [query] * count, pages_each)
    q = torch.randn(count * query, 32, 128, device="cuda").bfloat16()
    calls = [lambda kv=kv: ops.attention(q, kv, batch, 128**-0.5) for kv in kvs]
    (mine,) = time_graphs([graph_of(calls)], layers)
    moved = count * context * 4096 + 2 * 2 * q.numel()
    visible = sum(range(context - query + 1, context + 1))
    flops = 4.0 * count * visible * 32 * 128
    limit = 1e6 * max(moved / BYTES_A_SECOND, flops / FLOPS_A_SECOND)
    return f"{name:30s} {mine:9.1f} us   limit {limit:9.1f}   share {limit / mine:5.2f}"


def row_lines(rows: int) -> list[str]:
    """Norm and cache write of `rows` rows."""
    ops = make_backend("cuda")
    x = torch.randn(rows, 4096, device="cuda").bfloat16()
    w = torch.randn(4096, device="cuda").bfloat16()
    qkv = torch.randn(rows, 6144, device="cuda").bfloat16()
    table = RopeTable(*(torch.randn(40960, 64, device="cuda") for _ in range(2)))
    norm = QKNorm(w[:128], w[:128], 1e-6)
    batch = batch_of([rows], [rows], -(-rows // 16))
    pool = torch.zeros(-(-rows // 16) * 32768, device="cuda", dtype=torch.bfloat16)
    kv = ops.kv_layer(pool, page_stride=32768, offset=0, kv_heads=8, head_dim=128, page_tokens=16)
    at = torch.arange(rows).int().cuda()
    lines = []
    for name, moved, call in (
        ("rms_norm", 4 * x.numel(), lambda: ops.rms_norm(x, w, 1e-6)),
        ("write_kv", 4 * qkv.numel(), lambda: ops.write_kv(qkv, at, table, kv, batch, 32, norm)),
    ):
        (mine,) = time_graphs([graph_of([call] * 20)], 20)
        limit = 1e6 * moved / BYTES_A_SECOND
        lines.append(f"{name:10s} R={rows:<5d} {mine:8.1f} us   limit {limit:8.1f}")
    return lines


def sampling_params(rows: int, top_k: int, top_p: float) -> SampleBatch:
    return SampleBatch(
        temperature=torch.ones(rows, device="cuda"),
        top_k=torch.full((rows,), top_k, device="cuda", dtype=torch.int32),
        top_p=torch.full((rows,), top_p, device="cuda"),
        min_p=torch.zeros(rows, device="cuda"),
        seed=torch.arange(rows, device="cuda"),
        choice=torch.zeros(rows, device="cuda", dtype=torch.int32),
        position=torch.zeros(rows, device="cuda", dtype=torch.int32),
    )


def sampling_lines(rows: int) -> list[str]:
    """What turns `rows` rows of logits into ids."""
    ops = make_backend("cuda")
    logits = torch.randn(rows, HEAD[0], device="cuda") * 3
    plain, cut = sampling_params(rows, 0, 1.0), sampling_params(rows, 50, 0.9)
    calls: dict[str, Callable[[], Tensor]] = {
        "argmax": lambda: ops.argmax(logits),
        "log_sum_exp": lambda: ops.log_sum_exp(logits),
        "sample": lambda: ops.sample(logits, plain),
        "sample k50 p0.9": lambda: ops.sample(logits, cut),
    }
    lines = []
    for name, call in calls.items():
        (mine,) = time_graphs([graph_of([call] * 4)], 4)
        lines.append(f"{name:16s} R={rows:<4d} {mine:9.1f} us")
    return lines


def main() -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        print("products, Qwen3-8B, bf16 (ours with its epilogue, cuBLAS without)")
        for name in (*WEIGHTS, "head"):
            for rows in ROWS[:4] if name == "head" else ROWS:
                print(product_row(name, rows))
        print("attention, 32 query and 8 KV heads of 128")
        for count in (1, 8, 64, 256):
            print(attention_row(f"decode {count} x 1024", count, 1024, 1))
        print(attention_row("decode 1 x 8192", 1, 8192, 1))
        print(attention_row("prefill 8 x 1024", 8, 1024, 1024))
        print(attention_row("prefill 2 x 4000", 2, 4000, 4000))
        print(attention_row("chunk 512 at 4096", 1, 4096, 512))
        print("rows")
        for rows in (1, 64, 256, 8192):
            print("\n".join(row_lines(rows)))
        for rows in (1, 64, 256):
            print("\n".join(sampling_lines(rows)))


if __name__ == "__main__":
    main()
