"""Which token runs go into the next step: pure bookkeeping, no tensors, no clock.

State in (`add`, `cancel`), plan out (`schedule`), results back (`complete` or `fail`).
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

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import islice

from lockstep.cache import Match, PrefixCache, StepJournal
from lockstep.cache.tree import common_prefix
from lockstep.config import SchedulerConfig
from lockstep.engine.queues import Queues
from lockstep.engine.sequence import Sequence, State
from lockstep.runner.plan import PageCopy, Plan, StepResult, TokenRun
from lockstep.types import (
    FinishReason,
    LockstepError,
    SequenceOutput,
    TokenLogprob,
)

WORTH_WAITING = 20
"""A sequence waits for a prefix that another one computes if that saves it at least one
in this many of the tokens that it would have to compute itself."""


class _Admission(Enum):
    STARTED = 1
    SKIPPED = 2  # it waits for a prefix; others may go first
    BLOCKED = 3  # no page or no place; nobody overtakes it


@dataclass(slots=True)
class _Draft:
    """A plan in preparation. `members[i]` is the sequence of `runs[i]`."""

    step: int
    budget: int
    runs: list[TokenRun] = field(default_factory=list)
    members: list[Sequence] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)
    journal: StepJournal = field(default_factory=StepJournal)


def check_result(plan: Plan, result: StepResult) -> None:
    """Raise `LockstepError` unless the result answers everything that the plan asked."""
    if result.step != plan.step or len(result.runs) != len(plan.runs):
        raise LockstepError(
            f"step {plan.step} of {len(plan.runs)} runs was answered by "
            f"step {result.step} of {len(result.runs)} runs"
        )
    for run, drawn in zip(plan.runs, result.runs, strict=True):
        if drawn.error:
            continue
        wanted = sum(1 for target in run.prompt_targets if target >= 0)
        missing = (run.sample is not None and drawn.token is None and not drawn.stuck) or (
            bool(run.pooling) and not drawn.pooled
        )
        if missing or len(drawn.prompt_logprobs) != wanted:
            raise LockstepError(
                f"step {plan.step}, sequence {run.sequence}: "
                "a token, a logprob or a pooled row is missing"
            )


class Scheduler(Queues):
    """Continuous batching over a `PrefixCache`.

    `schedule` and `complete` (or `fail`) alternate; `cancel` comes between a complete and
    the next schedule, `add` at any time. Behind a plan under way `schedule_ahead` may make
    one more, which is then the next to complete. Ownership: the scheduler owns the leases
    of running sequences. Failure: `fail` ends the plan's sequences and undoes what it
    registered, and what a plan behind it did.

    Args:
        cache: pages and prefixes; must hold any single sequence that is added.
        config: budgets. layers: the trunk's layer range. model: for the cache identity.
    """

    def __init__(
        self, cache: PrefixCache, config: SchedulerConfig, layers: tuple[int, int], model: str
    ) -> None:
        super().__init__(cache, layers, model)
        self.config = config.resolved("cpu")  # of what the caller left open
        self._under_way: deque[_Draft] = deque()  # the next to complete first
        self._step = 0
        self._now = 0.0

    def cancel(self, request_id: str, choice: int | None = None) -> list[SequenceOutput]:
        """End a request, or one choice of it; unknown ones give no output."""
        if self._under_way:
            raise LockstepError("cancel() called before the last plan's complete() or fail()")
        outputs = []
        for sequence in list(self.requests.get(request_id, ())):
            if choice is None or sequence.choice == choice:
                self._counts["cancelled"] += 1
                outputs.append(self._end(sequence, FinishReason.CANCELLED))
        return outputs

    # --- a step ----------------------------------------------------------------------

    def schedule(self, now: float = 0.0) -> Plan | None:
        """The next step, or None when nothing is to do. Pages are taken, copies listed, and
        pages that the step fills are registered for sharing; `complete` or `fail` follows.
        `now` is only noted as `started` of what the step admits."""
        if self._under_way:
            raise LockstepError("schedule() called before the last plan's complete() or fail()")
        self._step += 1
        self._now = now
        draft = _Draft(self._step, self.config.max_step_tokens)
        self._make_way()
        self._plan_head(draft)
        self._plan_decodes(draft)
        self._plan_prompts(draft)
        if not draft.runs:
            self.cache.rollback(draft.journal)
            return None
        return self._begin(draft)

    def schedule_ahead(self) -> Plan | None:
        """The step behind the one under way, of which every run draws a token: each sequence
        that goes on takes one step more, from the token drawn there, whatever it is.

        None where `schedule` could do better: somebody is to be admitted, a sequence sits the
        step out, pages are short, or nobody is known to go on. A token that ends a sequence
        makes its run of this plan void, and `complete` leaves it out.
        """
        if len(self._under_way) != 1:
            raise LockstepError("schedule_ahead() goes behind exactly one plan under way")
        before = self._under_way[0]
        members = [(i, s) for i, s in enumerate(before.members) if s.state is State.RUNNING]
        if self._alone is not None or len(members) != len(self.running):
            return None
        if self.waiting and not self._stalled:
            return None
        # The token that is being drawn is the last where it makes the sequence full.
        members = [(i, s) for i, s in members if len(s.tokens) + 1 < s.max_len]
        if not members or not all(self._room_ahead(sequence) for _, sequence in members):
            return None
        draft = _Draft(self._step + 1, 0)
        for index, sequence in members:
            self._follow(sequence, index, draft)
        self._step += 1
        return self._begin(draft)

    def _begin(self, draft: _Draft) -> Plan:
        self._under_way.append(draft)
        self._counts["steps"] += 1
        return Plan(draft.step, tuple(draft.runs), tuple(draft.copies))

    def _room_ahead(self, sequence: Sequence) -> bool:
        """Whether the token being drawn has a page to stand on, now or without preemption."""
        lease, start = sequence.lease, sequence.computed
        assert lease is not None
        if start < lease.covered:
            return True
        self.cache.trim(lease, start)
        return self.cache.grow(lease, start, start + 1)

    def _follow(self, sequence: Sequence, index: int, draft: _Draft) -> None:
        """Plan the token that run `index` of the plan under way draws."""
        lease, start = sequence.lease, sequence.computed
        assert lease is not None
        if start % self.cache.page_tokens == 0:
            # What that plan fills. It could not be published there if it was made ahead too.
            self.cache.publish(lease, sequence.tokens, start, draft.journal)
        draft.runs.append(
            TokenRun(
                sequence.number,
                start,
                (0,),
                lease.tables,
                sequence.layers,
                logits=1,
                sample=sequence.sample_spec(ahead=1),
                follows=index,
            )
        )
        draft.members.append(sequence)
        sequence.computed += 1
        sequence.attained += 1
        sequence.planned = draft.step

    def complete(self, plan: Plan, result: StepResult) -> list[SequenceOutput]:
        """Take in the results of the plan under way, which `check_result` has accepted;
        outputs in the plan's order."""
        draft = self._take(plan)
        self.cache.commit(draft.journal)
        outputs = []
        for sequence, run, drawn in zip(draft.members, plan.runs, result.runs, strict=True):
            if sequence.state is State.ENDED:  # with the token that this run followed
                continue
            self._counts["computed_tokens"] += len(run.tokens)
            if drawn.error:
                assert sequence.lease is not None
                self.cache.forget(sequence.lease)
                outputs.append(self._fail(sequence, drawn.error))
                continue
            sequence.prompt_logprobs.extend(drawn.prompt_logprobs)
            if run.pooling:
                sequence.pooled.append(drawn.pooled)
                sequence.pooled_rows = run.start + len(run.tokens)
            if drawn.stuck:
                outputs.append(self._end_stuck(sequence))
            elif run.sample is not None:
                assert drawn.token is not None  # `check_result`
                outputs.append(self._take_token(sequence, drawn.token, drawn.logprob))
            elif sequence.remaining == 0:
                self._counts["finished"] += 1
                output = self._end(sequence, FinishReason.LENGTH)
                scores = self._prompt_logprobs(sequence)
                pooled = tuple(sequence.pooled)
                outputs.append(replace(output, prompt_logprobs=scores, pooled=pooled))
        return outputs

    def _take_token(
        self, sequence: Sequence, token: int, logprob: TokenLogprob | None
    ) -> SequenceOutput:
        """Append a drawn token, and end the sequence if it was the last."""
        sequence.tokens.append(token)
        self._counts["generated_tokens"] += 1
        finish = sequence.finish_after(token)
        if finish is not None:  # a plan ahead may be computing its row
            sequence.computed = len(sequence.tokens) - 1
        output = SequenceOutput(
            sequence.request.id,
            sequence.choice,
            (token,),
            () if logprob is None else (logprob,),
            self._prompt_logprobs(sequence) if sequence.num_output == 1 else None,
            finish,
            sequence.cached_tokens,
            started=sequence.started,
        )
        if finish is FinishReason.ERROR:
            assert sequence.grammar is not None  # nothing else fails behind a sound step
            self._fail(sequence, sequence.grammar.error)
            return replace(output, error=sequence.grammar.error)
        if finish is not None:
            self._counts["finished"] += 1
            self._end(sequence, finish)
        return output

    def _end_stuck(self, sequence: Sequence) -> SequenceOutput:
        """End a sequence that could draw nothing: complete as it stands, or a failure."""
        reason = sequence.finish_stuck()
        if reason:
            return self._fail(sequence, reason)
        self._counts["finished"] += 1
        scores = self._prompt_logprobs(sequence) if not sequence.num_output else None
        return replace(self._end(sequence, FinishReason.STOP), prompt_logprobs=scores)

    def fail(self, plan: Plan, error: str) -> list[SequenceOutput]:
        """The plan under way raised: its sequences end with ERROR, all others go on."""
        draft = self._take(plan)
        while self._under_way:
            self.cache.rollback(self._under_way.pop().journal)
        self.cache.rollback(draft.journal)
        return [
            self._fail(sequence, error)
            for sequence in draft.members
            if sequence.state is not State.ENDED
        ]

    @property
    def is_void(self) -> bool:
        """Whether every sequence of the plan under way ended with the token it followed."""
        return all(s.state is State.ENDED for s in self._under_way[0].members)

    @property
    def journals(self) -> list[StepJournal]:
        """Of the plans under way, for `PrefixCache.check_integrity`."""
        return [draft.journal for draft in self._under_way]

    def _take(self, plan: Plan) -> _Draft:
        if not self._under_way or self._under_way[0].step != plan.step:
            raise LockstepError(f"step {plan.step} is not the plan under way")
        return self._under_way.popleft()

    @staticmethod
    def _prompt_logprobs(sequence: Sequence) -> tuple[TokenLogprob | None, ...] | None:
        if not sequence.scores_prompt:
            return None
        return (*(None,) * sequence.request.score_from, *sequence.prompt_logprobs)

    # --- filling a step ------------------------------------------------------------------

    def _make_way(self) -> None:
        """Preempt strictly less important sequences for the most urgent waiting one."""
        candidate = next(self._admissible(self.waiting), None)
        if candidate is None:
            return
        while self.running and self.running[-1].rank[0] > candidate.rank[0]:
            match = self.cache.match(
                candidate.identity, candidate.tokens, candidate.reusable_limit, candidate.wants
            )
            if len(self.running) < self.config.max_sequences and self._has_room(candidate, match):
                return
            self._preempt(self.running[-1])

    def _plan_head(self, draft: _Draft) -> None:
        if not self.running:
            return
        head = self.running[0]
        decoding = sum(1 for sequence in self.running if sequence.remaining == 1)
        share = max(1, draft.budget - decoding) if head.remaining > 1 else 1
        if not self._advance(head, draft, min(share, self._chunk_limit())):
            self._restart(head, draft)

    def _plan_decodes(self, draft: _Draft) -> None:
        for sequence in list(self.running):
            if draft.budget == 0:
                return
            if (
                sequence.state is State.RUNNING  # not preempted by one before it
                and sequence.planned != draft.step
                and sequence.remaining == 1
            ):
                self._advance(sequence, draft, 1)

    def _plan_prompts(self, draft: _Draft) -> None:
        limit = self._chunk_limit()
        begun = [s for s in self.running if s.remaining > 1 and s.planned != draft.step]
        if begun and all(len(run.tokens) == 1 for run in draft.runs):
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

    def _advance(self, sequence: Sequence, draft: _Draft, most: int) -> bool:
        """Plan the sequence's next tokens, at most `most`; False if it gets no pages."""
        lease = sequence.lease
        assert lease is not None
        start = sequence.computed
        total = len(sequence.tokens)
        count = min(total - start, most, draft.budget)
        size = self.cache.page_tokens
        if self._alone is sequence:
            count = min(count, size - start % size)  # what `fits_alone` reckons with
        elif start + count < total and count > size:
            count -= (start + count) % size  # whole pages, which others can share at once
        if start + count > lease.covered:
            self.cache.trim(lease, start)
            count = self._take_pages(sequence, draft, count)
            if count == 0:
                return False
        end = start + count
        if count > 1 or end % size == 0 or start % size == 0:
            self.cache.publish(lease, sequence.tokens, end, draft.journal, tail=count > 1)
        rows, targets = sequence.logit_rows(start, end)
        draft.runs.append(
            TokenRun(
                sequence.number,
                start,
                sequence.tokens[start:end],
                lease.tables,
                sequence.layers,
                None,
                rows,
                targets,
                sequence.sample_spec() if end == total and sequence.draws else None,
                sequence.request.sampling if targets else None,
                sequence.request.pooling if rows else "",
            )
        )
        draft.members.append(sequence)
        draft.budget -= count
        sequence.computed = end
        sequence.attained += count
        sequence.planned = draft.step
        return True

    def _take_pages(self, sequence: Sequence, draft: _Draft, count: int) -> int:
        """Pages for the next tokens, by eviction, a smaller chunk, then preemption.

        Returns how many tokens there are pages for, at most `count`; 0 for none.
        """
        lease = sequence.lease
        assert lease is not None
        start = sequence.computed
        while True:
            chunk = count
            while chunk:
                if self.cache.grow(lease, start, start + chunk):
                    return chunk
                chunk = 0 if chunk <= self.cache.page_tokens else chunk // 2
            victim = self._victim(sequence, draft)
            if victim is None:
                break
            self._preempt(victim)
        return 1 if self.cache.grow(lease, start, start + 1) else 0

    def _victim(self, sequence: Sequence, draft: _Draft) -> Sequence | None:
        """The least important sequence, less important than this one and not in the plan."""
        for other in reversed(self.running):
            if other.rank <= sequence.rank:
                return None
            if other.planned != draft.step:
                return other
        return None

    def _restart(self, head: Sequence, draft: _Draft) -> None:
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
        """Sequences of the queue in order, without those that wait for another's prefix."""
        for sequence in queue:
            other = sequence.waits_for
            if other is not None:
                if other.state is State.RUNNING and other.computed < sequence.waits_until:
                    continue
                sequence.waits_for = None
            yield sequence

    def _admit(self, sequence: Sequence, draft: _Draft, limit: int) -> _Admission:
        """Start a waiting sequence with its first chunk, if it has a place, pages, and no
        better chance in waiting for a prefix."""
        if self._alone not in (None, sequence) or len(self.running) >= self.config.max_sequences:
            return _Admission.BLOCKED
        match = self.cache.match(
            sequence.identity, sequence.tokens, sequence.reusable_limit, sequence.wants
        )
        if self._should_wait(sequence, match):
            return _Admission.SKIPPED
        if self.running and not self._has_room(sequence, match):
            return _Admission.BLOCKED
        sequence.lease, sequence.computed, copies = self.cache.open(match, draft.journal)
        found = sequence.computed
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

    def _has_room(self, sequence: Sequence, match: Match) -> bool:
        """Whether its tokens so far fit beside what the running ones still need for theirs,
        with a page to spare for the growth of each."""
        needs = self.cache.demand(match, len(sequence.tokens))
        for want in sequence.wants:
            needs[want.group] += len(self.running)
        for other in self.running:
            if other.remaining > 1 and other.lease is not None:
                more = self.cache.outstanding(other.lease, len(other.tokens))
                needs = [need + extra for need, extra in zip(needs, more, strict=True)]
        return self.cache.could_fit(needs)

    def _should_wait(self, sequence: Sequence, match: Match) -> bool:
        """Whether a step under way, or a running sequence, is about to compute enough of
        this one's prefix. Sets `waits_for` in the second case."""
        worth = len(sequence.tokens) - match.length
        if match.soon > match.length and (match.soon - match.length) * WORTH_WAITING >= worth:
            return True
        whole = match.walked // self.cache.page_tokens
        frontier = match.nodes[whole - 1] if whole else self.cache.tree.roots.get(match.identity)
        if frontier is None:
            return False
        known = whole * self.cache.page_tokens
        for other in self.running:
            lease = other.lease
            if lease is None or lease.node is not frontier or other.remaining == 0:
                continue
            if other.rank[0] > sequence.rank[0] or not set(sequence.wants) <= set(other.wants):
                continue
            same = known + common_prefix(other.tokens[known:], sequence.tokens[known:])
            until = min(same, sequence.reusable_limit)
            saved = until - match.length
            if until > other.computed and saved > 0 and saved * WORTH_WAITING >= worth:
                sequence.waits_for, sequence.waits_until = other, until
                return True
        return False
