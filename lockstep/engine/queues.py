"""Who runs and who waits: sequences on their way in, between the two, and out."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import replace
from typing import TYPE_CHECKING

from lockstep.cache import Identity, PrefixCache
from lockstep.engine.gates import GatedRequest
from lockstep.engine.routes import Route
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
    "computed_layers",
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
        self._alone: Sequence | None = None  # see `Filling._restart`
        self._next_number = 0
        self._counts = dict.fromkeys(COUNTERS, 0)

    def add(
        self,
        request: Request,
        max_len: int,
        grammar: CompiledGrammar | None = None,
        routes: tuple[Route, ...] = (),
        gate: GatedRequest | None = None,
    ) -> None:
        """Queue the request's choices.

        Args:
            max_len: most tokens of each, prompt included. grammar: compiled from the request's.
            routes: the ways of a decision by a branch. gate: what it does first; `max_len` and
                `grammar` are then those of what reads it, and it brings its routes.
        """
        scope = "" if self.cache.keep else request.id
        identity = Identity(self.model, request.salt, scope=scope)
        first = request
        if gate is not None:
            first, routes = gate.judge, gate.routes
        sequences = []
        for choice in range(request.sampling.n):
            sequence = Sequence(
                self._next_number,
                first,
                choice,
                identity=identity,
                layers=self.layers,
                max_len=max_len,
                grammar=None if grammar is None else grammar.start(request.stop_ids),
                routes=routes,
            )
            if gate is not None:
                sequence.gate, sequence.held, sequence.shared = gate, choice > 0, gate.shared
            self._next_number += 1
            insort(self.waiting, sequence, key=_by_rank)
            sequences.append(sequence)
        self._stalled = False
        self.requests[request.id] = sequences
        self._counts["submitted"] += len(sequences)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def branch_keys(self) -> set[str]:
        """Keys of the branches that live requests use."""
        live = (sequence for choices in self.requests.values() for sequence in choices)
        return {route.key for sequence in live for route in sequence.routes}

    def stats(self) -> EngineStats:
        """Counters since the start and gauges of this moment; sequences, not requests."""
        cache = self.cache
        return EngineStats(
            running=len(self.running),
            waiting=len(self.waiting),
            pages_total=cache.pages_total,
            pages_used=cache.pages_used,
            pages_cached=cache.pages_cached,
            pages_tail=cache.pages_tail,
            **self._counts,
        )

    def _fail(self, sequence: Sequence, error: str) -> list[SequenceOutput]:
        """End a sequence with ERROR, and those for which it reads a gate; nothing that it
        computed stays in the tree."""
        ended = [sequence]
        if sequence.gate is not None:
            ended = list(self.requests[sequence.request.id])
        outputs = []
        for each in ended:
            self._counts["failed"] += 1
            each.computed = 0
            outputs.append(replace(self._end(each, FinishReason.ERROR), error=error))
        return outputs

    def _preempt(self, sequence: Sequence) -> None:
        """Release the pages of a running sequence that is not in the plan; it waits again."""
        assert sequence.lease is not None
        self._counts["preemptions"] += 1
        self._release(sequence)
        self._to_waiting(sequence)

    def _suspend(self, sequence: Sequence) -> None:
        """Undo an admission that got no pages."""
        assert sequence.lease is not None
        self.cache.close(sequence.lease)
        self._to_waiting(sequence)

    def _to_waiting(self, sequence: Sequence) -> None:
        sequence.lease = None
        sequence.computed = sequence.kept_until = 0
        self._stalled = False
        if self._alone is sequence:
            self._alone = None
        self._move(sequence, self.running, self.waiting, State.WAITING)

    def _end(self, sequence: Sequence, finish: FinishReason) -> SequenceOutput:
        """Take a sequence out, whatever its state; its last output."""
        if sequence.lease is not None:
            self._release(sequence)
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

    def _release(self, sequence: Sequence) -> None:
        """End the lease; the tree keeps what others would compute alike."""
        assert sequence.lease is not None
        computed = min(sequence.computed, sequence.shared)
        self.cache.close(sequence.lease, sequence.tokens, computed)

    def _let_tails_go(self) -> None:
        """A tail goes with the last decision that could use it, unless it is to be kept."""
        if self.cache.has_idle_tails and not any(
            not s.held and any(route.tails for route in s.routes) for s in self.waiting
        ):
            self.cache.drop_tails()

    @staticmethod
    def _remove(sequence: Sequence, queue: list[Sequence]) -> None:
        del queue[bisect_left(queue, sequence.rank, key=_by_rank)]

    def _move(
        self, sequence: Sequence, source: list[Sequence], target: list[Sequence], state: State
    ) -> None:
        self._remove(sequence, source)
        insort(target, sequence, key=_by_rank)
        sequence.state = state
