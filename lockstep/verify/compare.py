"""Runs a comparison as its rule says, and counts.

The design. In every round each request is asked twice of A and twice of B, in an order drawn
from the rule's seed. A's second answer and B's second answer then stand in the same relation to
A's first one: asked later, of a server that has seen this prompt before. If B is the same as A
the two are exchangeable, so "B's second differs from A's first" is as likely as "A's second
differs from A's first", request by request, whatever A's noise. That is what `own` and `cross`
count in the relative criterion and in the sign test.

The exact criterion looks for any difference at all, so it compares every pair of answers. A
request on which B differs is then asked `confirm` times more of both, because a noisy A that was
asked twice may have agreed with itself by luck.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product

from lockstep.verify.difference import Score, Silent, differs
from lockstep.verify.endpoint import Reading, Source
from lockstep.verify.rule import Exact, Item, Rule
from lockstep.verify.verdict import Tally, Verdict, judge

Progress = Callable[[int, int], None]
Pair = tuple[Reading, Reading]


@dataclass(slots=True)
class Row:
    """All answers to one request, each side's in the order in which they were asked for.

    Attributes:
        planned: how many each side was asked for in the rounds; those behind are confirmations.
        own, cross, b_own: whether a difference was found among A's answers, between A and B,
            among B's answers; None where it cannot be said.
        more, less: of the pairs that stand in the same relation, see `Tally`.
        unread: why it could not be compared, "" when it could.
    """

    item: Item
    planned: int
    a: list[Reading] = field(default_factory=list)
    b: list[Reading] = field(default_factory=list)
    own: bool | None = None
    cross: bool | None = None
    b_own: bool | None = None
    more: bool = False
    less: bool = False
    unread: str = ""

    def failure(self) -> str:
        """The first answer that failed; "" when none did."""
        for name, readings in (("A", self.a), ("B", self.b)):
            for reading in readings:
                if not reading.ok:
                    return f"{name}: {reading.error}"
        return ""

    def own_pairs(self) -> Iterator[Pair]:
        """A's first and second answer of each round."""
        for index in range(0, self.planned, 2):
            yield self.a[index], self.a[index + 1]

    def cross_pairs(self) -> Iterator[Pair]:
        """A's first and B's second answer of each round."""
        for index in range(0, self.planned, 2):
            yield self.a[index], self.b[index + 1]

    def b_pairs(self) -> Iterator[Pair]:
        """B's first and second answer of each round."""
        for index in range(0, self.planned, 2):
            yield self.b[index], self.b[index + 1]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a comparison found."""

    rule: Rule
    rows: tuple[Row, ...]
    tally: Tally
    verdict: Verdict
    reason: str


async def compare(
    rule: Rule, a: Source, b: Source, progress: Progress = lambda done, of: None
) -> Comparison:
    """Ask everything that the rule says, and judge.

    Args:
        a, b: the rule's endpoints, open.
        progress: called with how many answers there are of how many.
    """
    planned = 2 * rule.rounds
    rows = [Row(item, planned) for item in rule.items]
    order = random.Random(rule.seed)
    asker = _Asker(a, b, rule.concurrency, progress, total=2 * planned * len(rows))
    for _ in range(rule.rounds):
        shuffled = list(rows)
        order.shuffle(shuffled)
        await asker.ask((row, _sides(order, 2)) for row in shuffled)
    for row in rows:
        count(row, rule)
    scores = isinstance(rule.difference, Score)
    if isinstance(rule.criterion, Exact) and rule.criterion.confirm and not scores:
        doubtful = [row for row in rows if row.cross and not row.own]
        asker.total += 2 * rule.criterion.confirm * len(doubtful)
        await asker.ask((row, _sides(order, rule.criterion.confirm)) for row in doubtful)
        for row in doubtful:
            count(row, rule)
    tally = tally_of(rows, rule)
    verdict, reason = judge(tally, rule.criterion)
    return Comparison(rule, tuple(rows), tally, verdict, reason)


def _sides(order: random.Random, times: int) -> list[str]:
    """Each side so many times, in any order."""
    sides = ["a", "b"] * times
    order.shuffle(sides)
    return sides


@dataclass(slots=True)
class _Asker:
    """Asks requests of both sides, so many requests at once; one request's asks in sequence."""

    a: Source
    b: Source
    concurrency: int
    progress: Progress
    total: int
    done: int = 0

    async def ask(self, work: Iterable[tuple[Row, Sequence[str]]]) -> None:
        slots = asyncio.Semaphore(self.concurrency)

        async def one(row: Row, sides: Sequence[str]) -> None:
            async with slots:
                for side in sides:
                    source, answers = (self.a, row.a) if side == "a" else (self.b, row.b)
                    answers.append(await source.ask(row.item.request))
                    self.done += 1
                    self.progress(self.done, self.total)

        async with asyncio.TaskGroup() as group:
            for row, sides in work:
                group.create_task(one(row, sides))


def count(row: Row, rule: Rule) -> None:
    """Fill in what the row's answers show.

    By the exact criterion a difference that was seen counts, whatever failed beside it. By the
    others a request counts with all of its pairs or not at all.
    """
    row.unread = row.failure()
    if isinstance(rule.difference, Score):
        _count_scores(row)
        return
    pairs: tuple[Iterable[Pair], ...]
    if isinstance(rule.criterion, Exact):
        pairs = (combinations(row.a, 2), product(row.a, row.b), combinations(row.b, 2))
    else:
        pairs = (row.own_pairs(), row.cross_pairs(), row.b_pairs())
    row.own, row.cross, row.b_own = (_any(rule, each, row) for each in pairs)
    if isinstance(rule.criterion, Exact) and row.cross:
        row.unread = ""
    elif row.unread:
        row.own = row.own if isinstance(rule.criterion, Exact) else None
        row.cross = None
    # Only pairs that stand in the same relation may be weighed against each other.
    own, cross = _any(rule, row.own_pairs(), row), _any(rule, row.cross_pairs(), row)
    counted = isinstance(rule.criterion, Exact) or not row.unread
    row.more = counted and bool(cross) and own is False
    row.less = counted and bool(own) and cross is False


def _any(rule: Rule, pairs: Iterable[Pair], row: Row) -> bool | None:
    """Whether a pair differs; None when none is seen to and some could not be compared."""
    unread = False
    for one, other in pairs:
        try:
            if one.ok and other.ok:
                if differs(rule.difference, one, other):
                    return True
                continue
        except Silent as error:
            row.unread = row.unread or str(error)
        unread = True
    return None if unread else False


def _count_scores(row: Row) -> None:
    """`own` and `cross` are changes from right to wrong or back."""
    if row.unread or row.item.expect is None:
        return
    right = [row.item.expect.met_by(reading) for reading in (*row.a[:2], *row.b[:2])]
    row.own = right[0] != right[1]
    row.cross = right[0] != right[3]
    row.b_own = right[2] != right[3]
    row.more = right[0] and not right[3]
    row.less = right[3] and not right[0]


def tally_of(rows: Sequence[Row], rule: Rule) -> Tally:
    """The counts that the verdict is made of; of scores, `cross` is what B loses on balance."""
    more, less = sum(row.more for row in rows), sum(row.less for row in rows)
    scores = isinstance(rule.difference, Score)
    return Tally(
        requests=len(rows),
        own=sum(bool(row.own) for row in rows),
        cross=max(0, more - less) if scores else sum(bool(row.cross) for row in rows),
        more=more,
        less=less,
        unread=sum(bool(row.unread) for row in rows),
        scores=scores,
    )
