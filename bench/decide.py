"""Decide, then write, over many rows: in one request, against the ways around it.

    python -m bench.decide [--rows 10000] [--tokens 64] [--new 32] [--rounds 1]
    python -m bench.decide --shape qwen3-8b --tokens 512 --new 64       (on a GPU)

Rows are random ids with nothing in common; half of the decisions open the gate (the threshold
is the median of a sample). Three ways through the same engine, each on an empty cache:

- gate: one request a row: decide behind a forced prefix, go on writing where it says so.
- everything: every row is written out, and the decision parsed from the text.
- two passes: all decisions first, then the open ones again from the start: by then the first
  rows are no longer in the cache (it is emptied, which is what 10,000 rows do to it).

Decisions must be the same in all, and so must the texts, to the token. The limit counts two
operations a weight and row that cannot be spared, over the measured rate of matrix products.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bench.drive import Driven, drive
from bench.limits import H200, measure
from lockstep.config import CacheConfig, SchedulerConfig
from lockstep.engine.loop import Engine
from lockstep.options import normalise
from lockstep.runner.runner import Runner, load_runner
from lockstep.settings import engine_config
from lockstep.types import Gate, GateProbe, Request, SamplingParams, SequenceOutput

OUT = Path(__file__).resolve().parent / "out"
PREFIX_TOKENS = 5  # of `{"decision": "`
WRITE, SKIP = 0, 1
SAMPLE = 64  # rows on which the threshold is chosen
WARM = 512  # rows that go through every way untimed on a GPU: compiles, captures


@dataclass(frozen=True)
class Work:
    """The rows, and how they are asked."""

    prompts: list[tuple[int, ...]]
    prefix: tuple[int, ...]
    options: tuple[int, int]
    new: int

    def writes(self) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=self.new, ignore_eos=True, seed=0)

    def reads(self) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=1, seed=0, logprob_token_ids=self.options)


@dataclass
class Way:
    """What one way cost and found. `texts`: of the rows that were to be written."""

    seconds: float
    cpu: float
    rows: int
    generated: int
    steps: int
    texts: dict[int, tuple[int, ...]]


def read(outputs: list[SequenceOutput]) -> float:
    """The probability of writing, among the two options."""
    (entry,) = [entry for out in outputs for entry in out.logprobs]
    return normalise(entry.given)[WRITE]


def ids(outputs: list[SequenceOutput]) -> tuple[int, ...]:
    return tuple(token for out in outputs for token in out.tokens)


def threshold(engine: Engine, work: Work) -> float:
    """Half of the rows reach it."""
    found = drive(engine, _readers(work, range(min(SAMPLE, len(work.prompts)))))
    return statistics.median(read(outputs) for outputs in found.outputs.values())


def _readers(work: Work, rows: range) -> Iterator[Request]:
    for row in rows:
        yield Request(f"read{row}", (*work.prompts[row], *work.prefix), work.reads())


def gated(engine: Engine, work: Work, limit: float) -> Way:
    """One request a row."""
    found = drive(engine, gates(work, limit))
    texts = {}
    for row, outputs in enumerate(found.outputs.values()):
        outcome = outputs[0].gate
        assert outcome is not None
        if outcome.chosen == WRITE:
            texts[row] = ids(outputs)
    return _way([found], texts)


def gates(work: Work, limit: float) -> Iterator[Request]:
    path = (work.options[WRITE],)
    gate = Gate(
        branch="",
        probes=(GateProbe(work.prefix, (), work.options),),
        headers=((*work.prefix, *path), None),
        thresholds=(limit, 0.0),  # the other option wins wherever this one does not
        sequences=(path, (work.options[SKIP],)),
    )
    for row, prompt in enumerate(work.prompts):
        yield Request(f"gate{row}", prompt, work.writes(), gate=gate)


def everything(engine: Engine, work: Work, limit: float) -> Way:
    """Every row written; those that the decision leaves out are thrown away.

    A model that is asked to say first what it decides writes the word, then the text: the
    forced prefix and the option that opens stand for that here, so that texts are comparable.
    """
    header = (*work.prefix, work.options[WRITE])
    requests = (
        Request(f"all{row}", (*prompt, *header), work.writes())
        for row, prompt in enumerate(work.prompts)
    )
    found = drive(engine, requests)
    return _way([found], {row: ids(o) for row, o in enumerate(found.outputs.values())})


def two_passes(engine: Engine, work: Work, limit: float) -> Way:
    """All decisions, then the writers from the start."""
    first = drive(engine, _readers(work, range(len(work.prompts))))
    chosen = [row for row, o in enumerate(first.outputs.values()) if read(o) >= limit]
    engine.flush_cache()
    header = (*work.prefix, work.options[WRITE])
    second = drive(
        engine,
        (Request(f"two{row}", (*work.prompts[row], *header), work.writes()) for row in chosen),
    )
    texts = dict(zip(chosen, map(ids, second.outputs.values()), strict=True))
    return _way([first, second], texts)


def _way(parts: list[Driven], texts: dict[int, tuple[int, ...]]) -> Way:
    return Way(
        sum(part.seconds for part in parts),
        sum(part.cpu for part in parts),
        sum(part.computed for part in parts),
        sum(part.generated for part in parts),
        sum(part.steps for part in parts),
        texts,
    )


WAYS: dict[str, Callable[[Engine, Work, float], Way]] = {
    "gate": gated,
    "everything": everything,
    "two passes": two_passes,
}


def make_runner(options: argparse.Namespace) -> Runner:
    """SmolLM2, or random weights of a public shape (on a GPU, if they are of any size)."""
    if not options.shape:
        return load_runner(
            engine_config("smollm2", threads=options.threads, cache_bytes=options.cache_mb << 20)
        )
    from bench.random_model import random_model
    from bench.shapes import SHAPES
    from lockstep.config import ModelOptions
    from lockstep.kernels import make_backend

    backend = make_backend(ModelOptions())
    settings = SchedulerConfig().resolved(backend.kind)
    runner = Runner(
        random_model(SHAPES[options.shape], backend),
        backend,
        page_tokens=CacheConfig().resolved(backend.kind).page_tokens,
        step_tokens=settings.max_step_tokens,
        max_sequences=settings.max_sequences,
    )
    runner.warm_up()
    return runner


def make_work(options: argparse.Namespace, vocabulary: int, round_number: int) -> Work:
    source = random.Random(round_number)

    def some(count: int) -> tuple[int, ...]:
        return tuple(source.randrange(20, vocabulary) for _ in range(count))

    prompts = [some(options.tokens) for _ in range(options.rows)]
    write, skip = some(2)
    return Work(prompts, some(PREFIX_TOKENS), (write, skip), options.new)


def limit_of(work: Work, texts: int, layer_weights: int, head_weights: int, flops: float) -> float:
    """Seconds for the rows that no way can spare: every prompt once, every wanted token."""
    prompts = len(work.prompts)
    rows = prompts * (len(work.prompts[0]) + PREFIX_TOKENS) + texts * work.new
    heads = prompts + texts * work.new
    return 2 * (layer_weights * rows + head_weights * heads) / flops


def table(
    options: argparse.Namespace, found: dict[str, list[Way]], texts: int, least: float, flops: float
) -> str:
    """Of all that has been measured so far."""
    base = statistics.median(way.seconds for way in found["gate"])
    lines = [
        f"{options.shape or 'SmolLM2-135M'}, bfloat16, {options.rows} rows of {options.tokens} "
        f"tokens, {texts} written, {options.new} tokens each; {len(found['gate'])} rounds, "
        f"medians; limit {least:.2f} s (matrix products at {flops / 1e9:.0f} GFLOP/s); load "
        f"{os.getloadavg()[0]:.1f} at the end.",
        "",
        "| way | s | CPU s | rows/s | time, gate = 1 | rows computed | tokens written | limit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, ways in found.items():
        seconds = statistics.median(way.seconds for way in ways)
        cpu = statistics.median(way.cpu for way in ways)
        lines.append(
            f"| {name} | {seconds:.2f} | {cpu:.2f} | {options.rows / seconds:.1f} "
            f"| {seconds / base:.2f} | {ways[0].rows} | {ways[0].generated} "
            f"| {100 * least / seconds:.0f}% |"
        )
    return "\n".join(lines)


def main() -> int:
    """Run the ways in turn; the table is written anew after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=64, help="of a row")
    parser.add_argument("--new", type=int, default=32, help="tokens of a text")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cache-mb", type=int, default=512)
    parser.add_argument("--shape", default="", help="a public shape, on a GPU")
    parser.add_argument("--profile", action="store_true", help="steps of the gate, by kernel (GPU)")
    options = parser.parse_args()
    print(f"load before: {os.getloadavg()[0]:.2f} (quiet is below 0.3)", flush=True)
    flops = H200.flops if options.shape else measure(options.threads, "bfloat16").flops
    runner = make_runner(options)
    engine = Engine(runner, SchedulerConfig(), CacheConfig(), runner.info())
    model = runner.model
    head = model.lm_head.n * model.lm_head.k
    layers = model.weight_bytes // 2 - head * (1 if model.tied else 2)
    out = Path(os.environ.get("OUT", OUT))
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"decide{'-' + options.shape if options.shape else ''}.md"
    found: dict[str, list[Way]] = {}
    names = list(WAYS)
    text = ""
    for number in range(options.rounds):
        work = make_work(options, engine.info.vocab_size, number)
        limit = threshold(engine, work)
        if options.shape and not number:
            warm(engine, work, limit)
        if options.profile:
            profile(engine, work, limit)
            return 0
        # The gate goes first in the first round: the table needs it.
        for name in names[number % 3 :] + names[: number % 3]:
            engine.flush_cache()
            way = WAYS[name](engine, work, limit)
            found.setdefault(name, []).append(way)
            print(
                f"  round {number + 1} {name:11} {way.seconds:8.2f} s, {way.cpu:8.2f} s CPU, "
                f"{way.steps} steps",
                flush=True,
            )
            count = int(statistics.median(len(way.texts) for way in found["gate"]))
            least = limit_of(work, count, layers, head, flops)
            text = table(options, found, count, least, flops)
            path.write_text(text + "\n")
        first = found["gate"][-1].texts
        assert first == found["two passes"][-1].texts, "two passes decided or wrote otherwise"
        every = found["everything"][-1].texts
        assert first == {row: every[row] for row in first}, "texts moved"
        print(f"  {options.rows} decisions and {len(first)} texts are the same in all", flush=True)
    print("\n" + text)
    engine.close()
    return 0


def warm(engine: Engine, work: Work, limit: float) -> None:
    """Some rows through every way, so that no timed one compiles or captures."""
    begin = time.perf_counter()
    some = replace(work, prompts=work.prompts[:WARM])
    for way in WAYS.values():
        engine.flush_cache()
        way(engine, some, limit)
    print(f"warmed in {time.perf_counter() - begin:.1f} s", flush=True)


def profile(engine: Engine, work: Work, limit: float) -> None:
    """Steps in the middle of the gate's way: wall time, what the device did, and its kernels."""
    from bench.gpu_engine import kernels_of

    engine.flush_cache()
    for request in gates(work, limit):
        engine.submit(request)
    for _ in range(3 * work.new):  # as many leave as come
        engine.step()
    steps = work.new // 2
    before, begin = engine.stats(), time.perf_counter()
    for _ in range(steps):
        engine.step()
    wall = (time.perf_counter() - begin) / steps
    rows = (engine.stats().computed_tokens - before.computed_tokens) / steps
    kernels = kernels_of(engine, steps)
    busy = sum(took for _, took in kernels.values())
    print(f"{rows:.0f} rows a step, {wall * 1e3:.2f} ms, device {busy / 1e3:.2f} ms")
    for name, (calls, took) in sorted(kernels.items(), key=lambda item: -item[1][1])[:16]:
        print(f"{name[:58]:<60}{calls:>8.1f}{took:>10.1f} us{took / busy:>8.1%}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
