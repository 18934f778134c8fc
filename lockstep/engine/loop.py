"""`Engine`: checks requests, then plans and runs one step at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress

from lockstep.branch import Branch
from lockstep.cache import PrefixCache
from lockstep.cache.groups import make_groups
from lockstep.cache.pool import PagePool
from lockstep.config import (
    BranchOptions,
    CacheConfig,
    ConfigError,
    EngineConfig,
    SchedulerConfig,
)
from lockstep.engine.branches import Branches, check_reading
from lockstep.engine.gates import GatedRequest, check_gate, ids_of
from lockstep.engine.routes import Route, plan_routes
from lockstep.engine.scheduler import Scheduler, check_result
from lockstep.runner.groups import own_groups
from lockstep.runner.plan import Executor, Launched, Launcher, Plan, StepResult
from lockstep.text.grammar_matcher import CompiledGrammar, GrammarCompiler
from lockstep.types import EngineInfo, EngineStats, Gate, Request, RequestError, SequenceOutput


class Engine:
    """Requests in, outputs out; one thread calls every method.

    A step that raises ends its own sequences with `FinishReason.ERROR`; the engine goes on.

    With `SchedulerConfig.overlap` the next step is planned and begun while the device works
    on the one before it, where the scheduler and the executor can (`schedule_ahead`,
    `Launcher`). The plain loop beside it gives the same bits.

    Args:
        executor: runs plans; a `Runner`, or a fake without a model.
        scheduler_config, cache_config: budgets and pool.
        info: what `Runner.info()` says; made from the executor's geometry when absent.
        grammars: compiles the requests' grammars; without it they are refused.
        branches: those to load now, and how decisions are computed.

    Raises:
        ConfigError: a setting that does not go with the executor.
        BranchError: a branch that cannot be used.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        info: EngineInfo | None = None,
        grammars: GrammarCompiler | None = None,
        branches: BranchOptions | None = None,
    ) -> None:
        branches = branches or BranchOptions()
        if scheduler_config.max_context > executor.max_context:
            raise ConfigError(
                f"max_context ({scheduler_config.max_context}) exceeds what model and pool hold "
                f"({executor.max_context})"
            )
        scheduler_config = scheduler_config.resolved(info.device if info is not None else "cpu")
        self._executor: Executor | None = executor
        self._vocab_size = executor.vocab_size
        self._max_queue = scheduler_config.max_queue
        self._grammars = grammars
        self._cache = PrefixCache(
            PagePool(executor.num_slabs, executor.pages_per_slab),
            make_groups(executor.groups, executor.page_tokens),
            executor.page_tokens,
            keep=cache_config.prefix_caching,
            keep_tails=branches.keep_tails,
        )
        self._max_context = scheduler_config.max_context or executor.max_context
        self._pool_tokens = self._cache.capacity(self._max_context)
        self.info = info or _describe(executor, self._max_context)
        layers = (0, executor.num_layers)
        self._scheduler = Scheduler(self._cache, scheduler_config, layers, self.info.fingerprint)
        self._branch_options = branches
        self._branches = Branches(executor)
        for name, folder in branches.load:
            self._branches.load(name, folder)
        self._outbox: list[SequenceOutput] = []  # outputs of what happened between steps
        self._overlap = bool(scheduler_config.overlap) and isinstance(executor, Launcher)
        self._under_way: deque[tuple[Plan, Launched]] = deque()  # the next to end first

    @classmethod
    def from_config(
        cls, config: EngineConfig, progress: Callable[[str, float], None] | None = None
    ) -> Engine:
        """Load the model that the configuration names and start an engine on it.

        Args:
            progress: called with what is being loaded and the share done, in [0, 1].

        Raises:
            ModelError, ConfigError: naming the file, key or setting at fault.
        """
        # The runner imports torch; whoever drives a scheduler without a model need not.
        from lockstep.runner import load_runner
        from lockstep.weights import open_checkpoint

        runner = load_runner(config, progress)
        grammars = GrammarCompiler(
            lambda: open_checkpoint(config.model.name).tokenizer(), runner.vocab_size
        )
        return cls(runner, config.scheduler, config.cache, runner.info(), grammars, config.branches)

    # --- requests ---------------------------------------------------------------------

    def prepare(self, request: Request) -> Future[CompiledGrammar] | None:
        """Compile the request's grammar on a thread; None for a request without one.

        `submit` waits for this where it has not been done before.
        """
        grammar = request.sampling.grammar
        if grammar is None or self._grammars is None:
            return None
        return self._grammars.prepare(grammar)

    def give_up(self, grammar: Future[CompiledGrammar]) -> None:
        """Wait no longer for what `prepare` has begun: `submit` will refuse it."""
        if self._grammars is not None:
            self._grammars.give_up(grammar)

    def submit(self, request: Request) -> None:
        """Queue a request; its outputs come from later steps.

        Raises:
            RequestError: it cannot be served as it stands; nothing was queued.
        """
        scheduler = self._scheduler
        if request.id in scheduler.requests:
            raise RequestError(
                f"request id {request.id!r} is in use", field="id", code="duplicate_id"
            )
        if self._max_queue and len(scheduler.waiting) >= self._max_queue:
            raise RequestError(
                f"{len(scheduler.waiting)} requests wait already (limit {self._max_queue})",
                code="queue_full",
            )
        self._check_ids(request)
        _check_outputs(request)
        if request.gate is not None:
            gate = self._gated(request, request.gate)
            scheduler.add(request, gate.judge_len, gate=gate)
            return
        routes: tuple[Route, ...] = ()
        if request.branch:
            branch = self._branches.find(request.branch, request.branch_key, "branch")
            check_reading(request)
            routes = self._routes(branch, request.branch_from)
            self._check_route(routes[0], len(request.prompt))
        scheduler.add(request, self._max_len(request), self._compiled(request), routes)

    def _routes(self, branch: Branch, begins: int, *, gate: bool = False) -> tuple[Route, ...]:
        return plan_routes(branch, begins, self._cache.layout, self._branch_options, gate=gate)

    def _check_route(self, route: Route, length: int) -> None:
        """Refuse a decision that the pool cannot hold."""
        if not self._cache.fits_alone(length, route.need.writes, route.begins):
            raise RequestError(
                f"a decision over {length} tokens needs more pages than the cache holds",
                field="prompt",
                code="context_length_exceeded",
            )

    def _gated(self, request: Request, gate: Gate) -> GatedRequest:
        """What the request does before it writes; checks all that may become of it."""
        branch = None
        if gate.branch:
            branch = self._branches.find(gate.branch, gate.branch_key, "gate")
        if request.branch or request.pooling:
            raise RequestError("a gated request has no branch and no pooling", field="gate")
        check_gate(gate, branch)
        length = len(request.prompt)
        longest = max(len(probe.suffix) + len(probe.path) for probe in gate.probes)
        if length + longest > self._max_context:
            raise RequestError(
                f"the prompt has {length} tokens and what the gate asks behind it {longest}, "
                f"the context holds {self._max_context}",
                field="prompt",
                code="context_length_exceeded",
            )
        routes = () if branch is None else self._routes(branch, length, gate=True)
        wants = routes[0].need.writes if routes else None
        if not self._cache.fits_alone(length + longest, wants, length - 1):
            raise RequestError(
                f"the gate's {length + longest} tokens need more pages than the cache holds",
                field="prompt",
                code="context_length_exceeded",
            )
        max_lens = [
            0 if header is None else self._max_len(request, len(header)) for header in gate.headers
        ]
        return GatedRequest(request, gate, max_lens, self._compiled(request), routes)

    def _compiled(self, request: Request) -> CompiledGrammar | None:
        grammar = request.sampling.grammar
        if grammar is None:
            return None
        if self._grammars is None:
            raise RequestError(
                "grammar: this engine has no tokenizer to apply it with", field="grammar"
            )
        try:
            return self._grammars.compile(grammar)
        except RequestError as error:  # kept for the next client, who may call it another name
            message = str(error).replace("grammar", grammar.name, 1)
            raise RequestError(message, field=grammar.name, code=error.code) from None

    def _check_ids(self, request: Request) -> None:
        if not request.prompt:
            raise RequestError("the prompt has no tokens", field="prompt", code="empty_prompt")
        params, gate = request.sampling, request.gate
        named: tuple[tuple[str, Iterable[int]], ...] = (
            ("prompt", request.prompt),
            ("stop_token_ids", request.stop_ids),
            ("logit_bias", params.logit_bias),
            ("logprob_token_ids", params.logprob_token_ids),
            ("bad_words", (token for ids in request.bad_ids for token in ids)),
            ("gate", () if gate is None else ids_of(gate)),
        )
        for name, tokens in named:
            for token in tokens:
                if isinstance(token, bool) or not isinstance(token, int):
                    raise RequestError(f"{name} holds {token!r}, not a token id", field=name)
                if not 0 <= token < self._vocab_size:
                    raise RequestError(
                        f"{name} holds token id {token}, beyond the vocabulary "
                        f"of {self._vocab_size}",
                        field=name,
                        code="token_out_of_range",
                    )

    def _max_len(self, request: Request, header: int = 0) -> int:
        """Most tokens of a choice, prompt included; checks them against context and pool.

        Args: header: tokens that a gate puts behind the prompt.
        """
        length = len(request.prompt) + header
        wanted = request.sampling.max_tokens
        limit = self._max_context
        room = limit if wanted == 0 else limit - 1  # a prompt must leave room for a token
        if length > room:
            raise RequestError(
                f"the prompt has {length} tokens, the context holds {limit}"
                + ("" if wanted == 0 else ", of which at least one is for the answer"),
                field="prompt",
                code="context_length_exceeded",
            )
        pool = self._pool_tokens
        if wanted is None:
            most = max(length + 1, min(limit, pool))
        else:
            most = min(length + wanted, limit)
        if most > pool:
            raise RequestError(
                f"prompt and answer may need {most} tokens, the cache holds {pool}",
                field="prompt" if length >= pool else "max_tokens",
                code="context_length_exceeded",
            )
        return most

    def cancel(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one choice of it; the next step reports it. Unknown ids are ignored."""
        self._settle()
        self._outbox.extend(self._scheduler.cancel(request_id, choice))

    # --- branches ---------------------------------------------------------------------

    @property
    def branches(self) -> dict[str, Branch]:
        """The branches that requests may name."""
        return dict(self._branches.named)

    def load_branch(self, name: str, folder: str) -> Branch:
        """Load a branch; one of that name serves no request from now on, but those it has.

        Raises:
            BranchError: it cannot be used; all is as it was.
        """
        self._settle()
        branch = self._branches.load(name, folder)
        self._free_branches()
        return branch

    def unload_branch(self, name: str) -> None:
        """Refuse requests that name the branch; it is freed when the last one has ended.

        Raises:
            BranchError: there is no such branch.
        """
        self._settle()
        self._branches.unload(name)
        self._free_branches()

    def _free_branches(self) -> None:
        if not self._branches.is_settled:
            self._branches.free(self._scheduler.branch_keys())

    # --- steps --------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether `step` has something to run or to report."""
        if not self._scheduler.has_work:
            self._settle()  # a step ahead of the last token: nobody's, and all that is left
        return self._scheduler.has_work or bool(self._outbox)

    def step(self) -> list[SequenceOutput]:
        """Plan and run one step; or, where one is under way, begin the next and end that.

        Returns cancellations since the last step, then one output per sequence that drew a
        token or ended, in the plan's order. An empty list while prompts are computed.
        """
        if self._executor is None:
            raise RequestError("the engine is closed", code="closed")
        while self._under_way and self._scheduler.is_void:
            self._end_step()
        if not self._under_way:
            plan = self._scheduler.schedule(time.monotonic())
            if plan is not None:
                self._launch(plan)
        if self._under_way:
            if self._under_way[0][1].draws:
                plan = self._scheduler.schedule_ahead()
                if plan is not None:
                    self._launch(plan)
            self._end_step()
        self._free_branches()
        outputs, self._outbox = self._outbox, []
        return outputs

    def _launch(self, plan: Plan) -> None:
        """Begin a step; what it raises is raised again when the step is ended."""
        executor = self._executor
        assert executor is not None
        launched = Launched(False, lambda: executor.execute(plan))
        if self._overlap and isinstance(executor, Launcher):
            try:
                launched = executor.launch(plan)
            except BaseException as error:
                launched = Launched(False, _raises(error))
        self._under_way.append((plan, launched))

    def _end_step(self) -> None:
        """Wait for the first step under way and take in what came of it."""
        plan, launched = self._under_way.popleft()
        try:
            result = launched.result()
            check_result(plan, result)
        except BaseException as error:
            for _, behind in self._under_way:  # it went on from tokens that nobody knows
                with suppress(Exception):
                    behind.result()
            self._under_way.clear()
            text = f"{type(error).__name__}: {error}"
            self._outbox.extend(self._scheduler.fail(plan, text))
            if not isinstance(error, Exception):  # an interrupt is not the step's fault
                raise
        else:
            self._outbox.extend(self._scheduler.complete(plan, result))

    def _settle(self) -> None:
        """End every step under way; the outputs are told by the next `step`."""
        while self._under_way:
            self._end_step()

    def stats(self) -> EngineStats:
        """Gauges and counters as they stand."""
        return self._scheduler.stats()

    def flush_cache(self) -> None:
        """Forget every cached prefix that no live sequence uses."""
        self._settle()
        self._cache.flush()

    def check_integrity(self) -> None:
        """Raise `PoolError` if a page is lost or counted wrongly. O(pool); for tests and idling."""
        leases = [s.lease for s in self._scheduler.running if s.lease is not None]
        self._cache.check_integrity(leases, *self._scheduler.journals)

    def close(self) -> None:
        """Cancel everything and let go of the executor; closing twice is fine."""
        self._settle()
        for request_id in list(self._scheduler.requests):
            self._scheduler.cancel(request_id)
        self._outbox.clear()
        self._cache.flush()
        self._executor = None


def _check_outputs(request: Request) -> None:
    """Refuse reports about the prompt that make no sense."""
    params, length = request.sampling, len(request.prompt)
    if not 1 <= request.score_from <= length:
        raise RequestError(
            f"score_from must be in [1, {length}], got {request.score_from}", field="score_from"
        )
    if request.pooling not in ("", "last", "mean"):
        raise RequestError(
            f"pooling must be 'last' or 'mean', got {request.pooling!r}", field="pooling"
        )
    if request.pooling and (
        params.max_tokens != 0 or params.n != 1 or params.prompt_logprobs is not None
    ):
        raise RequestError(
            "a pooled request has max_tokens 0, n 1 and no prompt_logprobs", field="pooling"
        )


def _raises(error: BaseException) -> Callable[[], StepResult]:
    def result() -> StepResult:
        raise error

    return result


def _describe(executor: Executor, max_context: int) -> EngineInfo:
    """Information about an executor that has no model behind it."""
    own = len(own_groups(executor.groups))
    pages = executor.num_slabs * min(executor.pages_per_slab[:own])
    return EngineInfo(
        model=type(executor).__name__,
        architecture="none",
        dtype="none",
        device="none",
        backend="none",
        threads=1,
        vocab_size=executor.vocab_size,
        num_layers=executor.num_layers,
        max_context=max_context,
        page_tokens=executor.page_tokens,
        pool_tokens=pages * executor.page_tokens,
        pool_bytes=0,
        weight_bytes=0,
        fingerprint="",
        load_seconds=0.0,
    )
