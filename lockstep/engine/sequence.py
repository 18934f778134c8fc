"""One choice of one request, and where it stands in its life.

WAITING --admit--> RUNNING --last token, cancel, failed step--> ENDED
   ^                  |
   +-----preempt------+     (a waiting sequence can be cancelled as well)
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from lockstep.cache import Identity, Lease, Need
from lockstep.runner.plan import SampleSpec
from lockstep.types import FinishReason, Request, TokenLogprob

if TYPE_CHECKING:
    from lockstep.engine.gates import GatedRequest
    from lockstep.engine.routes import Route
    from lockstep.text.grammar_matcher import GrammarState

EVERYTHING = 1 << 62
"""More tokens than any sequence has."""
NOTHING = Need(())


class State(Enum):
    """Who holds pages: RUNNING sequences only."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class Sequence:
    """Mutable state of a sequence; only the scheduler changes it.

    Attributes:
        number: unique for the engine's life. choice: index in [0, n).
        layers: half-open range of the trunk's layers.
        rank: (priority, number): the smaller, the more important.
        tokens: prompt and output ids so far. prompt_len: how many are prompt.
        computed: positions below it have keys and values, or get them in the plan
            that is under way; less than len(tokens) until the sequence ends, but for the
            time in which a second plan follows the one under way.
        attained: tokens computed since it was last admitted.
        max_len: the sequence ends with LENGTH when it has this many tokens.
        cached_tokens: prompt tokens taken from the cache at the first admission; -1 before.
        prompt_logprobs: entries collected so far, for prompt positions from
            `request.score_from` on.
        pooled, pooled_rows: what runs have reported of pooled rows, and the position up to
            which they have.
        waits_for, waits_until: a running sequence that computes this one's prefix,
            and the position up to which it does.
        planned: the last step that this sequence was part of.
        routes: the ways that its rows may take where a branch reads them; none in the trunk.
        route: of these the one that it has taken. need: what it reads and writes of the cache.
        shared: positions below it are computed as anybody would; the tree gets no others, and
            what a query at it reads is not let go.
        kept_until: positions below it, from `computed` on, lack layers that are made from rows
            kept at a stop.
        gate: of a request that has yet to decide: what it reads, and what follows. The one
            sequence that is not `held` reads it, for all choices.
        grammar: what the output must look like and how far it has come, if it must at all.
        started: the time that `Scheduler.schedule` was told when it first admitted it.
    """

    __slots__ = (
        "attained",
        "cached_tokens",
        "choice",
        "computed",
        "gate",
        "grammar",
        "held",
        "identity",
        "kept_until",
        "layers",
        "lease",
        "max_len",
        "need",
        "number",
        "planned",
        "pooled",
        "pooled_rows",
        "prompt_len",
        "prompt_logprobs",
        "rank",
        "request",
        "route",
        "routes",
        "shared",
        "started",
        "state",
        "tokens",
        "waits_for",
        "waits_until",
    )

    def __init__(
        self,
        number: int,
        request: Request,
        choice: int,
        *,
        identity: Identity,
        layers: tuple[int, int],
        max_len: int,
        grammar: GrammarState | None = None,
        routes: tuple[Route, ...] = (),
    ) -> None:
        self.number = number
        self.choice = choice
        self.identity = identity
        self.layers = layers
        self.rank = (request.priority, number)
        self.computed = 0
        self.attained = 0
        self.cached_tokens = -1
        self.kept_until = 0
        self.shared = routes[0].begins if routes else EVERYTHING
        self.gate: GatedRequest | None = None
        self.held = False
        self.become(request, max_len, grammar, routes)
        self.state = State.WAITING
        self.lease: Lease | None = None
        self.waits_for: Sequence | None = None
        self.waits_until = 0
        self.planned = 0
        self.started = 0.0

    def become(
        self,
        request: Request,
        max_len: int,
        grammar: GrammarState | None = None,
        routes: tuple[Route, ...] = (),
    ) -> None:
        """Take on another prompt, of which nothing is computed that `computed` does not say."""
        self.request = request
        self.routes = routes
        self.route = routes[0] if routes else None
        self.need = NOTHING if self.route is None else self.route.need
        self.tokens = list(request.prompt)
        self.prompt_len = len(request.prompt)
        self.max_len = max_len
        self.grammar = grammar
        self.prompt_logprobs: list[TokenLogprob] = []
        self.pooled: list[bytes] = []
        self.pooled_rows = 0

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be drawn; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def num_output(self) -> int:
        """Tokens drawn so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def scores_prompt(self) -> bool:
        """Whether this choice reports the prompt's logprobs: the first one does, for all."""
        if self.request.sampling.prompt_logprobs is None:
            return False
        return self.choice == 0 or self.gate is not None

    def keeps_until(self, start: int) -> int:
        """Rows from `start` on go to pages of their own at the stop, up to there: those of the
        context, unless nobody else has a use for the first of them."""
        if self.route is None or not self.need.keeps or start >= self.shared:
            return start
        return self.route.begins

    @property
    def reusable_limit(self) -> int:
        """Most tokens that may come from the cache: of what others compute alike, and what is
        not `needed_from` on."""
        return min(self.needed_from, self.shared)

    @property
    def needed_from(self) -> int:
        """The first position that must be computed.

        The last token is always computed, for its logits or its hidden row; so is every
        position whose row has something to report that is not known yet.
        """
        limit = len(self.tokens) - 1
        if self.request.pooling == "mean":
            return min(limit, self.pooled_rows)
        return min(limit, self._rows_scored) if self.scores_prompt else limit

    @property
    def _rows_scored(self) -> int:
        """Rows below it have no prompt logprob to report any more. Row p predicts token p + 1."""
        return self.request.score_from - 1 + len(self.prompt_logprobs)

    def logit_rows(self, start: int, end: int) -> tuple[int, list[int]]:
        """How many of the last rows of positions [start, end) need logits (or are pooled), and
        their targets: prompt ids, -1 behind the prompt's last row."""
        if self.request.pooling == "mean":
            return max(0, end - max(start, self.pooled_rows)), []
        if self.scores_prompt and self._rows_scored < self.prompt_len - 1:
            first = max(start, self._rows_scored)
            if first >= end:
                return 0, []
            targets = self.tokens[first + 1 : min(end + 1, self.prompt_len)]
            targets.extend([-1] * (end - first - len(targets)))
            return end - first, targets
        last = self.draws or self.request.pooling == "last"
        return (1 if end == len(self.tokens) and last else 0), []

    @property
    def draws(self) -> bool:
        """False for a request that only scores or warms the cache (max_tokens = 0)."""
        return self.max_len > self.prompt_len

    def sample_spec(self, ahead: int = 0) -> SampleSpec:
        """How to draw the next token, or the one `ahead` tokens behind it; what a grammar
        allows is under computation from here on."""
        request = self.request
        return SampleSpec(
            request.sampling,
            request.sampling.seed or 0,
            self.choice,
            len(self.tokens) - self.prompt_len + ahead,
            self.tokens,
            self.prompt_len,
            request.stop_ids,
            request.bad_ids,
            None if self.grammar is None else self.grammar.pending(),
        )

    def finish_after(self, token: int) -> FinishReason | None:
        """Why the sequence ends with `token`, the last of `tokens`; None when it goes on.
        Called once for each token: a grammar advances here."""
        position = len(self.tokens) - self.prompt_len - 1
        if token in self.request.stop_ids and position >= self.request.sampling.min_tokens:
            return FinishReason.STOP
        if self.grammar is not None:
            self.grammar.advance(token)
            if self.grammar.done:
                return FinishReason.STOP
            if self.grammar.error:
                return FinishReason.ERROR
        return FinishReason.LENGTH if len(self.tokens) >= self.max_len else None

    def finish_stuck(self) -> str:
        """Why no token could be drawn; "" when the text is complete as it stands."""
        if self.grammar is None or self.grammar.error:
            return self.grammar.error if self.grammar is not None else "no token is left to draw"
        if self.grammar.may_end:
            return ""
        return "grammar: it allows no token here that bad_words and min_tokens allow as well"
