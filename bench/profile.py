"""Splits decode steps or prefill of the real engine into kernels: count, time and share a step.

    python -m bench.profile [--batch 1 64] [--context 1024] [--length 4000] [--shape qwen3-8b]

One table a batch, and one for the prefill of a prompt of --length tokens. Beside each stands
the least time of the whole step, from bytes and operations (`gpu_engine.Work`).
"""

from __future__ import annotations

import argparse

import torch

from bench.gpu_engine import Bench, kernels_of
from bench.random_model import random_model
from bench.shapes import SHAPES
from lockstep.engine.loop import Engine
from lockstep.kernels.cuda import make_backend
from lockstep.runner.runner import Runner

STEPS = 5


def table(bench: Bench, engine: Engine, steps: int, floor: float) -> None:
    """Profile `steps` steps and print their kernels, the costliest first."""
    torch.cuda.synchronize()
    kernels = kernels_of(engine, steps)
    bench.stop(engine)
    total = sum(took for _, took in kernels.values())
    print(f"{'kernel':<60}{'calls':>8}{'us':>10}{'share':>8}")
    for name, (calls, took) in sorted(kernels.items(), key=lambda item: -item[1][1]):
        print(f"{name[:58]:<60}{calls:>8.0f}{took:>10.1f}{took / total:>8.1%}")
    print(
        f"device time {total / 1e3:.2f} ms, limit {floor * 1e3:.2f} ms ({floor * 1e6 / total:.1%})",
        flush=True,
    )


def main() -> None:
    """Parse the choice of steps, build the model, print one table a choice."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="*", default=[64])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--length", type=int, default=0)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    options = parser.parse_args()
    backend = make_backend("cuda")
    runner = Runner(
        random_model(SHAPES[options.shape], backend),
        backend,
        page_tokens=64,
        step_tokens=8192,
        max_sequences=256,
    )
    bench = Bench(runner)
    for batch in options.batch:
        print(f"decode, batch {batch}, context {options.context}")
        engine = bench.decoding(batch, options.context)
        table(bench, engine, STEPS, bench.work.decode(batch, options.context))
    if options.length:
        print(f"prefill of {options.length}")
        engine = bench.engine()
        for _ in range(2):  # the first compiles
            bench.drain(engine)
            bench.submit(engine, [bench.ids(options.length)], 1)
        table(bench, engine, 1, bench.work.prefill(1, options.length))


if __name__ == "__main__":
    main()
