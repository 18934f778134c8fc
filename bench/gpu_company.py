"""Judge and writer in two processes on one card, round after round: does any bit ever move?

    python -m bench.gpu_company [--seconds 140] [--alone 100] [--branch 32-36-suffix]

Answers arrive at random times, so that steps are of many compositions; every score of a
decision, every token, and in each second round every logprob is compared with its first value.
First both work at once, then the writer alone. Differences are printed as they are found; the
exit status is 1 if there was one.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

from bench.branch_package import write_random_branch
from bench.branch_worker import Answered, Setting, Worker
from bench.gpu_branches import Work, add_work, make_work
from lockstep.types import Request

GAP = 0.4  # seconds between arrivals, at most


@dataclass
class Watch:
    """First values of everything that was answered."""

    first: dict[tuple[str, str], tuple[float, ...]] = field(default_factory=dict)
    compared: int = 0
    moved: int = 0

    def check(self, done: Answered, where: str) -> None:
        for what in ("scores", "tokens", "logprobs"):
            value: tuple[float, ...] = getattr(done, what)
            if not value:
                continue
            known = self.first.setdefault((done.id, what), value)
            self.compared += 1
            if known != value:
                self.moved += 1
                pairs = zip(known, value, strict=True)
                at = next(n for n, (one, other) in enumerate(pairs) if one != other)
                print(f"MOVED {where}: {done.id}, {what}, from place {at}", flush=True)


def one_round(
    judge: Worker, writer: Worker, work: Work, source: random.Random, *, judged: bool, bits: bool
) -> list[Answered]:
    """Every second context answered on cold caches and, if `judged`, all decided about."""
    judge.flush()
    writer.flush()
    found: list[Answered] = []
    due = list(range(0, len(work.contexts), 2))
    source.shuffle(due)
    left = len(due)
    if judged:
        judge.pipe.send([work.decision(i) for i in range(len(work.contexts))])
        left += len(work.contexts)
    arrives = time.perf_counter()

    def answer(index: int) -> Request:
        request = work.answer(index)
        params = replace(request.sampling, logprobs=0 if bits else None)
        return replace(request, sampling=params)

    while len(found) < left:
        if due and time.perf_counter() >= arrives:
            count = min(len(due), source.choice((1, 1, 1, 2, 4)))
            writer.pipe.send([answer(due.pop()) for _ in range(count)])
            arrives = time.perf_counter() + source.random() * GAP
        for pipe in wait([judge.pipe, writer.pipe], timeout=0.005):
            assert isinstance(pipe, Connection)
            found += pipe.recv()
    return found


def main() -> int:
    """Both at once, then the writer alone."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_work(parser)
    parser.add_argument("--branch", default="32-36-suffix")
    parser.add_argument("--seconds", type=float, default=140, help="of both at once")
    parser.add_argument("--alone", type=float, default=100, help="seconds of the writer alone")
    options = parser.parse_args()
    work, source, watch = make_work(options, 32), random.Random(5), Watch()
    judge, writer = Worker(options.shape), Worker(options.shape)
    judge.loaded()
    writer.loaded()
    writer.set_up(Setting(pool=options.pool))
    with tempfile.TemporaryDirectory() as folder:
        path = write_random_branch(options.branch, options.shape, Path(folder) / "judge")
        judge.set_up(Setting(path, graphs=False, pool=options.pool))
    for judged, seconds in ((True, options.seconds), (False, options.alone)):
        name, rounds = "both" if judged else "the writer alone", 0
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            rounds += 1
            for done in one_round(judge, writer, work, source, judged=judged, bits=rounds % 2 == 0):
                watch.check(done, f"{name}, round {rounds}")
        print(f"{name}: {rounds} rounds, {watch.compared} compared, {watch.moved} moved so far")
    judge.close()
    writer.close()
    return min(watch.moved, 1)


if __name__ == "__main__":
    sys.exit(main())
