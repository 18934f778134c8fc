"""Which token runs go into the next step: pure bookkeeping, no tensors, no clock.

State in (`add`, `cancel`), plan out (`schedule`), results back (`complete` or `fail`).
What a step has is decided in `filling.py`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from lockstep.cache import Need, PrefixCache, StepJournal
from lockstep.config import SchedulerConfig
from lockstep.engine.filling import Draft, Filling
from lockstep.engine.sequence import EVERYTHING, Sequence, State
from lockstep.prefixes import common_prefix
from lockstep.runner.plan import Plan, RunResult, StepResult, TokenRun
from lockstep.text.grammar_matcher import GrammarState
from lockstep.types import (
    FinishReason,
    GateOutcome,
    LockstepError,
    Request,
    SequenceOutput,
    TokenLogprob,
)


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
            (bool(run.pooling) and not drawn.pooled) or (run.scores and not drawn.scores)
        )
        if missing or len(drawn.prompt_logprobs) != wanted:
            raise LockstepError(
                f"step {plan.step}, sequence {run.sequence}: "
                "a token, a logprob, a pooled row or a score is missing"
            )


def _is_last(run: TokenRun, sequence: Sequence) -> bool:
    """Whether the run has what its sequence ends with."""
    return run.scores or (not run.branch and run.start + len(run.tokens) == len(sequence.tokens))


class Scheduler(Filling):
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
        self,
        cache: PrefixCache,
        config: SchedulerConfig,
        layers: tuple[int, int],
        model: str,
    ) -> None:
        super().__init__(cache, config, layers, model)
        self._under_way: deque[Draft] = deque()  # the next to complete first
        self._step = 0

    def cancel(self, request_id: str, choice: int | None = None) -> list[SequenceOutput]:
        """End a request, or one choice of it; unknown ones give no output."""
        if self._under_way:
            raise LockstepError("cancel() called before the last plan's complete() or fail()")
        outputs = []
        live = self.requests.get(request_id, ())
        for sequence in [s for s in live if choice is None or s.choice == choice]:
            self._counts["cancelled"] += 1
            leaves = sequence if choice is None else self._leaver(sequence)
            outputs.append(self._end(leaves, FinishReason.CANCELLED))
        self._let_tails_go()
        return outputs

    def _leaver(self, sequence: Sequence) -> Sequence:
        """Who ends for a choice that is cancelled: where it reads a gate for others as well,
        one of these, and it goes on in that one's name."""
        if sequence.gate is None or sequence.held:
            return sequence
        for other in self.requests[sequence.request.id]:
            if other.held:
                sequence.choice, other.choice = other.choice, sequence.choice
                return other
        return sequence

    # --- a step ----------------------------------------------------------------------

    def schedule(self, now: float = 0.0) -> Plan | None:
        """The next step, or None when nothing is to do. Pages are taken, copies listed, and
        pages that the step fills are registered for sharing; `complete` or `fail` follows.
        `now` is only noted as `started` of what the step admits."""
        if self._under_way:
            raise LockstepError("schedule() called before the last plan's complete() or fail()")
        self._step += 1
        self._now = now
        draft = Draft(self._step, self.config.max_step_tokens)
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
        draft = Draft(self._step + 1, 0)
        for index, sequence in members:
            self._follow(sequence, index, draft)
        self._step += 1
        return self._begin(draft)

    def _begin(self, draft: Draft) -> Plan:
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

    def _follow(self, sequence: Sequence, index: int, draft: Draft) -> None:
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
        computed = passed = 0
        for sequence, run, drawn in zip(draft.members, plan.runs, result.runs, strict=True):
            if sequence.state is State.ENDED:  # with the token that this run followed
                continue
            rows, (begin, end) = len(run.tokens), run.layers
            passed += rows * (end - begin)
            if run.source is None:
                computed += rows
            if drawn.error:
                assert sequence.lease is not None
                if not drawn.scores:  # else the rows are sound, and only the head is at fault
                    self.cache.forget(sequence.lease)
                outputs.extend(self._fail(sequence, drawn.error))
                continue
            sequence.prompt_logprobs.extend(drawn.prompt_logprobs)
            if run.pooling:
                sequence.pooled.append(drawn.pooled)
                sequence.pooled_rows = run.start + len(run.tokens)
            if sequence.gate is not None:
                if run.sample is not None or run.scores:
                    outputs.extend(self._take_probe(sequence, drawn))
            elif drawn.stuck:
                outputs.extend(self._end_stuck(sequence))
            elif run.sample is not None:
                assert drawn.token is not None  # `check_result`
                outputs.append(self._take_token(sequence, drawn.token, drawn.logprob))
            elif sequence.remaining == 0 and _is_last(run, sequence):
                self._counts["finished"] += 1
                output = self._end(sequence, FinishReason.LENGTH)
                told = self._prompt_logprobs(sequence)
                pooled = tuple(sequence.pooled)
                outputs.append(
                    replace(output, prompt_logprobs=told, pooled=pooled, scores=drawn.scores)
                )
        self._counts["computed_tokens"] += computed
        self._counts["computed_layers"] += passed
        self._let_tails_go()
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

    def _take_probe(self, sequence: Sequence, drawn: RunResult) -> list[SequenceOutput]:
        """One more probe of a gate is read: turn to the next, or to what was decided."""
        gate = sequence.gate
        assert gate is not None
        rows = [] if drawn.logprob is None else [drawn.logprob]
        gate.take([*sequence.prompt_logprobs, *rows], drawn.scores)
        if gate.is_read:
            return self._decide(sequence, gate.outcome())
        self._turn(sequence, gate.judge, gate.judge_len)
        return []

    def _decide(self, judge: Sequence, outcome: GateOutcome) -> list[SequenceOutput]:
        """Begin to write with every choice, or end it."""
        gate = judge.gate
        assert gate is not None
        outputs = []
        request, max_len = gate.writer(outcome.chosen), gate.max_lens[outcome.chosen]
        for sequence in list(self.requests[judge.request.id]):
            if request is None:
                self._counts["finished"] += 1
                outputs.append(replace(self._end(sequence, FinishReason.GATE), gate=outcome))
                continue
            grammar = None if gate.grammar is None else gate.grammar.start(request.stop_ids)
            sequence.gate, sequence.held = None, False
            if sequence is judge:
                self._counts["prompt_tokens"] += len(request.prompt) - gate.prompt_len
                self._turn(sequence, request, max_len, grammar)
            else:
                sequence.become(request, max_len, grammar)
            sequence.shared = EVERYTHING
            outputs.append(
                SequenceOutput(
                    request.id,
                    sequence.choice,
                    cached_tokens=max(0, sequence.cached_tokens),
                    started=judge.started,
                    gate=outcome,
                )
            )
        self._stalled = False
        return outputs

    def _turn(
        self,
        sequence: Sequence,
        request: Request,
        max_len: int,
        grammar: GrammarState | None = None,
    ) -> None:
        """Go on with another prompt, from where the two part. Those that a gate reads begin
        alike, and what is behind that is no one else's."""
        lease, before, shared = sequence.lease, sequence.tokens, sequence.shared
        assert lease is not None
        same = sequence.computed if sequence.route is None else min(sequence.computed, shared)
        before_need = sequence.need
        sequence.become(request, max_len, grammar)
        alike = shared + common_prefix(before[shared:], sequence.tokens[shared:])
        same = min(same, alike, sequence.needed_from)
        if same < max(shared, 1):  # rows of what is shared are to be reported, or not there
            self.cache.close(lease, before, shared)
            self._to_waiting(sequence)
            return
        self._go_on(sequence, before_need, same)

    def _go_on(self, sequence: Sequence, before: Need, same: int) -> None:
        """The first `same` positions are computed as far as `before` says: compute what is
        missing of them above the stop, from the rows that were kept there."""
        lease = sequence.lease
        assert lease is not None
        sequence.computed, sequence.kept_until, sequence.need = same, 0, self.cache.layout.whole
        wants = self.cache.layout.whole.wants
        if before.held:
            sequence.computed = min(same, self.cache.go_on(lease, same))
            if before.rows is not None and sequence.computed < same:
                sequence.need, sequence.kept_until = (
                    self.cache.layout.resuming[before.stop],
                    same,
                )
                wants = sequence.need.all
        self.cache.narrow(lease, wants, len(sequence.tokens))

    def _end_stuck(self, sequence: Sequence) -> list[SequenceOutput]:
        """End a sequence that could draw nothing: complete as it stands, or a failure."""
        reason = sequence.finish_stuck()
        if reason:
            return self._fail(sequence, reason)
        self._counts["finished"] += 1
        scores = self._prompt_logprobs(sequence) if not sequence.num_output else None
        return [replace(self._end(sequence, FinishReason.STOP), prompt_logprobs=scores)]

    def fail(self, plan: Plan, error: str) -> list[SequenceOutput]:
        """The plan under way raised: its sequences end with ERROR, all others go on."""
        draft = self._take(plan)
        while self._under_way:
            self.cache.rollback(self._under_way.pop().journal)
        self.cache.rollback(draft.journal)
        outputs = []
        for sequence in draft.members:
            if sequence.state is not State.ENDED:
                outputs.extend(self._fail(sequence, error))
        self._let_tails_go()
        return outputs

    @property
    def is_void(self) -> bool:
        """Whether every sequence of the plan under way ended with the token it followed."""
        return all(s.state is State.ENDED for s in self._under_way[0].members)

    @property
    def journals(self) -> list[StepJournal]:
        """Of the plans under way, for `PrefixCache.check_integrity`."""
        return [draft.journal for draft in self._under_way]

    def _take(self, plan: Plan) -> Draft:
        if not self._under_way or self._under_way[0].step != plan.step:
            raise LockstepError(f"step {plan.step} is not the plan under way")
        return self._under_way.popleft()

    @staticmethod
    def _prompt_logprobs(sequence: Sequence) -> tuple[TokenLogprob | None, ...] | None:
        if not sequence.scores_prompt:
            return None
        return (*(None,) * sequence.request.score_from, *sequence.prompt_logprobs)
