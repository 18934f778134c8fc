"""The determinism contract of trained branches: neither decisions nor answers know of each other.

A branch's decisions run alone and cold, which is the expectation, and then under every schedule
that the contract says is free. Compared are the bits of its head's outputs, which stand before
any normalisation, threshold or temperature.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lockstep.options import choose, log_softmax, normalise
from lockstep.types import Gate, GateProbe, Request, SamplingParams
from lockstep.verify.outcome import Outcome, compared
from lockstep.verify.schedules import (
    ANSWER,
    FEW_ROWS,
    LONG,
    Answers,
    World,
    alone,
    run,
    strangers,
)

if TYPE_CHECKING:
    from lockstep.branch import Branch

# Tokens of contexts, and of the questions behind them. The first pair together is so short that
# sums which follow the batch show alone.
LENGTHS = ((2, FEW_ROWS - 2), (21, 5), (64, 9), (133, 3), (LONG, 6))
CROWD = 24  # decisions of others
CHUNK = 7


def branch_points(world: World, answers: Answers, asked: Sequence[Request]) -> Iterator[Outcome]:
    """Every point of every branch that the world has.

    Args:
        answers: what `asked` gave alone and cold in an engine that serves no branch.
    """
    for name, branch in world.branches.items():
        yield from _Branch(world, name, branch, answers, asked).points()


class _Branch:
    """The points of one branch."""

    def __init__(
        self,
        world: World,
        name: str,
        branch: Branch,
        answers: Answers,
        asked: Sequence[Request],
    ) -> None:
        self._world, self._name, self._branch = world, name, branch
        self._answers, self._asked = answers, list(asked)
        source = random.Random(name)
        self._decisions = self._drawn("decision", LENGTHS, source)
        lengths = [(source.randint(1, 24), source.randint(1, 8)) for _ in range(CROWD)]
        self._others = self._drawn("other", lengths, source)
        self._expected = alone(world, self._decisions, branches=True)

    def _drawn(
        self, name: str, lengths: Sequence[tuple[int, int]], source: random.Random
    ) -> list[Request]:
        """Requests for a decision on random tokens, as many of them as fit."""
        found = []
        for index, (context, question) in enumerate(lengths):
            length = context + question
            if length + ANSWER > self._world.context:  # behind a gate an answer follows
                continue
            prompt = tuple(source.randrange(self._world.info.vocab_size) for _ in range(length))
            found.append(
                Request(
                    f"{name}{index}",
                    prompt,
                    SamplingParams(max_tokens=0, seed=0),
                    branch=self._name,
                    branch_from=context,
                )
            )
        return found

    def points(self) -> Iterator[Outcome]:
        world = self._world
        again = alone(world, self._decisions, branches=True)
        yield self._same("the same again, alone", again)
        work = [*self._others[::2], *self._decisions, *self._others[1::2]]
        yield self._same("in a crowd", run(world.engine(branches=True), work).answers)
        yield self._prefix_hit()
        small = world.engine(branches=True, max_step_tokens=CHUNK, max_chunk_tokens=CHUNK)
        ran = run(small, self._decisions)
        yield self._same(f"in chunks of at most {CHUNK} tokens", ran.answers)
        ran = run(world.engine(branches=True, depth="exit"), self._decisions)
        yield self._same("contexts that leave at the exit", ran.answers)
        yield from self._beside_writers()
        yield self._gates()
        yield self._control()

    def _point(self, point: str) -> str:
        return f"branch {self._name}: {point}"

    def _same(self, point: str, found: Answers, more: str = "") -> Outcome:
        return compared(self._point(point), self._expected, found, more)

    def _prefix_hit(self) -> Outcome:
        """On what chats over the same contexts have left."""
        point = "on cached prefixes"
        engine = self._world.engine(branches=True)
        run(engine, [_chat(request) for request in self._decisions])
        ran = run(engine, self._decisions)
        hits = sum(count > 0 for count in ran.cached.values())
        if not hits:
            return Outcome(self._point(point), None, "no decision met the cache")
        more = f", {hits} of them on what chats had left ({sum(ran.cached.values())} tokens)"
        return self._same(point, ran.answers, more)

    def _beside_writers(self) -> Iterator[Outcome]:
        """Decisions and answers in the same steps, held against both."""
        writers = [*self._asked, *strangers(self._world.info.vocab_size, CROWD)]
        judged = [*self._decisions, *self._others]
        ran = run(self._world.engine(branches=True), _mixed(judged, writers))
        more = f", in {ran.steps} steps"
        yield self._same("decisions beside answers", ran.of(self._decisions), more)
        point = self._point("answers beside decisions")
        yield compared(point, self._answers, ran.of(self._asked), more)

    def _gates(self) -> Outcome:
        """A gate is its decision and, where it opens, the answer without a gate."""
        point = self._point("a gate is its decision and its answer")
        if self._branch.head == "value":
            return Outcome(point, None, "its head has no options")
        plain = [_chat(request) for request in self._decisions]
        written = alone(self._world, plain)
        gates: list[Request] = []
        expected: Answers = {}
        for request, chat in zip(self._decisions, plain, strict=True):
            scores = _scores(self._expected[f"{request.id}/0"])
            logprobs = log_softmax(scores)
            shares = normalise(logprobs)
            winner = choose(shares, (None,) * len(shares))
            values = (*logprobs, *shares, 1.0)
            bits = struct.pack(f"<{len(values)}d", *values)
            tokens, named, told = written[f"{chat.id}/0"]
            for opens in (True, False):
                name = f"{'open' if opens else 'closed'} {request.id}"
                gates.append(self._gate(name, request, chat, None if opens else winner))
                expected[f"{name}/0"] = (
                    (tokens, (*named, winner), told + bits) if opens else ((), (winner,), bits)
                )
        engine = self._world.engine(branches=True)
        ran = run(engine, _mixed(gates, [*self._others, *self._asked]))
        return compared(point, expected, ran.of(gates))

    def _gate(self, name: str, request: Request, chat: Request, closed: int | None) -> Request:
        """The decision before the chat: it opens for every option but one."""
        count, begins = len(self._branch.options), request.branch_from
        header = chat.prompt[begins:]
        gate = Gate(
            branch=self._name,
            probes=(GateProbe(request.prompt[begins:]),),
            headers=tuple(None if index == closed else header for index in range(count)),
            thresholds=(None,) * count,
            outputs=tuple(range(count)),
        )
        return replace(chat, id=name, prompt=request.prompt[:begins], gate=gate)

    def _control(self) -> Outcome:
        """The comparison must fail where sums follow the batch."""
        point = self._point("control: sums that follow the batch are caught")
        with self._world.sums_that_follow_the_batch():
            lonely = alone(self._world, self._decisions, branches=True)
            work = _mixed(self._decisions, self._others)
            crowd = run(self._world.engine(branches=True), work)
        moved = compared(point, lonely, crowd.of(self._decisions))
        if moved.passed:
            return Outcome(point, False, "they were not: here this test proves nothing")
        return Outcome(point, True, moved.detail)


def _chat(request: Request) -> Request:
    """A text written about the same context, behind a header of its own."""
    prompt = (*request.prompt[: request.branch_from], *request.prompt[:2])
    params = SamplingParams(max_tokens=ANSWER - 2, temperature=0.0, seed=0, logprobs=2)
    return Request(f"chat {request.id}", prompt, params)


def _scores(answer: tuple[tuple[int, ...], tuple[int, ...], bytes]) -> list[float]:
    return [value for (value,) in struct.iter_unpack("<d", answer[2])]


def _mixed(one: Sequence[Request], other: Sequence[Request]) -> list[Request]:
    """Both, in an order that is the same every time."""
    work = [*one, *other]
    random.Random(2).shuffle(work)
    return work
