"""The engine on one H200, each figure beside its physical limit: random weights, real scheduler.

    python -m bench.gpu_engine [--decode] [--prefill] [--shared] [--closed] [--price] [--no-graphs]
    python -m bench.gpu_engine --idle-branch 20-24-suffix

Without a choice of items all are run. `--idle-branch` times decode steps with such a branch
loaded and never asked, in turn with steps of an engine that has none: the model's cache groups
are cut where the branch stops, so a step has more page tables. Times are of `Engine.step`, plans
and sampling included. `idle` is the share of a decode step in which the device waits for the host.
"""

from __future__ import annotations

import argparse
import gc
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.branch_package import BASE, write_random_branch
from bench.limits import H200
from bench.random_model import random_model
from bench.shapes import SHAPES
from lockstep.branch import read_branch
from lockstep.config import CacheConfig, SchedulerConfig
from lockstep.engine.loop import Engine
from lockstep.kernels.contract import Activation, Backend, Weight
from lockstep.kernels.cuda import make_backend
from lockstep.kernels.plain import PlainBackend
from lockstep.runner.runner import Identity, Runner
from lockstep.types import Request, SamplingParams

BANDWIDTH, FLOPS = H200.read_bytes, H200.flops
IDLE_POOL = 24 << 30  # bytes of each of the two pools beside an idle branch


def with_cublas(backend: Backend) -> Backend:
    """The same backend with its products computed by cuBLAS: what the fixed trees cost."""
    plain = PlainBackend(backend.device)

    class Swapped(type(backend)):  # type: ignore[misc]
        name = "triton, cuBLAS products"

        def linear(
            self, x: Tensor, weight: Weight, bias: Tensor | None = None,
            residual: Tensor | None = None,
        ) -> Tensor:  # fmt: skip
            return plain.linear(x, weight, bias, residual)

        def logits(self, x: Tensor, weight: Weight) -> Tensor:
            return plain.logits(x, weight)

        def gated_linear(self, x: Tensor, weight: Weight, activation: Activation) -> Tensor:
            return plain.gated_linear(x, weight, activation)

    return Swapped(backend.device)


def kernels_of(engine: Engine, steps: int) -> dict[str, tuple[float, float]]:
    """Launches and microseconds a step by kernel, from the profiler.

    A launch may begin before the one ahead of it has ended: its time counts from that end.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    found: dict[str, tuple[float, float]] = {}
    ended = 0.0
    for event in sorted(trace.events(), key=lambda e: e.time_range.end):
        if event.device_type != DeviceType.CUDA:
            continue
        span = event.time_range
        took = span.end - max(span.start, ended)
        ended = span.end
        launches, total = found.get(event.name, (0.0, 0.0))
        found[event.name] = (launches + 1 / steps, total + took / steps)
    return found


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes and operations of a model's steps, and the least time that they take."""

    weight_bytes: int
    kv_bytes: int  # a token
    flops_token: float
    flops_context: float  # a token, for every token of its context

    @staticmethod
    def of(runner: Runner) -> Work:
        model = runner.model
        matrices = model.weight_bytes - model.embed_tokens.weight.data.numel() * 2
        heads = sum(len(g.layers) for g in model.groups) * model.q_heads * model.head_dim
        kv = sum(4 * len(g.layers) * g.kv_heads * g.head_dim for g in model.groups)
        return Work(matrices, kv, float(matrices), 4.0 * heads)

    def decode(self, batch: int, context: float) -> float:
        """Seconds of one step: products, then attention, each at its own bound."""
        products = max(self.weight_bytes / BANDWIDTH, batch * self.flops_token / FLOPS)
        return products + batch * context * self.kv_bytes / BANDWIDTH

    def prefill(self, sequences: int, length: int) -> float:
        tokens = sequences * length
        return (tokens * self.flops_token + tokens * length / 2 * self.flops_context) / FLOPS


class Bench:
    """One runner; an engine a measurement."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.work = Work.of(runner)
        self.source = random.Random(1)

    def engine(self, *, keep: bool = False) -> Engine:
        return Engine(
            self.runner, SchedulerConfig(), CacheConfig(prefix_caching=keep), self.runner.info()
        )

    def ids(self, count: int) -> tuple[int, ...]:
        return tuple(self.source.randrange(self.runner.vocab_size) for _ in range(count))

    def submit(self, engine: Engine, prompts: list[tuple[int, ...]], output: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            engine.submit(Request(f"r{index}", prompt, params))

    def drain(self, engine: Engine) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        while engine.has_work():
            for out in engine.step():
                assert not out.error, out.error
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    def decoding(self, batch: int, context: int) -> Engine:
        """An engine that decodes `batch` sequences, its graphs captured."""
        engine = self.engine()
        self.submit(engine, [self.ids(context) for _ in range(batch)], 4 * context)
        full = 0
        while full < 4:  # prompts, then some steps that capture
            full += len(engine.step()) == batch
        return engine

    def stop(self, engine: Engine) -> None:
        """Let go of all that the engine still has to do."""
        for name in list(engine._scheduler.requests):
            engine.cancel(name)
        self.drain(engine)

    def decode(self, batch: int, context: int, steps: int, more: str = "") -> None:
        """Median wall time of a decode step, and of what the device did in it."""
        engine = self.decoding(batch, context)
        walls = []
        for _ in range(steps):
            begin = time.perf_counter()
            engine.step()
            walls.append(time.perf_counter() - begin)
        wall = median(walls)
        floor = self.work.decode(batch, context + steps / 2)
        device = self.device_time(engine)
        self.stop(engine)
        self.show(
            f"decode step, batch {batch}, context {context}{more}", wall, floor,
            f"{batch / wall:9.0f} tok/s  device {device * 1e3:6.2f} ms, "
            f"idle {1 - device / wall:5.1%}",
        )  # fmt: skip

    def device_time(self, engine: Engine) -> float:
        """Seconds of a decode step in which a kernel runs, from the profiler."""
        return sum(took for _, took in kernels_of(engine, 3).values()) / 1e6

    def prefill(self, sequences: int, length: int) -> None:
        took = []
        for _ in range(3):
            engine = self.engine()
            self.submit(engine, [self.ids(length) for _ in range(sequences)], 1)
            took.append(self.drain(engine))
        self.show(
            f"prefill {sequences} x {length}", min(took), self.work.prefill(sequences, length)
        )

    def closed(self, count: int, length: int, output: int) -> float:
        engine = self.engine()
        self.submit(engine, [self.ids(length) for _ in range(count)], output)
        took = self.drain(engine)
        floor = self.work.prefill(count, length)
        floor += sum(self.work.decode(count, length + i) for i in range(1, output))
        rate = f"{count * output / took:9.0f} tok/s"
        self.show(f"closed batch {count} x {length} in x {output} out", took, floor, rate)
        return took

    def shared(self, count: int, common: int, own: int, output: int) -> None:
        for output_now in (4, output):  # the first run captures what the second replays
            engine = self.engine(keep=True)
            prefix = self.ids(common)
            self.submit(engine, [prefix + self.ids(own) for _ in range(count)], output_now)
            took = self.drain(engine)
        floor = self.work.prefill(1, common) + self.work.prefill(count, own)
        floor += sum(self.work.decode(count, common + own + i) for i in range(1, output))
        self.show(f"shared prefix {count} x ({common} common + {own}), {output} out", took, floor)

    @staticmethod
    def show(name: str, took: float, floor: float, more: str = "") -> None:
        print(
            f"{name:<52}{took * 1e3:>11.2f} ms  limit {floor * 1e3:>10.2f} ms "
            f"{floor / took:>6.1%}  {more}",
            flush=True,
        )


def idle_branch(name: str, shape: str, batches: Sequence[int], page_tokens: int) -> None:
    """Decode steps without a branch and beside an idle one, in turn."""
    backend = make_backend("cuda")
    model = random_model(SHAPES[shape], backend)
    with tempfile.TemporaryDirectory() as folder:
        path = write_random_branch(name, shape, Path(folder) / "judge")
        benches = []
        for branches in ((), (read_branch(path),)):
            runner = Runner(
                model, backend, page_tokens=page_tokens, memory_bytes=IDLE_POOL, step_tokens=8192,
                max_sequences=max(batches), identity=Identity(shape, BASE), branches=branches,
            )  # fmt: skip
            for _ in branches:
                runner.load_branch(path)
            runner.warm_up()
            benches.append(Bench(runner))
    for batch in batches:
        for more, bench in list(zip(("", f", {name} idle"), benches, strict=True)) * 2:
            bench.decode(batch, 1024, 40, more)


def main() -> None:
    """Parse the choice of items, build the model, print one line an item."""
    parser = argparse.ArgumentParser(description=__doc__)
    items = ("decode", "prefill", "shared", "closed", "price")
    for item in items:
        parser.add_argument(f"--{item}", action="store_true")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--idle-branch", default="", metavar="FORK-EXIT-ADAPT")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 128, 256])
    parser.add_argument("--page-tokens", type=int, default=64)
    parser.add_argument("--output", type=int, default=1024, help="tokens out of the closed batch")
    options = parser.parse_args()
    if options.idle_branch:
        idle_branch(options.idle_branch, options.shape, options.batches, options.page_tokens)
        return
    chosen = [item for item in items if getattr(options, item)] or list(items)

    def runner(backend: Backend) -> Runner:
        begin = time.perf_counter()
        model = random_model(SHAPES[options.shape], backend)
        torch.cuda.synchronize()
        made = time.perf_counter()
        built = Runner(
            model, backend, page_tokens=options.page_tokens, step_tokens=8192,
            max_sequences=256, graphs=not options.no_graphs,
        )  # fmt: skip
        sized = time.perf_counter()
        built.warm_up()
        print(
            f"{backend.name}: weights {made - begin:.1f} s, largest steps and pool "
            f"{sized - made:.1f} s, graphs {time.perf_counter() - sized:.1f} s; pool "
            f"{built.pool_bytes / 2**30:.1f} GiB, "
            f"free {torch.cuda.mem_get_info()[0] / 2**30:.1f} GiB",
            flush=True,
        )
        return built

    bench = Bench(runner(make_backend("cuda")))
    if "decode" in chosen:
        for batch in options.batches:
            bench.decode(batch, 1024, 20)
    if "prefill" in chosen:
        bench.prefill(8, 4000)
    if "shared" in chosen:
        bench.shared(256, 2048, 128, 128)
    ours = 0.0
    if "closed" in chosen or "price" in chosen:
        ours = bench.closed(256, 1024, options.output)
    if "price" in chosen:
        # The first pool takes what the device has: nothing may hold it when the second is made.
        # Modules and graphs refer to each other in cycles, so dropping the name does not do.
        del bench
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        other = Bench(runner(with_cublas(make_backend("cuda"))))
        theirs = other.closed(256, 1024, options.output)
        print(f"price of the promise on the closed batch: {ours / theirs - 1:+.1%}")


if __name__ == "__main__":
    main()
