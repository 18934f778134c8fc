"""Judge and writer in one engine, against two engines on one card: random weights of an 8B shape.

    python -m bench.gpu_branches [--contexts 64] [--length 4096] [--new 64] [--branches ...]

Every context is decided about, and half of them answered. The ways, each on cold caches:

- gated: one engine with the branch; one request decides and, if the gate opens, writes.
- two engines, full judge: one process decides at the model's full depth, another writes; each
  has its own weights and its own prefix cache, both run on the same GPU at the same time.
- two engines, early exit: as before, but the judge's rows leave at the branch's exit.
- one engine, two prefills: the decision and the answer are two requests and share nothing.

All run the same kernels, so what differs is the work. Decisions and answers of the gated way
and of two processes must be equal to the bit. Figures beside them: rows x layers that a
context cost, against the layers of the model; the pool's tokens with and without the branch's
groups; tail pages at most.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

from lockstep.branch import TARGETS, Branch
from lockstep.options import log_softmax, normalise
from lockstep.types import EngineStats, Gate, GateProbe, Request, SamplingParams

BASE = "random"
OPTIONS = ("answer", "refuse")
QUESTION, HEADER = 24, 8  # tokens of the judge's suffix, and of what writing begins with
POOL_BYTES = 40 << 30
OUT = Path(__file__).resolve().parent / "out"


# --- an engine in a process of its own ----------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What a worker makes an engine of."""

    shape: str
    folder: str
    depth: Literal["full", "exit"] = "full"
    caching: bool = True
    branch: bool = True
    graphs: bool = True
    pool: int = POOL_BYTES


@dataclass(frozen=True)
class Answered:
    """What came of one request."""

    id: str
    tokens: tuple[int, ...]
    scores: tuple[float, ...]
    chosen: int | None


@dataclass(frozen=True)
class Room:
    """Tokens that the pool holds, without and with the branch's own groups."""

    alone: int
    beside: int


def worker(pipe: Connection, setting: Setting) -> None:
    """Serve requests that come through the pipe until it says stop."""
    import torch

    from bench.random_model import random_model
    from bench.shapes import SHAPES
    from lockstep.branch import read_branch
    from lockstep.config import BranchOptions, CacheConfig, SchedulerConfig
    from lockstep.engine.loop import Engine
    from lockstep.kernels import cpu, cuda
    from lockstep.runner.memory import plan_pool
    from lockstep.runner.runner import Identity, Runner

    backend = cuda.make_backend("cuda") if torch.cuda.is_available() else cpu.make_backend()
    scheduler = SchedulerConfig(max_step_tokens=8192, max_sequences=256).resolved(backend.kind)
    cache = CacheConfig(prefix_caching=setting.caching)
    model = random_model(SHAPES[setting.shape], backend)
    branch = read_branch(setting.folder) if setting.branch else None
    runner = Runner(
        model,
        backend,
        page_tokens=cache.resolved(backend.kind).page_tokens,
        memory_bytes=setting.pool,
        step_tokens=scheduler.max_step_tokens,
        max_sequences=scheduler.max_sequences,
        graphs=setting.graphs,
        identity=Identity(setting.shape, BASE),
        branches=[] if branch is None else [branch],
    )
    runner.warm_up()
    elements = setting.pool // torch.empty((), dtype=model.dtype).element_size()
    room = Room(
        *(
            plan_pool(groups, runner.page_tokens, elements).tokens()
            for groups in (model.groups, runner.groups)
        )
    )
    load = (("judge", setting.folder),) if setting.branch else ()
    options = BranchOptions(load=load, depth=setting.depth)
    engine = Engine(runner, scheduler, cache, runner.info(), branches=options)
    pipe.send((room, model.num_layers))
    found: dict[str, list[Any]] = {}
    tails = 0
    while True:
        while pipe.poll(0 if engine.has_work() else None):
            message = pipe.recv()
            if message == "stop":
                engine.close()
                return
            if message == "stats":
                pipe.send((engine.stats(), tails))
            elif message == "flush":
                engine.flush_cache()
                tails = 0
            else:
                for request in message:
                    found[request.id] = []
                    engine.submit(request)
        done = []
        for out in engine.step():
            if out.error:
                raise RuntimeError(f"{out.request}: {out.error}")
            found[out.request].append(out)
            if out.finish is not None:
                outputs = found.pop(out.request)
                gates = [o.gate.chosen for o in outputs if o.gate is not None]
                done.append(
                    Answered(
                        out.request,
                        tuple(token for o in outputs for token in o.tokens),
                        outputs[-1].scores,
                        gates[0] if gates else None,
                    )
                )
        tails = max(tails, engine.stats().pages_tail)
        if done:
            pipe.send(done)


class Worker:
    """The other end of a worker."""

    def __init__(self, setting: Setting) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, other = spawn.Pipe()
        self.process = spawn.Process(target=worker, args=(other, setting), daemon=True)
        self.process.start()
        other.close()
        self.room, self.layers = self.pipe.recv()

    def stats(self) -> tuple[EngineStats, int]:
        """The engine's counters, and tail pages at most since the last flush."""
        self.pipe.send("stats")
        found: tuple[EngineStats, int] = self.pipe.recv()
        return found

    def close(self) -> None:
        self.pipe.send("stop")
        self.process.join(60)


# --- the work -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """Contexts, and how they are asked and answered."""

    contexts: Sequence[tuple[int, ...]]
    question: tuple[int, ...]
    header: tuple[int, ...]
    new: int

    def decision(self, index: int) -> Request:
        return Request(
            f"decide{index}",
            (*self.contexts[index], *self.question),
            SamplingParams(max_tokens=0, seed=0),
            branch="judge",
            branch_from=len(self.contexts[index]),
        )

    def answer(self, index: int) -> Request:
        return Request(f"write{index}", (*self.contexts[index], *self.header), self._writes())

    def gated(self, index: int, threshold: float) -> Request:
        gate = Gate(
            branch="judge",
            probes=(GateProbe(self.question),),
            headers=(self.header, None),
            thresholds=(threshold, 0.0),  # the other option wins wherever this one does not
            outputs=(0, 1),
        )
        return Request(f"gate{index}", self.contexts[index], self._writes(), gate=gate)

    def _writes(self) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=self.new, ignore_eos=True, seed=0)


def probability(scores: Sequence[float]) -> float:
    return normalise(log_softmax(scores))[0]


@dataclass
class Outcome:
    """Seconds, what was decided and written, and what the engines counted."""

    seconds: float = 0.0
    texts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    layers: int = 0
    tails: int = 0


def measured(workers: Sequence[Worker], run: Callable[[], dict[int, tuple[int, ...]]]) -> Outcome:
    """A run on cold caches."""
    for each in workers:
        each.pipe.send("flush")
    before = [each.stats()[0].computed_layers for each in workers]
    begin = time.perf_counter()
    texts = run()
    found = Outcome(time.perf_counter() - begin, texts)
    after = [each.stats() for each in workers]
    found.layers = sum(s.computed_layers - b for (s, _), b in zip(after, before, strict=True))
    found.tails = max(tails for _, tails in after)
    return found


def in_one(own: Worker, work: Work, threshold: float) -> Outcome:
    """Gated requests."""

    def run() -> dict[int, tuple[int, ...]]:
        own.pipe.send([work.gated(i, threshold) for i in range(len(work.contexts))])
        texts, left = {}, len(work.contexts)
        while left:
            for done in own.pipe.recv():
                left -= 1
                if done.chosen == 0:
                    texts[int(done.id[4:])] = done.tokens
        return texts

    return measured([own], run)


def in_two(judge: Worker, writer: Worker, work: Work, threshold: float) -> Outcome:
    """Decisions by one, answers by the other as soon as they are wanted."""

    def run() -> dict[int, tuple[int, ...]]:
        judge.pipe.send([work.decision(i) for i in range(len(work.contexts))])
        texts: dict[int, tuple[int, ...]] = {}
        left, pipes = len(work.contexts), list({judge.pipe: 0, writer.pipe: 0})
        while left:
            for pipe in wait(pipes):
                assert isinstance(pipe, Connection)
                opened = []
                for done in pipe.recv():
                    index = int(done.id.removeprefix("decide").removeprefix("write"))
                    if done.id.startswith("write"):
                        texts[index] = done.tokens
                        left -= 1
                    elif probability(done.scores) >= threshold:
                        opened.append(work.answer(index))
                    else:
                        left -= 1
                if opened:
                    writer.pipe.send(opened)
        return texts

    return measured([judge] if judge is writer else [judge, writer], run)


def half(judge: Worker, work: Work) -> float:
    """The threshold that half of the contexts reach; also compiles what later runs need."""
    judge.pipe.send([work.decision(i) for i in range(len(work.contexts))])
    found: list[float] = []
    while len(found) < len(work.contexts):
        found += [probability(done.scores) for done in judge.pipe.recv()]
    return statistics.median(found)


# --- the comparison -------------------------------------------------------------------------


def package(shape: str, fork: int, exit_: int, adapt: str, folder: Path) -> str:
    """A branch with random adapters and head, on disk."""
    import torch

    from bench.shapes import SHAPES
    from lockstep.weights.branch import write_package

    config = SHAPES[shape]
    hidden, inner, head = (
        int(config[key]) for key in ("hidden_size", "intermediate_size", "head_dim")
    )
    queries = int(config["num_attention_heads"]) * head
    keys = int(config["num_key_value_heads"]) * head
    sizes = {
        "q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden),
        "o_proj": (hidden, queries), "gate_proj": (inner, hidden), "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }  # fmt: skip
    branch = Branch(
        base=BASE, base_name=shape, fork=fork, exit=exit_,
        adapt="context" if adapt == "context" else "suffix",
        rank=16, scale=1.0, targets=TARGETS, head="options", options=OPTIONS, suffix="?",
    )  # fmt: skip
    generator = torch.Generator().manual_seed(fork)
    tensors = {
        "norm.weight": torch.ones(hidden),
        "head.weight": torch.randn(2, hidden, generator=generator) * hidden**-0.5,
        "head.bias": torch.zeros(2),
    }
    for layer in range(fork, exit_):
        for target in TARGETS:
            n, k = sizes[target]
            a = torch.randn(branch.rank, k, generator=generator) * k**-0.5
            tensors[f"layers.{layer}.{target}.lora_A"] = a
            tensors[f"layers.{layer}.{target}.lora_B"] = torch.randn(
                n, branch.rank, generator=generator
            ) * (0.3 * branch.rank**-0.5)
    write_package(branch, tensors, folder)
    return str(folder)


def compare(
    options: argparse.Namespace, writer: Worker, fork: int, exit_: int, adapt: str
) -> list[str]:
    """One branch through every way; the rows of its table."""
    from bench.shapes import SHAPES

    with tempfile.TemporaryDirectory() as folder:
        path = package(options.shape, fork, exit_, adapt, Path(folder) / "judge")
        base = Setting(options.shape, path, pool=options.pool)
        source = random.Random(fork)
        vocabulary = int(SHAPES[options.shape]["vocab_size"])

        def some(count: int) -> tuple[int, ...]:
            return tuple(source.randrange(vocabulary) for _ in range(count))

        contexts = [some(options.length) for _ in range(options.contexts)]
        work = Work(contexts, some(QUESTION), some(HEADER), options.new)
        warm = replace(work, contexts=[some(options.length) for _ in range(8)])
        found: dict[str, list[Outcome]] = {}
        room = Room(1, 1)

        def rounds(name: str, run: Callable[[Work, float], Outcome], threshold: float) -> None:
            run(warm, threshold)  # compiles, captures
            found[name] = [run(work, threshold) for _ in range(options.rounds)]
            seconds = [round(each.seconds, 3) for each in found[name]]
            print(f"  fork {fork}, exit {exit_}, {adapt}, {name}: {seconds} s", flush=True)

        own = Worker(base)
        threshold = half(own, work)
        room, layers = own.room, own.layers
        rounds("gated", lambda w, t: in_one(own, w, t), threshold)
        own.close()
        if f"{fork}-{exit_}-{adapt}" in options.twice:
            twice = Worker(replace(base, caching=False))
            rounds("one engine, two prefills", lambda w, t: in_two(twice, twice, w, t), threshold)
            twice.close()
        # A judge of its own has no use for trunk rows behind its exit, nor for both kinds.
        judges: dict[str, Literal["full", "exit"]] = {}
        if exit_ == layers:
            judges["two engines, full judge"] = "exit"
        else:
            judges["two engines, early exit"] = "exit"
            if adapt == "suffix":
                judges["two engines, full judge"] = "full"
        for name, depth in judges.items():
            judge = Worker(replace(base, depth=depth, graphs=False))  # it never decodes
            rounds(name, lambda w, t, judge=judge: in_two(judge, writer, w, t), threshold)  # type: ignore[misc]
            judge.close()
    for name, outcomes in found.items():
        for one in outcomes:
            assert one.texts == found["gated"][0].texts, f"{name}: decided or wrote otherwise"
    base_seconds = statistics.median(one.seconds for one in found["gated"])
    rows = options.contexts * options.length
    lines = []
    for name, outcomes in found.items():
        seconds = statistics.median(one.seconds for one in outcomes)
        work_done = len(contexts) + len(outcomes[0].texts)
        lines.append(
            f"| {fork}-{exit_} {adapt} | {name} | {seconds:.2f} | {work_done / seconds:.1f} "
            f"| {seconds / base_seconds:.2f} | {outcomes[0].layers / rows:.2f} "
            f"| {outcomes[0].tails} |"
        )
    lost = 1 - room.beside / room.alone
    print(f"  pool: {room.alone} tokens, {room.beside} beside the branch: {lost:.3%} lost")
    lines.append(f"| {fork}-{exit_} {adapt} | pool's tokens lost to the branch: {lost:.3%} |||||")
    return lines


def main() -> None:
    """Every branch in turn, then the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--contexts", type=int, default=64)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--pool", type=int, default=POOL_BYTES, help="bytes of each engine's pool")
    parser.add_argument(
        "--branches", nargs="+", default=["32-36-suffix", "32-36-context", "20-24-suffix",
        "20-24-context"], help="fork-exit-adapt",
    )  # fmt: skip
    parser.add_argument(
        "--twice", nargs="*", default=["32-36-suffix"], help="branches also tried by two prefills"
    )
    options = parser.parse_args()
    lines = [
        f"{options.shape}, random weights, {options.contexts} contexts of {options.length} tokens, "
        f"half of the gates open, {options.new} tokens written; medians of {options.rounds}.",
        "",
        "| branch | way | s | decisions + answers a second | time, gated = 1 | layers a context "
        "row | tail pages at most |",
        "|---|---|---|---|---|---|---|",
    ]
    out = Path(os.environ.get("OUT", OUT))
    out.mkdir(parents=True, exist_ok=True)
    writer = Worker(Setting(options.shape, "", branch=False, pool=options.pool))
    for each in options.branches:
        fork, exit_, adapt = each.split("-")
        lines += compare(options, writer, int(fork), int(exit_), adapt)
        (out / "gpu_branches.md").write_text("\n".join(lines) + "\n")
    writer.close()
    print("\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
