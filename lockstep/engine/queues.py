"""Who runs and who waits: sequences on their way in, between the two, and out."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import replace
from typing import TYPE_CHECKING

from lockstep.cache import Identity, PrefixCache
from lockstep.engine.sequence import Sequence, State
from lockstep.types import EngineStats, FinishReason, Request, SequenceOutput

if TYPE_CHECKING:
    from lockstep.text.grammar_matcher import CompiledGrammar

COUNTERS = (
    "submitted",
    "steps",
    "prompt_tokens",
    "cached_tokens",
    "computed_tokens",
    "generated_tokens",
    "preemptions",
    "finished",
    "cancelled",
    "failed",
)


def _by_rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank


class Queues:
    """The sequences of a scheduler, by rank, and the counts of what became of them.

    Ownership: running sequences hold a lease of the cache; whoever leaves gives it back.

    Args:
        cache: pages and prefixes. layers: the trunk's layer range. model: for the cache identity.
    """

    def __init__(self, cache: PrefixCache, layers: tuple[int, int], model: str) -> None:
        self.cache = cache
        self.layers = layers
        self.model = model
        self.running: list[Sequence] = []  # by rank
        self.waiting: list[Sequence] = []  # by rank
        self.requests: dict[str, list[Sequence]] = {}  # live ones
        self._stalled = False  # the queue waits for pages or a place, and none came free since
        self._alone: Sequence | None = None  # see `Scheduler._restart`
        self._next_number = 0
        self._counts = dict.fromkeys(COUNTERS, 0)

    def add(self, request: Request, max_len: int, grammar: CompiledGrammar | None = None) -> None:
        """Queue the request's choices. `max_len`: most tokens of each, prompt included;
        `grammar`: compiled from the request's."""
        scope = "" if self.cache.keep else request.id
        identity = Identity(self.model, request.salt, scope=scope)
        sequences = []
        for choice in range(request.sampling.n):
            sequence = Sequence(
                self._next_number,
                request,
                choice,
                identity=identity,
                layers=self.layers,
                wants=self.cache.wants(self.layers),
                max_len=max_len,
                grammar=None if grammar is None else grammar.start(request.stop_ids),
            )
            self._next_number += 1
            insort(self.waiting, sequence, key=_by_rank)
            sequences.append(sequence)
        self._stalled = False
        self.requests[request.id] = sequences
        self._counts["submitted"] += len(sequences)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def stats(self) -> EngineStats:
        """Counters since the start and gauges of this moment; sequences, not requests."""
        pool = self.cache.pool
        used, cached = self.cache.pages_used, self.cache.pages_cached
        return EngineStats(
            running=len(self.running),
            waiting=len(self.waiting),
            pages_total=used + cached + pool.free_pages(),
            pages_used=used,
            pages_cached=cached,
            **self._counts,
        )

    def _fail(self, sequence: Sequence, error: str) -> SequenceOutput:
        """End a sequence with ERROR; nothing that it computed stays in the tree."""
        self._counts["failed"] += 1
        sequence.computed = 0
        return replace(self._end(sequence, FinishReason.ERROR), error=error)

    def _preempt(self, sequence: Sequence) -> None:
        """Release the pages of a running sequence that is not in the plan; it waits again."""
        assert sequence.lease is not None
        self._counts["preemptions"] += 1
        self.cache.close(sequence.lease, sequence.tokens, sequence.computed)
        self._to_waiting(sequence)

    def _suspend(self, sequence: Sequence) -> None:
        """Undo an admission that got no pages."""
        assert sequence.lease is not None
        self.cache.close(sequence.lease)
        self._to_waiting(sequence)

    def _to_waiting(self, sequence: Sequence) -> None:
        sequence.lease = None
        sequence.computed = 0
        self._stalled = False
        if self._alone is sequence:
            self._alone = None
        self._move(sequence, self.running, self.waiting, State.WAITING)

    def _end(self, sequence: Sequence, finish: FinishReason) -> SequenceOutput:
        """Take a sequence out, whatever its state; its last output."""
        if sequence.lease is not None:
            self.cache.close(sequence.lease, sequence.tokens, sequence.computed)
            sequence.lease = None
        self._remove(sequence, self.running if sequence.state is State.RUNNING else self.waiting)
        sequence.state = State.ENDED
        self._stalled = False
        sequence.waits_for = None
        if self._alone is sequence:
            self._alone = None
        siblings = self.requests[sequence.request.id]
        siblings.remove(sequence)
        if not siblings:
            del self.requests[sequence.request.id]
        return SequenceOutput(
            sequence.request.id,
            sequence.choice,
            finish=finish,
            cached_tokens=max(0, sequence.cached_tokens),
            started=sequence.started,
        )

    @staticmethod
    def _remove(sequence: Sequence, queue: list[Sequence]) -> None:
        del queue[bisect_left(queue, sequence.rank, key=_by_rank)]

    def _move(
        self, sequence: Sequence, source: list[Sequence], target: list[Sequence], state: State
    ) -> None:
        self._remove(sequence, source)
        insort(target, sequence, key=_by_rank)
        sequence.state = state
