"""The server under load: delays at several rates, what it costs beside the engine, idle crowds.

    python -m bench.serve [--jobs rates,overhead,idle,scripted] [--guidellm VENV] [--quick]
    python -m bench.serve --url http://127.0.0.1:9000 --model NAME   # any server, rates only

rates: requests arrive by a Poisson process, whatever became of those before them; delays
count from the planned arrival. overhead: CPU seconds of the server's process (HTTP, text,
JSON) beside the engine's, with many streams at once. idle: the same with and without a
thousand silent connections, in turn. scripted: the same around an engine that computes
nothing but is as quick as a large GPU's: how many tokens a second one server can pass on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.limits import Limits, measure
from bench.load import Answer, IdleConnections, Target, arrivals, open_loop, prompts, together
from bench.processes import Served
from bench.throughput import HEAD_WEIGHTS, LAYER_WEIGHTS

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "bench" / "out"


@dataclass(frozen=True)
class Objective:
    """Within it an answer counts towards goodput.

    Attributes:
        first: seconds to the first text. per_token: mean seconds of each token after it.
    """

    first: float
    per_token: float

    def holds(self, answer: Answer) -> bool:
        """Whether the answer came whole and in time."""
        return (
            not answer.problem and answer.first <= self.first and answer.per_token <= self.per_token
        )


@dataclass(frozen=True)
class Row:
    """What one load generator saw at one rate; delays in milliseconds (p50, p95, p99)."""

    generator: str
    rate: float
    whole: int
    failed: int
    first: tuple[float, ...]
    gaps: tuple[float, ...]
    goodput: float
    attained: float
    tokens: float


def quantiles(values: list[float]) -> tuple[float, ...]:
    """Their 50th, 95th and 99th percentile, in thousandths."""
    if not values:
        return (0.0, 0.0, 0.0)
    ordered = sorted(values)
    return tuple(
        1000 * ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]
        for share in (0.5, 0.95, 0.99)
    )


def at_rate(target: Target, rate: float, options: argparse.Namespace, goal: Objective) -> Row:
    """Offer `rate` requests a second for a while, and wait for the last of them."""
    seed = round(1000 * rate)
    moments = arrivals(seed, rate, options.seconds)
    texts = prompts(seed, len(moments), options.words)
    answers = asyncio.run(open_loop(target, moments, texts, options.new))
    whole = [answer for answer in answers if not answer.problem]
    good = sum(map(goal.holds, answers))
    span = options.seconds
    if whole:
        span = max(answer.times[-1] for answer in whole) - min(answer.due for answer in whole)
    return Row(
        generator="bench/load.py",
        rate=rate,
        whole=len(whole),
        failed=len(answers) - len(whole),
        first=quantiles([answer.first for answer in whole]),
        gaps=quantiles([gap for answer in whole for gap in answer.gaps]),
        goodput=good / options.seconds,
        attained=good / len(answers),
        tokens=sum(answer.tokens for answer in whole) / span,
    )


def guidellm(target: Target, rate: float, options: argparse.Namespace, goal: Objective) -> Row:
    """The same load from guidellm, which stops at the end of its time."""
    data, out = OUT / "guidellm.jsonl", OUT / "guidellm.json"
    seed = round(1000 * rate) + 1
    texts = prompts(seed, max(8, round(4 * rate * options.seconds)), options.words)
    rows = ({"prompt": text, "output_tokens_count": options.new} for text in texts)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    objectives = {"ttft_ms": 1000 * goal.first, "tpot_ms": 1000 * goal.per_token}
    route = "/v1/chat/completions" if target.route == "chat" else "/v1/completions"
    backend = {"kind": "openai_http", "target": target.url, "model": target.model}
    command = [
        str(Path(options.guidellm) / "bin" / "guidellm"),
        "run",
        "--disable-console-interactive",
        f"--backend={json.dumps({**backend, 'request_format': route})}",
        f"--profile=kind=poisson,rate={rate}",
        f"--constraint=kind=max_duration,seconds={options.seconds}",
        f"--data=kind=json_file,path={data}",
        f"--metrics={json.dumps({'kind': 'generative', 'slo': objectives})}",
        f"--output=kind=json,path={out}",
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"guidellm failed:\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}")
    benchmark: dict[str, Any] = json.loads(out.read_text())["benchmarks"][0]
    # Version 0.8.1 lets its workers go before it has set the time that Poisson arrivals count
    # from; several workers then send everything at once.
    earliest = benchmark["start_time"] - options.seconds
    for request in benchmark["requests"]["successful"]:
        if request["info"]["timings"]["targeted_start"] < earliest:
            raise RuntimeError("guidellm sent its requests before their time")
    metrics = benchmark["metrics"]

    def three(name: str) -> tuple[float, ...]:
        found = metrics[name]["successful"]["percentiles"]
        return tuple(found[p] for p in ("p50", "p95", "p99"))

    totals = metrics["request_totals"]
    return Row(
        generator="guidellm",
        rate=rate,
        whole=totals["successful"],
        failed=totals["errored"],
        first=three("time_to_first_token_ms"),
        gaps=three("inter_token_latency_ms"),
        goodput=(metrics["request_goodput"] or {"total": {"mean": 0.0}})["total"]["mean"],
        attained=metrics["slo_attainment"] or 0.0,
        tokens=metrics["output_tokens_per_second"]["successful"]["mean"],
    )


def rates(target: Target, options: argparse.Namespace, goal: Objective) -> list[Row]:
    """Every rate, by both generators."""
    rows: list[Row] = []
    for rate in options.rates:
        rows.append(at_rate(target, rate, options, goal))
        if options.guidellm:
            rows.append(guidellm(target, rate, options, goal))
        print(f"  {rate:g} requests/s: {rows[-1].attained:.0%} in time", flush=True)
    return rows


@dataclass(frozen=True)
class Cost:
    """One round of many streams: CPU seconds of both processes, and the rate.

    Attributes:
        events: with text, that carried the tokens; fewer where the server fell behind.
    """

    tokens: int
    events: int
    wall: float
    server: float
    engine: float

    @property
    def share(self) -> float:
        """The server's CPU seconds over the engine's."""
        return self.server / self.engine


def crowd(served: Served, target: Target, seed: int, options: argparse.Namespace) -> Cost:
    """All streams at once, from the first request to the last token.

    Raises:
        RuntimeError: an answer that did not come whole.
    """
    texts = prompts(seed, options.streams, options.words)
    before = served.cpu()
    answers = asyncio.run(together(target, texts, options.new))
    after = served.cpu()
    problems = [answer.problem for answer in answers if answer.problem]
    if problems:
        raise RuntimeError(f"{len(problems)} answers failed, the first: {problems[0]}")
    return Cost(
        tokens=sum(answer.tokens for answer in answers),
        events=sum(len(answer.times) for answer in answers),
        wall=max(answer.times[-1] for answer in answers) - answers[0].due,
        server=after.server - before.server,
        engine=after.engine - before.engine,
    )


def overhead(served: Served, target: Target, options: argparse.Namespace) -> list[Cost]:
    """Rounds of many streams."""
    costs = [crowd(served, target, 100 + turn, options) for turn in range(options.rounds)]
    print(f"  server over engine: {statistics.median(c.share for c in costs):.1%}", flush=True)
    return costs


def idle(served: Served, target: Target, options: argparse.Namespace) -> dict[int, list[Cost]]:
    """Rounds without and with silent connections, in turn."""
    costs: dict[int, list[Cost]] = {0: [], options.idle: []}
    for turn in range(options.rounds):
        for count in sorted(costs, reverse=bool(turn % 2)):
            with IdleConnections(target, count) as connections:
                seed = 200 + 2 * turn + (count > 0)  # nothing of it is in the cache
                costs[count].append(crowd(served, target, seed, options))
                if connections.alive() != count:
                    raise RuntimeError("the server closed connections in between")
    print("  idle connections done", flush=True)
    return costs


def scripted(options: argparse.Namespace) -> dict[str, list[Cost]]:
    """Rounds against engines that compute nothing, by the time that a step takes them."""
    costs: dict[str, list[Cost]] = {}
    for step in options.steps:
        arguments = ["-m", "bench.scripted", "{port}", f"{step:g}"]
        with Served(arguments, OUT / "scripted.log") as served:
            target = Target(served.url, "smollm2", options.route)
            asyncio.run(together(target, prompts(0, 4, options.words), 8))
            costs[f"a step of {step:g} ms or more"] = [
                crowd(served, target, 300 + turn, options) for turn in range(options.rounds)
            ]
    return costs


def limits_line(limits: Limits, options: argparse.Namespace, tokens: float) -> str:
    """What no server on this machine can beat, for requests of this size."""
    step = 2 * (LAYER_WEIGHTS + HEAD_WEIGHTS) / limits.read_bytes
    prefill = 2 * LAYER_WEIGHTS * tokens / limits.flops
    work = 2 * LAYER_WEIGHTS * (tokens + options.new - 1) + 2 * HEAD_WEIGHTS * options.new
    return (
        f"Limits: {1000 * prefill:.0f} ms to the first token of one prompt of {tokens:.0f} tokens "
        f"(matrix products, {limits.flops / 1e9:.0f} GFLOP/s), {1000 * step:.1f} ms a token of one "
        f"stream (weights read, {limits.read_bytes / 1e9:.1f} GB/s), "
        f"{limits.flops / work:.1f} requests a second."
    )


def rates_table(rows: list[Row], options: argparse.Namespace, goal: Objective) -> list[str]:
    """As Markdown."""

    def three(values: tuple[float, ...]) -> str:
        return " / ".join(f"{value:.0f}" for value in values)

    lines = [
        f"Poisson arrivals for {options.seconds:g} s, {options.words} random words in, "
        f"{options.new} tokens out; in time: first text within {1000 * goal.first:.0f} ms and "
        f"{1000 * goal.per_token:.0f} ms a token after it. Delays are p50 / p95 / p99.",
        "",
        "| requests/s | generator | whole | failed | TTFT, ms | ITL, ms | in time "
        "| goodput, requests/s | tokens/s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.rate:g} | {row.generator} | {row.whole} | {row.failed} | {three(row.first)} "
        f"| {three(row.gaps)} | {row.attained:.0%} | {row.goodput:.2f} | {row.tokens:.0f} |"
        for row in rows
    ]
    return lines


def costs_table(title: str, costs: dict[str, list[Cost]]) -> list[str]:
    """As Markdown; medians."""
    lines = [
        title,
        "",
        "| | tokens/s | tokens an event | server, CPU µs a token | engine, CPU µs a token "
        "| server / engine |",
        "|---|---|---|---|---|---|",
    ]
    for name, own in costs.items():
        speed = statistics.median(cost.tokens / cost.wall for cost in own)
        joined = statistics.median(cost.tokens / cost.events for cost in own)
        server = statistics.median(cost.server / cost.tokens for cost in own)
        engine = statistics.median(cost.engine / cost.tokens for cost in own)
        share = statistics.median(cost.share for cost in own)
        lines.append(
            f"| {name} | {speed:.0f} | {joined:.2f} | {1e6 * server:.0f} | {1e6 * engine:.0f} "
            f"| {share:.1%} |"
        )
    return lines


@contextlib.contextmanager
def target_of(options: argparse.Namespace) -> Iterator[tuple[Target, Served | None]]:
    """The server at `--url`, or one of our own for as long as the context lasts."""
    if options.url:
        yield Target(options.url, options.model, options.route), None
        return
    arguments = ["-m", "lockstep", "serve", options.model, "--port", "{port}"]
    arguments += ["--keep-alive-seconds", "3600"]  # connections that are idle on purpose stay
    with Served(arguments, OUT / "serve.log") as served:
        yield Target(served.url, options.model, options.route), served


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", default="rates,overhead,idle,scripted")
    parser.add_argument("--rates", type=lambda text: [float(r) for r in text.split(",")])
    parser.add_argument("--seconds", type=float, help="of arrivals at each rate")
    parser.add_argument("--words", type=int, default=100, help="of a prompt")
    parser.add_argument("--new", type=int, help="tokens of an answer")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--idle", type=int, default=1000, help="silent connections")
    parser.add_argument("--rounds", type=int, help="of overhead and idle")
    parser.add_argument(
        "--steps", type=lambda text: [float(s) for s in text.split(",")], default=[20.0, 5.0, 0.0]
    )
    parser.add_argument("--ttft", type=float, default=1000, help="objective, ms to the first text")
    parser.add_argument("--tpot", type=float, default=100, help="objective, ms a token after it")
    parser.add_argument("--route", choices=["chat", "completions"], default="chat")
    parser.add_argument("--url", help="of a server that runs already")
    parser.add_argument("--model", default="smollm2", help="that it serves")
    parser.add_argument("--guidellm", default=os.environ.get("GUIDELLM", ""), metavar="VENV")
    parser.add_argument("--quick", action="store_true", help="small work, to try the script itself")
    options = parser.parse_args()
    quick = options.quick
    options.jobs = ["rates"] if options.url else options.jobs.split(",")
    options.rates = options.rates or ([1.0] if quick else [1.0, 2.0, 4.0])
    options.seconds = options.seconds or (5 if quick else 30)
    options.new = options.new or (16 if quick else 64)
    options.rounds = options.rounds or (1 if quick else 3)
    return options


def run(options: argparse.Namespace, goal: Objective) -> tuple[list[str], float]:
    """The jobs that need the model: their tables, and the tokens of a prompt."""
    lines: list[str] = []
    with target_of(options) as (target, served):
        warm = asyncio.run(together(target, prompts(0, 4, options.words), 8))
        if warm[0].problem:
            raise RuntimeError(f"{target.url} does not answer: {warm[0].problem}")
        tokens = statistics.mean(answer.prompt_tokens for answer in warm)
        if "rates" in options.jobs:
            rows = rates(target, options, goal)
            lines += [*rates_table(rows, options, goal), ""]
        if "overhead" in options.jobs and served is not None:
            costs = overhead(served, target, options)
            title = f"{options.streams} streams of {options.new} tokens, from first to last"
            lines += [*costs_table(title, {target.route: costs}), ""]
        if "idle" in options.jobs and served is not None:
            pairs = idle(served, target, options)
            named = {f"{count} idle connections": own for count, own in pairs.items()}
            lines += [*costs_table("Silent connections beside them, rounds in turn", named), ""]
    return lines, tokens


def main() -> int:
    """Run the jobs and print their tables."""
    options = parse()
    OUT.mkdir(parents=True, exist_ok=True)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the server inherits it
    threads = len(os.sched_getaffinity(0))
    print(f"load before: {os.getloadavg()[0]:.2f} (quiet is below 0.3)", flush=True)
    lines: list[str] = []
    if set(options.jobs) - {"scripted"}:
        before = measure(threads, "bfloat16")
        tables, tokens = run(options, Objective(options.ttft / 1000, options.tpot / 1000))
        after = measure(threads, "bfloat16")
        limits = Limits(max(before.read_bytes, after.read_bytes), max(before.flops, after.flops))
        lines += [*tables, limits_line(limits, options, tokens), ""]
    if "scripted" in options.jobs:
        title = f"An engine that computes nothing, {options.streams} streams"
        lines += [*costs_table(title, scripted(options)), ""]
    head = (
        f"{options.model} at {options.url or 'lockstep serve'}, route {options.route}, {threads} "
        f"cores shared with the load generator, load {os.getloadavg()[0]:.1f} at the end."
    )
    text = "\n".join([head, "", *lines])
    print("\n" + text)
    (OUT / "serve.md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
