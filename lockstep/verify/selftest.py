"""The determinism contract, point by point, on this machine and with this model.

One set of requests runs alone and cold, which is the expectation; then under every schedule that
the contract says is free. Token ids and the bits of every logprob must be equal, never close.
At the end the same comparison runs on sums that follow the batch, and must find the difference:
a check that cannot fail proves nothing.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import msgspec

from lockstep.branch import read_branch
from lockstep.config import ModelOptions
from lockstep.types import Request
from lockstep.verify.branch_points import branch_points
from lockstep.verify.canonical import digest
from lockstep.verify.outcome import Outcome, compared
from lockstep.verify.report import Report, Section
from lockstep.verify.schedules import (
    FEW_ROWS,
    STRANGERS,
    Answers,
    World,
    alone,
    probes,
    renamed,
    run,
    strangers,
    urgent,
)

CHUNKS = (7, 64, 512)

NO_BRANCH = "trained branches: name them with --branch NAME=FOLDER"
NOT_COVERED = (
    "the HTTP server and its text work: `lockstep verify noise URL`",
    "speculation: this engine has none",
    "grammars: their masks are integers, the draw below them is covered",
    "other machines, device kinds and dtypes: there the fingerprint differs, and bits may",
)


def self_test(
    options: ModelOptions, branches: Mapping[str, str] | None = None
) -> Iterator[Outcome]:
    """Every point, as it is examined.

    Args:
        branches: folders of trained branches, by name.

    Raises:
        LockstepError: the model or a branch does not load, or the engine fails.
    """
    world = World(options, branches)
    info = world.info
    yield Outcome(
        "loads",
        True,
        f"{info.architecture}, {info.dtype} on {info.device}, backend {info.backend}, "
        f"{info.threads} threads, fingerprint {info.fingerprint}",
    )
    asked = [request for request in probes(info.vocab_size) if _fits(request, world.context)]
    examined = _Examination(world, asked)
    yield from examined.points()
    yield from _threads(options, world, examined.expected, asked)
    yield from branch_points(world, examined.expected, asked)
    yield examined.control()


def _fits(request: Request, context: int) -> bool:
    return len(request.prompt) + (request.sampling.max_tokens or 0) <= context


class _Examination:
    """The points that one loaded model can show."""

    def __init__(self, world: World, asked: Sequence[Request]) -> None:
        self._world = world
        self._asked = list(asked)
        self._others = strangers(world.info.vocab_size, STRANGERS)
        self.expected = alone(world, self._asked)

    def points(self) -> Iterator[Outcome]:
        yield self._same("the same again, alone", alone(self._world, self._asked))
        yield self._crowd()
        yield self._order()
        for size in CHUNKS:
            ran = run(self._world.engine(max_step_tokens=size, max_chunk_tokens=size), self._asked)
            yield self._same(f"in chunks of at most {size} tokens", ran.answers)
        yield self._prefix_hit()
        yield self._preempted()
        yield self._copies()
        yield self._seeds()
        if self._world.info.device.startswith("cuda"):
            yield from self._device()

    def _same(self, point: str, found: Answers, more: str = "") -> Outcome:
        return compared(point, self.expected, found, more)

    def _crowd(self) -> Outcome:
        middle = STRANGERS // 2
        work = [*self._others[:middle], *self._asked, *self._others[middle:]]
        ran = run(self._world.engine(), work)
        more = f", among {STRANGERS} strangers in {ran.steps} steps"
        return self._same("in a crowd", ran.of(self._asked), more)

    def _order(self) -> Outcome:
        work = [*self._others, *self._asked]
        random.Random(1).shuffle(work)
        ran = run(self._world.engine(), work[::-1])
        return self._same("in another order of arrival", ran.of(self._asked))

    def _prefix_hit(self) -> Outcome:
        engine = self._world.engine()
        run(engine, renamed(self._asked, "before"))
        ran = run(engine, self._asked)
        hits = sum(count > 0 for count in ran.cached.values())
        if not hits:
            return Outcome("on a cached prefix", None, "no request met the cache")
        more = f", {hits} of them on cached prefixes ({sum(ran.cached.values())} tokens)"
        return self._same("on a cached prefix", ran.of(self._asked), more)

    def _preempted(self) -> Outcome:
        point = "preempted and begun again in a small pool"
        runner = self._world.plain_runner(slabs=0)
        late = urgent(self._world.info.vocab_size)
        if not _fits(late, runner.max_context):
            return Outcome(point, None, f"its context of {runner.max_context} tokens is too short")
        ran = run(self._world.engine(runner), [*self._others, *self._asked], late)
        if not ran.preemptions:
            return Outcome(point, None, "nothing was preempted")
        more = f", {ran.preemptions} preemptions"
        return self._same(point, ran.of(self._asked), more)

    def _copies(self) -> Outcome:
        """Equal requests with a seed, at once: a slot's number must not enter the draw."""
        drawn = [request for request in self._asked if request.sampling.temperature > 0]
        copies = [copy for suffix in "ab" for copy in renamed(drawn, suffix)]
        ran = run(self._world.engine(), [*copies, *drawn])
        for suffix in "ab":
            found = {
                key.replace(f" {suffix}/", "/"): value
                for key, value in ran.answers.items()
                if f" {suffix}/" in key
            }
            expected = {key: value for key, value in self.expected.items() if key in found}
            outcome = compared("equal seeds, asked at once", expected, found)
            if not outcome.passed:
                return outcome
        expected = {key: self.expected[key] for key in ran.of(drawn)}
        return compared("equal seeds, asked at once", expected, ran.of(drawn), ", three times each")

    def _seeds(self) -> Outcome:
        """Else equal texts of equal seeds would say nothing."""
        (first, *_) = [request for request in self._asked if request.sampling.temperature > 0]
        others = [
            replace(first, id=f"seed {seed}", sampling=replace(first.sampling, seed=seed))
            for seed in range(100, 104)
        ]
        ran = run(self._world.engine(), others)
        texts = {tokens for tokens, _, _ in ran.answers.values()}
        return Outcome(
            "other seeds draw otherwise", len(texts) > 1, f"{len(texts)} texts of 4 seeds"
        )

    def _device(self) -> Iterator[Outcome]:
        plain = self._world.plain_runner()
        ran = run(self._world.engine(plain), self._asked)
        yield self._same("without captured graphs", ran.answers)
        for overlap in (False, True):
            ran = run(self._world.engine(overlap=overlap), self._asked)
            yield self._same(f"steps planned ahead {'on' if overlap else 'off'}", ran.answers)

    def control(self) -> Outcome:
        """The comparison must fail where sums follow the batch."""
        point = "control: sums that follow the batch are caught"
        runner = self._world.plain_runner()
        with self._world.sums_that_follow_the_batch():
            lonely = alone(self._world, self._asked, runner)
            crowd = run(self._world.engine(runner), [*self._others, *self._asked])
        moved = compared(point, lonely, crowd.of(self._asked))
        if moved.passed:
            return Outcome(point, False, "they were not: here this test proves nothing")
        return Outcome(point, True, f"K cut in two for up to {FEW_ROWS} rows: {moved.detail}")


def _threads(
    options: ModelOptions, world: World, expected: Answers, asked: Sequence[Request]
) -> Iterator[Outcome]:
    """Another number of threads, where the bits are promised not to depend on it."""
    if world.info.backend != "native":
        yield Outcome(
            "on another number of threads",
            None,
            f"backend {world.info.backend} makes no promise about it",
        )
        return
    for threads in sorted({1, 2, 3} - {world.info.threads}):
        other = World(replace(options, threads=threads))
        found = run(other.engine(), asked).answers
        yield compared(f"on {threads} threads", expected, found)


def verdict_of(outcomes: Sequence[Outcome]) -> str:
    """ "pass" when nothing failed; what could not be examined is told, and fails nothing."""
    return "fail" if any(outcome.passed is False for outcome in outcomes) else "pass"


def reason_of(outcomes: Sequence[Outcome]) -> str:
    """One line for people."""
    failed = [outcome.point for outcome in outcomes if outcome.passed is False]
    if failed:
        return f"{len(failed)} of {len(outcomes)} points failed: {', '.join(failed)}"
    skipped = sum(outcome.passed is None for outcome in outcomes)
    rest = f", {skipped} could not be examined here" if skipped else ""
    return f"{len(outcomes) - skipped} points hold to the bit{rest}"


def plan_hash(options: ModelOptions, branches: Mapping[str, str] | None = None) -> str:
    """Hash of what is examined: the model, its options, the branches and every request.

    Raises:
        BranchError: a folder is no branch's.
    """
    asked: dict[str, Any] = {
        "options": asdict(options),
        "branches": {name: read_branch(at).key for name, at in (branches or {}).items()},
        "chunks": list(CHUNKS),
        "requests": [asdict(request) for request in probes(1 << 15)],
        "strangers": [asdict(request) for request in strangers(1 << 15, STRANGERS)],
    }
    return digest(json.loads(msgspec.json.encode(asked)))


def report_of(
    outcomes: Sequence[Outcome], model: str, branches: Mapping[str, str] | None = None
) -> Report:
    """What holds, what does not, and what was not examined."""
    words = {True: "holds", False: "FAILS", None: "not examined"}
    rows = [(words[one.passed], one.point, one.detail) for one in outcomes]
    missing = [(text,) for text in (NOT_COVERED if branches else (NO_BRANCH, *NOT_COVERED))]
    return Report(
        title=f"Determinism of {model} on this machine",
        lead="Token ids and the bits of every logprob, alone and cold against every schedule.",
        verdict=verdict_of(outcomes),
        reason=reason_of(outcomes),
        sections=[
            Section("The contract, point by point", (), ("", "point", "found"), rows),
            Section("Not covered by this test", (), (), missing),
        ],
    )
