"""What the next step has: who runs, who is admitted, who makes way.

The policy, in the order in which a step is filled:

1. The most important running sequence (lowest priority value, then oldest) comes first and
   may take the pages of every other one, so something always advances.
2. Sequences that decode take one token each, by importance.
3. What is left of the budget goes to prompts: of equal priority, the ones that have had
   the fewest tokens since admission first (a new short prompt overtakes a long one), each
   at most `max_chunk_tokens` while others compete. The most important one begun is served
   before them, so newcomers cannot starve it. Waiting sequences are admitted here.

When pages run out the least important sequence that is not yet in the plan is preempted:
its pages go back (the tree keeps what it can) and it is computed again later. If none is
left to preempt, a sequence sits the step out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

from lockstep.cache import Match, Need, PrefixCache, StepJournal
from lockstep.config import SchedulerConfig
from lockstep.engine.queues import Queues
from lockstep.engine.routes import from_rows, runs_of, tables_of
from lockstep.engine.sequence import Sequence, State
from lockstep.prefixes import common_prefix
from lockstep.runner.plan import PageCopy, TokenRun
from lockstep.types import LockstepError

WORTH_WAITING = 20
"""A sequence waits for a prefix that another one computes if that saves it at least one part
in this many of the work, in rows times layers, that it would have to do itself."""


class _Admission(Enum):
    STARTED = 1
    SKIPPED = 2  # it waits for a prefix; others may go first
    BLOCKED = 3  # no page or no place; nobody overtakes it


@dataclass(slots=True)
class Draft:
    """A plan in preparation. `members[i]` is the sequence of `runs[i]`."""

    step: int
    budget: int
    runs: list[TokenRun] = field(default_factory=list)
    members: list[Sequence] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)
    journal: StepJournal = field(default_factory=StepJournal)


class Filling(Queues):
    """The queues of a scheduler, and how a step is filled from them.

    Args:
        cache, layers, model: see `Queues`. config: budgets.
    """

    def __init__(
        self,
        cache: PrefixCache,
        config: SchedulerConfig,
        layers: tuple[int, int],
        model: str,
    ) -> None:
        super().__init__(cache, layers, model)
        self.config = config.resolved("cpu")  # of what the caller left open
        self._now = 0.0

    def _make_way(self) -> None:
        """Preempt strictly less important sequences for the most urgent waiting one."""
        candidate = next(self._admissible(self.waiting), None)
        if candidate is None:
            return
        while self.running and self.running[-1].rank[0] > candidate.rank[0]:
            match = self._lookup(candidate)
            if len(self.running) < self.config.max_sequences and self._has_room(candidate, match):
                return
            self._preempt(self.running[-1])

    def _plan_head(self, draft: Draft) -> None:
        if not self.running:
            return
        head = self.running[0]
        decoding = sum(1 for sequence in self.running if sequence.remaining == 1)
        share = max(1, draft.budget - decoding) if head.remaining > 1 else 1
        if not self._advance(head, draft, min(share, self._chunk_limit())):
            self._restart(head, draft)

    def _plan_decodes(self, draft: Draft) -> None:
        for sequence in list(self.running):
            if draft.budget <= 0:
                return
            if (
                sequence.state is State.RUNNING  # not preempted by one before it
                and sequence.planned != draft.step
                and sequence.remaining == 1
            ):
                self._advance(sequence, draft, 1)

    def _plan_prompts(self, draft: Draft) -> None:
        limit = self._chunk_limit()
        begun = [s for s in self.running if s.remaining > 1 and s.planned != draft.step]
        if begun and draft.budget > 0 and all(len(run.tokens) == 1 for run in draft.runs):
            # The oldest prompt has its chunk in every step; here the head was not one.
            self._advance(begun.pop(0), draft, limit)
        begun.sort(key=lambda s: (s.rank[0], s.attained, s.number))
        queue = self._admissible(list(self.waiting))
        newcomer = next(queue, None)
        skipped = False
        looks = self.config.max_sequences  # lookups in vain, so that a long queue costs little
        while draft.budget > 0 and (begun or newcomer is not None):
            if newcomer is not None and (not begun or newcomer.rank[0] <= begun[0].rank[0]):
                outcome = self._admit(newcomer, draft, limit)
                looks -= outcome is _Admission.SKIPPED
                blocked = outcome is _Admission.BLOCKED or looks == 0
                newcomer = None if blocked else next(queue, None)
                self._stalled = outcome is _Admission.BLOCKED and not skipped
                skipped |= outcome is _Admission.SKIPPED
            else:
                sequence = begun.pop(0)
                # Not preempted by one before it, nor then admitted anew: that was its chunk.
                if sequence.state is State.RUNNING and sequence.planned != draft.step:
                    self._advance(sequence, draft, limit)

    def _chunk_limit(self) -> int:
        """Most prompt tokens of one sequence: all of the budget if nobody else could use it."""
        competing = len(self.running) + sum(1 for _ in islice(self._admissible(self.waiting), 2))
        if competing > 1:
            return self.config.max_chunk_tokens
        return self.config.max_step_tokens

    def _advance(self, sequence: Sequence, draft: Draft, most: int) -> bool:
        """Plan the sequence's next tokens, at most `most`; False if it gets no pages."""
        lease = sequence.lease
        assert lease is not None
        start = sequence.computed
        total = len(sequence.tokens)
        if sequence.route is None and 0 < sequence.kept_until <= start:
            # What was missing is made, in a step that is done: the rows are no more needed.
            sequence.kept_until, sequence.need = 0, self.cache.layout.whole
            self.cache.narrow(lease, self.cache.layout.whole.wants, lease.covered)
        count = min(total - start, most, draft.budget)
        if sequence.route is not None and sequence.route.doubles and start < sequence.route.begins:
            count = min(count, max(1, draft.budget // 2))
        size = self.cache.page_tokens
        if self._alone is sequence:
            count = min(count, size - start % size)  # what `fits_alone` reckons with
        elif start + count < total and count > size:
            count -= (start + count) % size  # whole pages, which others can share at once
        if start + count > lease.covered:
            self.cache.trim(lease, min(start, sequence.shared))
            count = self._take_pages(sequence, draft, count)
            if count == 0:
                return False
        end = start + count
        if count > 1 or end % size == 0 or start % size == 0:
            until = min(end, sequence.shared)
            tail = count > 1 and end >= sequence.kept_until  # else there is a longer one
            self.cache.publish(lease, sequence.tokens, until, draft.journal, tail=tail)
        sequence.computed = end
        sequence.attained += count
        sequence.planned = draft.step
        if sequence.route is None:
            runs = self._plain_runs(sequence, start, end)
        else:
            runs = runs_of(sequence, sequence.route, start, end, len(draft.runs))
        draft.runs.extend(runs)
        draft.members.extend([sequence] * len(runs))
        doubles = sequence.route is not None and sequence.route.doubles
        # Below 0 where a single row is doubled.
        draft.budget -= sum(len(run.tokens) for run in runs) if doubles else count
        return True

    def _plain_runs(self, sequence: Sequence, start: int, end: int) -> list[TokenRun]:
        """What positions [start, end) of the trunk's own sequence become."""
        lease, made = sequence.lease, min(end, sequence.kept_until)
        assert lease is not None
        runs, tables = [], lease.tables
        if start < made:
            runs.append(from_rows(sequence, start, made, self.layers[1]))
            start = made
            tables = tables_of(lease, sequence.need.writes)
        if start == end:
            return runs
        ends = end == len(sequence.tokens)
        rows, targets = sequence.logit_rows(start, end)
        runs.append(
            TokenRun(
                sequence.number,
                start,
                sequence.tokens[start:end],
                tables,
                sequence.layers,
                None,
                rows,
                targets,
                sequence.sample_spec() if ends and sequence.draws else None,
                sequence.request.sampling if targets else None,
                sequence.request.pooling if rows else "",
            )
        )
        return runs

    def _take_pages(self, sequence: Sequence, draft: Draft, count: int) -> int:
        """Pages for the next tokens, by eviction, a smaller chunk, then preemption.

        Returns how many tokens there are pages for, at most `count`; 0 for none.
        """
        start = sequence.computed
        while True:
            chunk = count
            while chunk:
                if self._grow(sequence, start, start + chunk):
                    return chunk
                chunk = 0 if chunk <= self.cache.page_tokens else chunk // 2
            victim = self._victim(sequence, draft)
            if victim is None:
                break
            self._preempt(victim)
        return 1 if self._grow(sequence, start, start + 1) else 0

    def _grow(self, sequence: Sequence, start: int, end: int) -> bool:
        """Pages for what positions [start, end) write; False, with none, if they are not there."""
        lease, need = sequence.lease, sequence.need
        assert lease is not None
        made = min(end, max(start, sequence.kept_until))
        spans = dict.fromkeys((want.group for want in need.wants), (made, end))
        spans.update(dict.fromkeys((want.group for want in need.lagging), (start, end)))
        if need.rows is not None:
            spans[need.rows.group] = (made, min(end, sequence.keeps_until(made)))
        return self.cache.grow(lease, start, end, spans)

    def _victim(self, sequence: Sequence, draft: Draft) -> Sequence | None:
        """The least important sequence, less important than this one and not in the plan."""
        for other in reversed(self.running):
            if other.rank <= sequence.rank:
                return None
            if other.planned != draft.step:
                return other
        return None

    def _restart(self, head: Sequence, draft: Draft) -> None:
        """The head has preempted everybody and still lacks a page: pages that it holds are
        scattered over slabs that another group needs. Start it again on an empty pool, where
        it fits (checked when it was submitted), and admit nobody beside it."""
        self._preempt(head)
        self.cache.flush()
        self._alone = head
        if self._admit(head, draft, self.cache.page_tokens) is not _Admission.STARTED:
            raise LockstepError(f"sequence {head.number} does not fit an empty pool")

    # --- admission ------------------------------------------------------------------------

    def _admissible(self, queue: Iterable[Sequence]) -> Iterator[Sequence]:
        """Sequences of the queue in order, without those that wait for another's prefix or
        for a gate."""
        for sequence in queue:
            if sequence.held:
                continue
            other = sequence.waits_for
            if other is not None:
                if other.state is State.RUNNING and other.computed < sequence.waits_until:
                    continue
                sequence.waits_for = None
            yield sequence

    def _admit(self, sequence: Sequence, draft: Draft, limit: int) -> _Admission:
        """Start a waiting sequence with its first chunk, if it has a place, pages, and no
        better chance in waiting for a prefix."""
        if self._alone not in (None, sequence) or len(self.running) >= self.config.max_sequences:
            return _Admission.BLOCKED
        match = self._lookup(sequence)
        if self._should_wait(sequence, match):
            return _Admission.SKIPPED
        if self.running and not self._has_room(sequence, match):
            return _Admission.BLOCKED
        sequence.lease, copies = self.cache.open(match, draft.journal)
        sequence.need, sequence.computed, found = match.need, match.behind, match.length
        sequence.kept_until = found if match.behind < found else 0
        sequence.attained = 0
        self._move(sequence, self.waiting, self.running, State.RUNNING)
        if not self._advance(sequence, draft, limit):
            self._suspend(sequence)
            return _Admission.BLOCKED
        draft.copies.extend(copies)
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = found
            sequence.started = self._now
            self._counts["prompt_tokens"] += sequence.prompt_len
            self._counts["cached_tokens"] += found
        return _Admission.STARTED

    def _lookup(self, sequence: Sequence) -> Match:
        """What of the sequence's prefix is there. Which way a decision takes is settled here."""
        limit = sequence.reusable_limit

        def match(need: Need) -> Match:
            return self.cache.match(sequence.identity, sequence.tokens, limit, need)

        if not sequence.routes:
            found = [match(need) for need in self.cache.plain()]
            return min(found, key=lambda one: one.work(limit))
        sequence.route, *others = sequence.routes
        best = match(sequence.route.need)
        for route in others:
            there = match(route.need)
            if max(there.length, there.held) - best.length >= self.cache.page_tokens:
                sequence.route, best = route, there
        return best

    def _has_room(self, sequence: Sequence, match: Match) -> bool:
        """Whether its tokens so far fit beside what the running ones still need for theirs,
        with a page to spare for the growth of each."""
        needs = self.cache.demand(match, len(sequence.tokens))
        for want in match.need.all:
            needs[want.group] += len(self.running)
        for other in self.running:
            if other.lease is not None and (other.remaining > 1 or other.lease.held):
                more = self.cache.outstanding(other.lease, len(other.tokens))
                needs = [need + extra for need, extra in zip(needs, more, strict=True)]
        return self.cache.could_fit(needs)

    def _should_wait(self, sequence: Sequence, match: Match) -> bool:
        """Whether a step under way, or a running sequence, is about to compute enough of
        this one's prefix. Sets `waits_for` in the second case."""
        need, limit = match.need, sequence.reusable_limit
        work = match.work(limit)
        worth = work + (len(sequence.tokens) - limit) * need.fresh
        saved = (match.soon - match.length) * need.fresh
        if saved and saved * WORTH_WAITING >= worth:
            return True
        for other in self.running:
            if other.remaining == 0 or other.rank[0] > sequence.rank[0]:
                continue
            known = self._stands_on(match, other)
            if known is None or not _serves(other.need, need):
                continue
            most = min(other.shared, limit)
            if most <= other.computed:
                continue
            same = known + common_prefix(other.tokens[known:most], sequence.tokens[known:most])
            until = min(same, most)
            if until <= other.computed:
                continue
            behind = until if set(need.lagging) <= set(other.need.writes) else match.behind
            left = (until - min(until, behind)) * need.made + (limit - until) * need.fresh
            if work > left and (work - left) * WORTH_WAITING >= worth:
                sequence.waits_for, sequence.waits_until = other, until
                return True
        return False

    def _stands_on(self, match: Match, other: Sequence) -> int | None:
        """How much of the matched path the other one has told the tree of, if it goes on from
        there."""
        lease, size = other.lease, self.cache.page_tokens
        if lease is None:
            return None
        place = lease.published
        if place == 0:
            on_path = self.cache.tree.roots.get(match.identity) is lease.node
        else:
            on_path = place * size <= match.walked and match.nodes[place - 1] is lease.node
        return place * size if on_path else None


def _serves(writer: Need, reader: Need) -> bool:
    """Whether a prefix by one that has the first need can be gone on from with the second."""
    writes = set(writer.writes)
    above = {*reader.lagging, *reader.held}
    return writes.issuperset(reader.wants) and (
        reader.rows is None or reader.rows in writes or writes.issuperset(above)
    )
