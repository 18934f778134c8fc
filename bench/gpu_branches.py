"""Judge and writer in one engine, against two engines on one card: random weights of an 8B shape.

    python -m bench.gpu_branches [--branches 20-24-suffix ...] [--contexts 32] [--rounds 2]

Every context is decided about, and half of them answered. The ways, each on cold caches:

- gated: one engine with the branch; one request decides and, if the gate opens, writes.
- two engines, full judge: one process decides at the model's full depth, another writes; each
  has its own weights and its own prefix cache, both run on the same GPU at the same time.
- two engines, early exit: as before, but the judge's rows leave at the branch's exit.
- one engine, two prefills: the decision, which leaves at the exit, and the answer are two
  requests and share nothing.

All run the same kernels, so what differs is the work. Each way does all of it once untimed,
which compiles and captures, then `--rounds` times. Decisions and answers must be equal in all
of them: a round in which they are not is named, and the exit status is 1. Beside the seconds:
rows x layers that contexts cost, with their bound; the same of closed and of open gates alone;
pages of tails and of rows at stops at most; the pool's tokens with and without the branch's
groups. The limit counts two operations a weight, row and layer of the way's bound, attention's
sums, and for each token of an answer one reading of the weights and of the keys and values of
all who write.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

from bench.branch_package import parts_of, write_random_branch
from bench.branch_worker import Room, Setting, Worker
from bench.limits import H200
from bench.shapes import SHAPES
from lockstep.options import log_softmax, normalise
from lockstep.types import Gate, GateProbe, Request, SamplingParams

QUESTION, HEADER = 24, 8  # tokens of the judge's suffix, and of what writing begins with
FEW = 4  # contexts of which all gates are closed, or open
OUT = Path(__file__).resolve().parent / "out"


# --- the work -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """Contexts, and how they are asked and answered."""

    contexts: Sequence[tuple[int, ...]]
    question: tuple[int, ...]
    header: tuple[int, ...]
    new: int

    @property
    def rows(self) -> int:
        return sum(map(len, self.contexts))

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


def add_work(parser: argparse.ArgumentParser) -> None:
    """The options of `make_work`, and of the engines that do it."""
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--contexts", type=int, default=32)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--pool", type=int, default=40 << 30, help="bytes of each engine's pool")


def make_work(options: argparse.Namespace, seed: int) -> Work:
    source = random.Random(seed)
    vocabulary = int(SHAPES[options.shape]["vocab_size"])

    def some(count: int) -> tuple[int, ...]:
        return tuple(source.randrange(vocabulary) for _ in range(count))

    contexts = [some(options.length) for _ in range(options.contexts)]
    return Work(contexts, some(QUESTION), some(HEADER), options.new)


def probability(scores: Sequence[float]) -> float:
    return normalise(log_softmax(scores))[0]


@dataclass
class Outcome:
    """Seconds, what was decided and written, and what the engines counted."""

    seconds: float = 0.0
    texts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    layers: int = 0
    pages: int = 0

    def differs(self, expected: Outcome) -> str:
        """In which contexts it decided otherwise, and where answers part; "" where nowhere."""
        decided = sorted(set(self.texts) ^ set(expected.texts))
        parted = {
            index: next(n for n, pair in enumerate(zip(text, expected.texts[index], strict=True))
                        if pair[0] != pair[1])
            for index, text in self.texts.items()
            if text != expected.texts.get(index, text)
        }  # fmt: skip
        found = [f"decided otherwise: {decided}"] if decided else []
        found += [f"wrote otherwise, from token: {parted}"] if parted else []
        return "; ".join(found)


def measured(workers: Sequence[Worker], run: Callable[[], dict[int, tuple[int, ...]]]) -> Outcome:
    """A run on cold caches."""
    for each in workers:
        each.flush()
    before = [each.stats()[0].computed_layers for each in workers]
    begin = time.perf_counter()
    texts = run()
    found = Outcome(time.perf_counter() - begin, texts)
    after = [each.stats() for each in workers]
    found.layers = sum(s.computed_layers - b for (s, _), b in zip(after, before, strict=True))
    found.pages = max(pages for _, pages in after)
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
    """The threshold that half of the contexts reach."""
    judge.pipe.send([work.decision(i) for i in range(len(work.contexts))])
    found: list[float] = []
    while len(found) < len(work.contexts):
        found += [probability(done.scores) for done in judge.pipe.recv()]
    return statistics.median(found)


# --- bounds ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bound:
    """What the ways of one branch cost at least.

    Args:
        context: whether the branch's adapters act on the context's rows.
    """

    shape: str
    fork: int
    exit: int
    context: bool

    @property
    def layers(self) -> int:
        return int(SHAPES[self.shape]["num_hidden_layers"])

    @property
    def own(self) -> int:
        """Layers that a context's rows take part in a second time, as the branch's."""
        return self.exit - self.fork if self.context else 0

    @property
    def stop(self) -> int:
        """Layers of the trunk that a context costs whose gate stays closed."""
        return self.fork if self.context else self.exit

    def of_way(self, way: str, opened: float) -> float:
        """Layers a context row, where that share of the gates opens."""
        if way == "gated":
            return self.stop + self.own + opened * (self.layers - self.stop)
        if way.endswith("full judge"):
            return self.layers + self.own + opened * self.layers
        return self.stop + self.own + opened * self.layers

    def asides(self, work: Work, opened: int) -> int:
        """Rows x layers beside the contexts: questions, headers and answers."""
        written = len(work.header) + work.new - 1
        return len(work.contexts) * len(work.question) * self.exit + opened * written * self.layers

    def seconds(self, way: str, work: Work, opened: int) -> float:
        """The limit, see the module's text."""
        config = SHAPES[self.shape]
        hidden, inner, head = (
            int(config[key]) for key in ("hidden_size", "intermediate_size", "head_dim")
        )
        queries = int(config["num_attention_heads"]) * head
        keys = int(config["num_key_value_heads"]) * head
        weights = hidden * (2 * queries + 2 * keys + 3 * inner)
        length = work.rows / len(work.contexts)
        rows = work.rows * self.of_way(way, opened / len(work.contexts))
        sums = rows * (2 * weights + 4 * queries * length / 2)
        sums += self.asides(work, opened) * (2 * weights + 4 * queries * length)
        model = 2 * (self.layers * weights + hidden * int(config["vocab_size"]))
        held = opened * length * 4 * keys * self.layers
        return sums / H200.flops + work.new * (model + held) / H200.read_bytes


# --- the comparison -------------------------------------------------------------------------


class Comparison:
    """All ways of one branch, and its part of the table."""

    def __init__(self, options: argparse.Namespace, name: str, own: Worker, writer: Worker) -> None:
        self._options = options
        self._name = name
        self._own = own
        self._writer = writer
        fork, exit_, adapt = parts_of(name)
        self._bound = Bound(options.shape, fork, exit_, adapt == "context")
        self._work = make_work(options, fork)
        self._found: dict[str, list[Outcome]] = {}
        self._notes: list[str] = []
        self._threshold = 0.0
        self.moved = 0  # rounds that decided or wrote otherwise

    def run(self, changed: Callable[[], None]) -> None:
        """Args: changed: called whenever `lines` says more than before."""
        with tempfile.TemporaryDirectory() as folder:
            path = write_random_branch(self._name, self._options.shape, Path(folder) / "judge")
            base = Setting(path, pool=self._options.pool)
            own = self._own
            room = self._set_up(base)
            self._threshold = half(own, self._work)
            self._rounds("gated", lambda work, limit: in_one(own, work, limit), changed)
            self._alone(room)
            changed()
            # A judge of its own has no use for trunk rows behind its exit. It never decodes.
            early = replace(base, depth="exit", graphs=False)
            bound = self._bound
            if bound.context or bound.exit < bound.layers:
                self._set_up(early)
                self._rounds("two engines, early exit", self._in_two, changed)
            if not bound.context:  # the branch's rows of a context beside all of the trunk's: no
                self._set_up(replace(early, depth="full"))
                self._rounds("two engines, full judge", self._in_two, changed)
            if self._name in self._options.twice:
                self._set_up(replace(base, depth="exit", caching=False))
                self._rounds(
                    "one engine, two prefills",
                    lambda work, limit: in_two(own, own, work, limit),
                    changed,
                )
        if not self.moved:
            self._say("every round of every way gave the same decisions and answers")

    def _in_two(self, work: Work, limit: float) -> Outcome:
        return in_two(self._own, self._writer, work, limit)

    def _set_up(self, setting: Setting) -> Room:
        begin = time.perf_counter()
        room = self._own.set_up(setting)
        self._say(f"engine made in {time.perf_counter() - begin:.1f} s")
        return room

    def _say(self, text: str) -> None:
        print(f"  {self._name}: {text}", flush=True)

    def _rounds(
        self, way: str, run: Callable[[Work, float], Outcome], changed: Callable[[], None]
    ) -> None:
        warm, *timed = (run(self._work, self._threshold) for _ in range(self._options.rounds + 1))
        self._found[way] = timed
        expected = self._found["gated"][0]
        for number, one in enumerate((warm, *timed)):
            differs = one.differs(expected)
            if differs:
                self.moved += 1
                self._notes.append(f"{self._name}: {way}, round {number}: {differs}")
                self._say(self._notes[-1])
        seconds = [round(each.seconds, 3) for each in timed]
        self._say(f"{way}: {seconds} s (untimed first: {warm.seconds:.2f} s)")
        changed()

    def _alone(self, room: Room) -> None:
        """Layers of gates that all stay closed, or all open; and what of the pool is lost."""
        few = replace(self._work, contexts=self._work.contexts[:FEW])
        layers = []
        for threshold, opened in ((1.0, 0), (0.0, len(few.contexts))):
            found = in_one(self._own, few, threshold)
            assert len(found.texts) == opened, "a probability of exactly one or below zero"
            layers.append((found.layers - self._bound.asides(few, opened)) / few.rows)
        closed, open_ = (self._bound.of_way("gated", share) for share in (0.0, 1.0))
        lost = 1 - room.beside / room.alone
        note = (
            f"layers a context row, gate closed: {layers[0]:.2f} (bound {closed:.0f})"
            f", open: {layers[1]:.2f} (bound {open_:.0f}); pool of {room.alone} tokens, "
            f"{lost:.3%} lost to the branch."
        )
        self._notes.append(f"{self._name}: {note}")
        self._say(note)

    def lines(self) -> tuple[list[str], list[str]]:
        """Rows of the table so far, and notes below it."""
        base = statistics.median(one.seconds for one in self._found["gated"])
        rows = []
        for way, outcomes in self._found.items():
            all_ = sorted(one.seconds for one in outcomes)
            seconds, first = statistics.median(all_), outcomes[0]
            opened, contexts = len(first.texts), len(self._work.contexts)
            layers = first.layers / self._work.rows
            context = layers - self._bound.asides(self._work, opened) / self._work.rows
            bound = self._bound.of_way(way, opened / contexts)
            least = self._bound.seconds(way, self._work, opened)
            rows.append(
                f"| {self._name} | {way} | {seconds:.2f} ({all_[0]:.2f} to {all_[-1]:.2f}) "
                f"| {(contexts + opened) / seconds:.1f} | {seconds / base:.2f} | {layers:.2f} "
                f"| {context:.2f} | {bound:.2f} | {first.pages} | {least:.2f} "
                f"| {least / seconds:.0%} |"
            )
        return rows, self._notes


def main() -> int:
    """Every branch in turn; the table is written anew after each figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_work(parser)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--branches", nargs="+", default=["20-24-suffix", "32-36-suffix", "20-24-context",
        "32-36-context"], help="fork-exit-adapt",
    )  # fmt: skip
    parser.add_argument(
        "--twice", nargs="*", default=["20-24-suffix"], help="branches also tried by two prefills"
    )
    options = parser.parse_args()
    head = [
        f"{options.shape}, random weights, {options.contexts} contexts of {options.length} tokens, "
        f"half of the gates open, {options.new} tokens written; seconds are medians of "
        f"{options.rounds} rounds (least to most).",
        "",
        "| branch | way | s | decisions and answers a second | time, gated = 1 | layers a context "
        "row | without questions and answers | bound of that | branches' pages at most | limit, s "
        "| share of it |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    out = Path(os.environ.get("OUT", OUT))
    out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    own, writer = Worker(options.shape), Worker(options.shape)
    own.loaded()
    writer.loaded()
    print(f"two models loaded in {time.perf_counter() - begin:.1f} s", flush=True)
    writer.set_up(Setting(pool=options.pool))
    rows: list[str] = []
    notes: list[str] = []
    moved = 0

    def text() -> str:
        return "\n".join([*head, *rows, "", *notes])

    for name in options.branches:
        one = Comparison(options, name, own, writer)
        done, said = list(rows), list(notes)

        def changed(one: Comparison = one, done: list[str] = done, said: list[str] = said) -> None:
            more, told = one.lines()
            rows[:], notes[:] = done + more, said + told
            (out / "gpu_branches.md").write_text(text() + "\n")

        one.run(changed)
        moved += one.moved
    for each in (own, writer):
        each.close()
    print("\n" + text())
    return min(moved, 1)


if __name__ == "__main__":
    sys.exit(main())
