"""Find the fastest tile for each weight shape and bucket of rows; bits are checked first.

    python bench/gpu_tune.py [--write] [--only qkv,o] [--rows 16,64]

Candidates compile in parallel processes first (Triton keeps them on disk), then are
timed one after the other in this one. A candidate whose result differs by a bit from
the default tile's is reported and never chosen. `--write` rewrites
lockstep/kernels/cuda/tables.py. Products that are streamed (`stream.py`) have no tile.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.gpu_kernels import HEAD, WEIGHTS, copies_of, graph_of, time_graphs
from lockstep.kernels.cuda import linear as ops
from lockstep.kernels.cuda import make_backend, stream
from lockstep.kernels.cuda.common import multiprocessors
from lockstep.kernels.cuda.tables import TILES
from lockstep.kernels.cuda.tuning import BUCKETS, Tile, default_tile

ALL = {**WEIGHTS, "head": (*HEAD, False)}
# Rows that stand for a bucket.
ROWS = {16: 1, 512: 512, BUCKETS[-1]: 4096}
SHARED_BYTES = 227 << 10


def candidates(limit: int, gated: bool) -> Iterator[Tile]:
    """Tiles worth trying for a bucket, within the shared memory of a multiprocessor."""
    grid: list[tuple[int, int, int, int, int, bool]] = []

    def add(*axes: tuple[object, ...]) -> None:
        grid.extend(itertools.product(*axes))  # type: ignore[arg-type]

    if limit <= 16:
        add((16,), (16, 32, 64), (128, 256), (4,), (4, 6), (False,))
        add((16,), (16, 32, 64), (128, 256), (4,), (4,), (True,))
        add((16,), (16, 32), (256, 512), (4, 8), (3,), (False, True))
    else:
        add((128,), (128, 256), (64,), (8,), (3, 4), (True,))
    for m, n, k, warps, stages, bulk in grid:
        both = 2 if gated else 1
        fits = (m + both * n) * k * 2 * (stages - 1) <= SHARED_BYTES - 16384
        if fits and m * n * both <= 128 * 256:
            yield Tile(m, n, k, warps, stages, bulk)


def streamed(name: str, rows: int) -> bool:
    n, k, gated = ALL[name]
    programs = multiprocessors(torch.device("cuda"))
    return stream.choose(rows, 2 * n if gated else n, k, programs) is not None


def run(name: str, x: torch.Tensor, weight: object, tile: Tile | None) -> torch.Tensor:
    if ALL[name][2]:
        return ops.gated_linear(x, weight, "silu", tile=tile)  # type: ignore[arg-type]
    if name == "head":
        return ops.logits(x, weight, tile=tile)  # type: ignore[arg-type]
    return ops.linear(x, weight, tile=tile)  # type: ignore[arg-type]


def packed(name: str, seed: int) -> object:
    n, k, gated = ALL[name]
    torch.manual_seed(seed)
    backend = make_backend("cuda")
    stored = 2 * n if gated else n
    w = torch.randn(stored, k, device="cuda").bfloat16() / 64
    return backend.pack_gated(w[:n], w[n:]) if gated else backend.pack(w)


def precompile(jobs: list[tuple[str, int, Tile]]) -> None:
    weights: dict[str, object] = {}
    for name, rows, tile in jobs:
        if name not in weights:
            weights.clear()
            weights[name] = packed(name, 0)
        x = torch.zeros(rows, ALL[name][1], device="cuda", dtype=torch.bfloat16)
        try:
            run(name, x, weights[name], tile)
            torch.cuda.synchronize()
        except Exception as error:
            print("does not run:", name, tile, repr(error)[:120])


def best(name: str, limit: int) -> tuple[Tile, float, float]:
    """The fastest tile, its microseconds and cuBLAS's."""
    n, k, gated = ALL[name]
    rows = ROWS[limit]
    stored = 2 * n if gated else n
    copies = min(16, copies_of(2 * stored * k))
    weights = [packed(name, seed) for seed in range(copies)]
    x = torch.randn(rows, k, device="cuda").bfloat16()
    default = default_tile(limit, n, torch.bfloat16, gated)
    expected = run(name, x, weights[0], default)
    theirs = graph_of([lambda w=w: torch.mm(x, w.data.T) for w in weights])  # type: ignore[attr-defined]
    (cublas,) = time_graphs([theirs], copies, 5)
    found = (default, float("inf"))
    for tile in {default: None, **dict.fromkeys(candidates(limit, gated))}:
        try:
            if not torch.equal(run(name, x, weights[0], tile), expected):
                print("OTHER BITS", name, limit, tile)
                continue
            (spent,) = time_graphs(
                [graph_of([lambda w=w, t=tile: run(name, x, w, t) for w in weights])], copies, 3
            )
        except Exception as error:
            print("does not run:", name, tile, repr(error)[:120])
            continue
        print(f"  {name} {limit} {tile} {spent:.1f}")
        if spent < found[1]:
            found = (tile, spent)
    return found[0], found[1], cublas


def write(table: dict[tuple[int, int, bool], dict[int, tuple[object, ...]]]) -> None:
    target = Path(ops.__file__).with_name("tables.py")
    head = target.read_text().split("TILES:")[0]
    kind = "dict[tuple[int, int, bool], dict[int, tuple[int, int, int, int, int, bool, int]]]"
    lines = [f"{head}TILES: {kind} = {{"]
    for shape, rows in sorted(table.items()):
        lines.append(f"    {shape}: {{")
        lines += [f"        {limit}: {tile}," for limit, tile in sorted(rows.items())]
        lines.append("    },")
    target.write_text("\n".join([*lines, "}", ""]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", default=",".join(ALL))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--workers", type=int, default=12)
    given = parser.parse_args()
    names = given.only.split(",")
    limits = [int(limit) for limit in given.rows.split(",")]
    pairs = [
        (name, limit)
        for name in names
        for limit in limits
        if not streamed(name, ROWS[limit]) and (name != "head" or limit <= 256)
    ]
    jobs = [
        (name, ROWS[limit], tile)
        for name, limit in pairs
        for tile in candidates(limit, ALL[name][2])
    ]
    print(len(jobs), "candidates")
    with multiprocessing.get_context("spawn").Pool(given.workers) as pool:
        pool.map(precompile, [jobs[i :: given.workers] for i in range(given.workers)])
    table = {shape: dict(rows) for shape, rows in TILES.items()}
    lines = []
    for name, limit in pairs:
        tile, spent, cublas = best(name, limit)
        table.setdefault(ALL[name], {})[limit] = astuple(tile)  # type: ignore[arg-type]
        lines.append(
            f"{name:8s} M<={limit:<11d} {spent:8.1f} us  cuBLAS {cublas:8.1f}"
            f"  {spent / cublas:5.2f}  {tile}"
        )
        if given.write:
            write(table)  # type: ignore[arg-type]
    print("\n".join(lines))


if __name__ == "__main__":
    with torch.no_grad():
        main()
