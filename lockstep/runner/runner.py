"""The forward pass of one step, and how a runner comes to be."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from typing import cast

import numpy as np
import torch
from torch import Tensor

import lockstep
from lockstep.config import ConfigError, EngineConfig
from lockstep.kernels import make_backend, tree
from lockstep.kernels.contract import Backend, KVLayer
from lockstep.model import DecoderModel, ForwardStep, load_model
from lockstep.model.base import model_dtype
from lockstep.runner.batch import BatchBuilder, StepBatch
from lockstep.runner.graphs import Capture, CudaCapture, DecodeGraphs
from lockstep.runner.memory import default_pool_bytes, largest_steps, plan_pool
from lockstep.runner.penalties import is_plain
from lockstep.runner.plan import Launched, PageCopy, Plan, RunResult, SampleSpec, StepResult
from lockstep.runner.pooling import pool
from lockstep.runner.sampler import Draw, Sampler, wants_logprob
from lockstep.types import EngineInfo, LayerGroup, SamplingParams, TokenLogprob
from lockstep.weights import open_checkpoint

_MIB = 1024 * 1024
_LOGIT_BYTES = {"cpu": 64 * _MIB, "cuda": 512 * _MIB}  # of one chunk of rows
_GRAPH_BYTES = 1024 * _MIB  # of device memory for captured decode steps


NOT_FINITE = "the model's hidden states are not finite numbers"


@dataclass(frozen=True, slots=True)
class Identity:
    """What a runner is told about the model beside its tensors, for `Runner.info`."""

    name: str = ""
    weights_hash: str = ""
    load_seconds: float = 0.0


@dataclass(slots=True)
class _Row:
    """One row of logits: what to report of it and for which run.

    Attributes:
        run: index in the plan. target: id to score, -1 for none. params: how to report it.
        spec: how to draw the next token, None where none is drawn.
    """

    run: int
    target: int = -1
    params: SamplingParams | None = None
    spec: SampleSpec | None = None


class Runner:
    """A model, its page pool and a sampler: satisfies `plan.Executor`.

    `max_context` is the model's, or what one sequence can hold when it has the whole
    pool to itself, whichever is less: a small pool shortens contexts rather than
    letting a sequence be admitted that can never finish.

    Args:
        page_tokens: tokens a page.
        memory_bytes: bytes of the pool; 0 is `memory.default_pool_bytes`. On CUDA that is
            measured after the largest steps have run, so that no later step runs out.
        num_slabs: slabs of the pool instead, where not 0.
        max_context: most tokens of a sequence; 0 means the model's own limit.
        step_tokens: most rows of one sequence in one step (sliding windows keep that
            much more than their window).
        max_sequences: most runs of a step.
        graphs: replay decode-only steps as CUDA graphs; see `graphs.DecodeGraphs`.
        capture: how a step is captured where that is not CUDA's way (tests).

    Raises:
        ConfigError: the pool cannot hold one page of every layer group.
    """

    def __init__(
        self,
        model: DecoderModel,
        backend: Backend,
        *,
        page_tokens: int = 16,
        memory_bytes: int = 0,
        num_slabs: int = 0,
        max_context: int = 0,
        step_tokens: int = 512,
        max_sequences: int = 64,
        graphs: bool = True,
        capture: Capture | None = None,
        identity: Identity | None = None,
    ) -> None:
        self.model = model
        self.backend = backend
        self.groups = model.groups
        self.num_layers = model.num_layers
        self.vocab_size = model.vocab_size
        self.page_tokens = page_tokens
        self.identity = identity or Identity()
        on_cuda = backend.device.type == "cuda"
        self._builder = BatchBuilder(self.num_layers, len(self.groups), page_tokens, backend.device)
        self._sampler = Sampler(backend, self.vocab_size)
        self._chunk_rows = max(16, _LOGIT_BYTES[backend.kind] // (4 * self.vocab_size))
        self._graphs: DecodeGraphs | None = None
        self._drawn: Tensor | None = None  # ids of the step that was begun last
        limit = min(max_context or model.max_context, model.max_context)
        size = torch.empty((), dtype=model.dtype).element_size()
        slab = plan_pool(self.groups, page_tokens, 2**62).slab
        budget = memory_bytes
        if num_slabs:
            budget = max(num_slabs, len(self.groups)) * slab * size
        elif not budget:
            if on_cuda:
                self._lay_out(slab * len(self.groups))
                self._run_largest(limit, step_tokens, max_sequences)
            wanted = capture is not None or (graphs and on_cuda)
            budget = default_pool_bytes(backend.device) - (_GRAPH_BYTES if wanted else 0)
        self._lay_out(budget // size)
        self.pool_bytes = self._pool_shape.elements * size
        self.max_context = self._pool_shape.longest_sequence(self.groups, limit, step_tokens)
        if self.max_context < 1:
            raise ConfigError(f"cache_bytes ({budget}) holds not one page of every layer group")
        if capture is None and graphs and on_cuda:
            capture = CudaCapture(backend.device)
        if capture is not None:
            self._graphs = DecodeGraphs(
                self._trunk,
                num_layers=self.num_layers,
                windows=[group.window for group in self.groups],
                page_tokens=page_tokens,
                max_context=self.max_context,
                max_rows=max_sequences,
                device=backend.device,
                budget=_GRAPH_BYTES,
                capture=capture,
            )

    def _lay_out(self, elements: int) -> None:
        """Make a pool of at most that many elements, in place of the one before."""
        self._pool = torch.empty(0)
        self._pool_shape = plan_pool(self.groups, self.page_tokens, elements)
        self.num_slabs = self._pool_shape.num_slabs
        self.pages_per_slab = self._pool_shape.pages_per_slab
        self._pool = torch.empty(
            self._pool_shape.elements, dtype=self.model.dtype, device=self.backend.device
        )
        self._kv = self._layer_views()

    def _run_largest(self, max_context: int, step_tokens: int, max_sequences: int) -> None:
        """Let the allocator take what the largest steps need, before the pool takes the rest."""
        shape = (max_context, step_tokens, max_sequences)
        for plan in largest_steps(self._pool_shape, self.num_layers, *shape):
            self.execute(plan)
        torch.cuda.synchronize(self.backend.device)

    @torch.inference_mode()
    def warm_up(self, progress: Callable[[str, float], None] | None = None) -> None:
        """Compile and capture decode steps now, not under the first requests."""
        if self._graphs is not None:
            self._graphs.warm(progress)

    def _layer_views(self) -> tuple[KVLayer, ...]:
        views: dict[int, KVLayer] = {}
        for group, stride in zip(self.groups, self._pool_shape.strides, strict=True):
            layer_size = 2 * group.kv_heads * group.head_dim * self.page_tokens
            for index, layer in enumerate(group.layers):
                views[layer] = self.backend.kv_layer(
                    self._pool,
                    page_stride=stride,
                    offset=index * layer_size,
                    kv_heads=group.kv_heads,
                    head_dim=group.head_dim,
                    page_tokens=self.page_tokens,
                )
        return tuple(views[layer] for layer in range(self.num_layers))

    # --- one step ------------------------------------------------------------

    def execute(self, plan: Plan) -> StepResult:
        """Copies, then one forward pass, then only the rows that need logits.

        Raises:
            ValueError: a plan that makes no sense.
        """
        with quiet_torch(self.backend):
            return self._execute(plan)

    def _execute(self, plan: Plan) -> StepResult:
        self._copy_pages(plan.copies)
        if not plan.runs:
            return StepResult(plan.step)
        captured = None if self._graphs is None else self._graphs.run(plan)
        if captured is not None:
            batch = StepBatch(captured, (), tuple((i, i + 1) for i in range(len(plan.runs))))
            return self._finish(plan, batch, captured)
        batch = self._builder.build(plan)
        exits = self._forward(batch)
        if exits is None:
            return StepResult(plan.step, tuple(RunResult() for _ in plan.runs))
        return self._finish(plan, batch, exits)

    def launch(self, plan: Plan) -> Launched:
        """See `Launcher`. A step that only draws is begun, and its ids stay on the device
        for runs that follow; any other is run to its end.

        Raises:
            ValueError: a plan that makes no sense.
        """
        with quiet_torch(self.backend):
            if not plan.runs or not self._only_draws(plan):
                if any(run.follows is not None for run in plan.runs):
                    raise ValueError("a run that follows must be one that only draws")
                result = self._execute(plan)
                return Launched(False, lambda: result)
            self._copy_pages(plan.copies)
            drawn, report = self._draw_ids(plan, self._exits(plan))
            self._drawn = drawn
            return Launched(True, partial(_results_of, plan, _fetch(report)))

    def _exits(self, plan: Plan) -> Tensor:
        """Hidden rows [R, D] of a plan of which every run has one row of logits."""
        follows = plan.runs[0].follows is not None
        feed = partial(self._feed, plan) if follows else None
        captured = None if self._graphs is None else self._graphs.run(plan, feed)
        if captured is not None:
            return captured
        batch = self._builder.build(plan)
        if feed is not None:
            feed(batch.ids)
        return self._trunk(batch)

    def _feed(self, plan: Plan, ids: Tensor) -> None:
        """Put what the step before drew into the ids of the runs that follow it."""
        sources = [run.follows for run in plan.runs]
        drawn = self._drawn
        if drawn is None or None in sources:
            raise ValueError("a run follows a step that drew nothing, or not every run does")
        if sources != list(range(drawn.shape[0])):
            at = torch.tensor(sources, dtype=torch.int64)
            if ids.device.type == "cuda":
                at = at.pin_memory().to(ids.device, non_blocking=True)
            drawn = drawn.index_select(0, at)
        ids[: drawn.shape[0]].copy_(drawn)

    @torch.inference_mode()
    def logits(self, plan: Plan) -> list[Tensor]:
        """As `execute`, but the logits that each run asks for: float32 [run.logits, V].

        For checks and tests; holds all rows at once.
        """
        self._copy_pages(plan.copies)
        batch = self._builder.build(plan)
        exits = self._forward(batch)
        if exits is None:
            return [torch.empty(0, self.vocab_size) for _ in plan.runs]
        logits = self.model.head(exits)
        return [logits[begin:end] for begin, end in batch.logit_rows]

    def _copy_pages(self, copies: Sequence[PageCopy]) -> None:
        for group, stride in enumerate(self._pool_shape.strides):
            pairs = [(copy.source, copy.target) for copy in copies if copy.group == group]
            if pairs:
                self.backend.copy_pages(
                    self._pool, stride, torch.tensor(pairs, device=self.backend.device)
                )

    def _forward(self, batch: StepBatch) -> Tensor | None:
        """Hidden rows [X, D] that need logits, normed, in the order in which they exit."""
        hidden = self.model.embed(batch.ids)
        exits = []
        for segment in batch.segments:
            if segment.gather is not None:
                hidden = hidden.index_select(0, segment.gather)
            step = ForwardStep(segment.positions, segment.attention, self._kv)
            whole = segment.end if segment.onward is None else segment.end - 1
            hidden = self.model.run_layers(hidden, segment.begin, whole, step)
            if segment.onward is not None:
                step = replace(step, onward=segment.onward)
                hidden = self.model.run_layers(hidden, whole, segment.end, step)
            if segment.num_exits:
                exits.append(
                    hidden if segment.exits is None else hidden.index_select(0, segment.exits)
                )
        if not exits:
            return None
        return self.model.final_norm(exits[0] if len(exits) == 1 else torch.cat(exits))

    def _trunk(self, batch: StepBatch) -> Tensor:
        """`_forward` of a batch of which every row needs logits."""
        exits = self._forward(batch)
        assert exits is not None
        return exits

    def _finish(self, plan: Plan, batch: StepBatch, exits: Tensor) -> StepResult:
        if self._only_draws(plan):
            return self._draw_all(plan, exits)
        rows = _rows_of(plan, batch)
        draws: dict[int, Draw] = {}
        scores: dict[int, list[TokenLogprob]] = {}
        finite = finite_rows(exits)
        bad = unsound_runs([row.run for row in rows], finite)
        pooled = _pooled(plan, batch, exits)
        if pooled:  # their rows need no head
            heads = [i for i, row in enumerate(rows) if row.run not in pooled]
            rows = [rows[i] for i in heads]
            at = torch.tensor(heads, dtype=torch.int64, device=exits.device)
            exits = exits.index_select(0, at)
        for begin in range(0, len(rows), self._chunk_rows):
            chunk = rows[begin : begin + self._chunk_rows]
            logits = self.model.head(exits[begin : begin + self._chunk_rows])
            self._score_targets(logits, chunk, scores)
            self._draw_tokens(logits, plan, chunk, draws)
        results = []
        for index in range(len(plan.runs)):
            drawn = draws.get(index)
            results.append(
                RunResult(
                    None if drawn is None else drawn.token,
                    None if drawn is None else drawn.logprob,
                    tuple(scores.get(index, ())),
                    NOT_FINITE if index in bad else "",
                    pooled.get(index, b""),
                    drawn is not None and drawn.token is None,
                )
            )
        return StepResult(plan.step, tuple(results))

    def _only_draws(self, plan: Plan) -> bool:
        """Whether every run leaves the trunk with one row of logits that is drawn from as it is."""
        trunk = (0, self.num_layers)
        return len(plan.runs) <= self._chunk_rows and all(
            run.logits == 1
            and run.layers == trunk
            and run.sample is not None
            and not run.prompt_targets
            and is_plain(run.sample)
            and not wants_logprob(run.sample.params)
            for run in plan.runs
        )

    def _draw_all(self, plan: Plan, exits: Tensor) -> StepResult:
        """One token a run."""
        return _results_of(plan, self._draw_ids(plan, exits)[1].tolist)

    def _draw_ids(self, plan: Plan, exits: Tensor) -> tuple[Tensor, Tensor]:
        """Drawn ids [R], and [2, R] of them and their rows' soundness: what the host must know
        of a step, in one tensor."""
        specs = [run.sample for run in plan.runs if run.sample is not None]
        drawn = self._sampler.draw_ids(self.model.head(exits), specs)
        return drawn, torch.stack([drawn, finite_rows(exits).to(drawn.dtype)])

    def _score_targets(
        self, logits: Tensor, chunk: Sequence[_Row], scores: dict[int, list[TokenLogprob]]
    ) -> None:
        """Logprobs of the prompt's own tokens; before the draw, which overwrites logits."""
        at = [i for i, row in enumerate(chunk) if row.target >= 0]
        if not at:
            return
        chosen = [chunk[i] for i in at]
        picked = logits.index_select(0, torch.tensor(at, device=logits.device))
        found = self._sampler.score(
            picked, [row.target for row in chosen], [row.params for row in chosen], prompt=True
        )
        for row, score in zip(chosen, found, strict=True):
            scores.setdefault(row.run, []).append(score)

    def _draw_tokens(
        self, logits: Tensor, plan: Plan, chunk: Sequence[_Row], draws: dict[int, Draw]
    ) -> None:
        at = [i for i, row in enumerate(chunk) if row.spec is not None]
        if not at:
            return
        if len(at) < len(chunk):
            logits = logits.index_select(0, torch.tensor(at, device=logits.device))
        specs = [spec for row in chunk if (spec := row.spec) is not None]
        sequences = [plan.runs[chunk[i].run].sequence for i in at]
        for i, draw in zip(at, self._sampler.draw(logits, specs, sequences), strict=True):
            draws[chunk[i].run] = draw

    # --- what it is ------------------------------------------------------------

    def info(self) -> EngineInfo:
        """The runner's description; see `EngineInfo`."""
        dtype = str(self.model.dtype).removeprefix("torch.")
        return EngineInfo(
            model=self.identity.name,
            architecture=self.model.architecture,
            dtype=dtype,
            device=str(self.backend.device),
            backend=self.backend.name,
            threads=int(getattr(self.backend, "threads", 0)),
            vocab_size=self.vocab_size,
            num_layers=self.num_layers,
            max_context=self.max_context,
            page_tokens=self.page_tokens,
            pool_tokens=self._pool_shape.tokens(),
            pool_bytes=self.pool_bytes,
            weight_bytes=self.model.weight_bytes,
            fingerprint=tree.fingerprint(
                architecture=self.model.architecture,
                weights=self.identity.weights_hash,
                dtype=dtype,
                device=self.backend.kind,
                # Why a backend was chosen does not move bits.
                backend={k: v for k, v in self.backend.describe().items() if k != "chosen"},
                numpy=np.__version__,  # rotation tables
                lockstep=lockstep.__version__,
                torch=torch.__version__,
                llguidance=_grammar_library(),  # what a grammar allows
            ),
            load_seconds=self.identity.load_seconds,
            hidden_size=self.model.hidden_size,
        )


def _fetch(report: Tensor) -> Callable[[], list[list[int]]]:
    """Begin to copy a tensor to the host; the result waits for the copy."""
    if report.device.type != "cuda":
        return report.tolist
    host = torch.empty(report.shape, dtype=report.dtype, pin_memory=True)
    host.copy_(report, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()

    def fetched() -> list[list[int]]:
        done.synchronize()
        return cast("list[list[int]]", host.tolist())

    return fetched


def _results_of(plan: Plan, fetch: Callable[[], list[list[int]]]) -> StepResult:
    """The result of a step that only draws, from its report (`Runner._draw_ids`)."""
    tokens, finite = fetch()
    results = (
        RunResult(token, error="" if good else NOT_FINITE)
        for token, good in zip(tokens, finite, strict=True)
    )
    return StepResult(plan.step, tuple(results))


def _grammar_library() -> str:
    """Its version, without loading it; "" on a machine that has none and so serves no grammar."""
    try:
        return metadata.version("llguidance")
    except metadata.PackageNotFoundError:
        return ""


def finite_rows(exits: Tensor) -> Tensor:
    """Which hidden rows [X, D] are wholly finite: bool [X]."""
    return torch.isfinite(exits).all(dim=1)


def unsound_runs(runs: Sequence[int], finite: Tensor) -> set[int]:
    """Runs with a row that is not finite; `runs` names the run of each row."""
    return {run for run, good in zip(runs, finite.tolist(), strict=True) if not good}


def _rows_of(plan: Plan, batch: StepBatch) -> list[_Row]:
    """One `_Row` for every row of logits, in the order in which they exit."""
    total = max(end for _begin, end in batch.logit_rows)
    rows: list[_Row] = [_Row(-1)] * total
    for index, (run, (begin, end)) in enumerate(zip(plan.runs, batch.logit_rows, strict=True)):
        if begin == end:
            continue
        params = run.prompt_params or (run.sample.params if run.sample is not None else None)
        targets = run.prompt_targets or (-1,) * (end - begin)
        for row, target in zip(range(begin, end), targets, strict=True):
            rows[row] = _Row(index, target, params)
        rows[end - 1].spec = run.sample
    return rows


def _pooled(plan: Plan, batch: StepBatch, exits: Tensor) -> dict[int, bytes]:
    """What every run with pooled rows reports of them, by the run's index."""
    at = [index for index, run in enumerate(plan.runs) if run.pooling]
    if not at:
        return {}
    spans = [batch.logit_rows[index] for index in at]
    found = pool(exits, spans, [plan.runs[index].pooling for index in at])
    return dict(zip(at, found, strict=True))


@contextmanager
def quiet_torch(backend: Backend) -> Iterator[None]:
    """Keep torch's own threads out of the native backend's way.

    Beside its kernels only small tensors are touched; a second pool of threads that
    spins on them takes the cores from the first (a decode step took up to 80 ms more
    on two busy cores).
    """
    before = torch.get_num_threads()
    if backend.name != "native" or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def load_runner(
    config: EngineConfig, progress: Callable[[str, float], None] | None = None
) -> Runner:
    """Open the checkpoint, build backend and model, and lay out the pool.

    Raises:
        ModelError: the model cannot be loaded.
        ConfigError: a device or backend that is absent, or a pool that is too small.
    """
    started = time.monotonic()
    options = config.model
    checkpoint = open_checkpoint(options.name)
    backend = make_backend(options)
    cache = config.cache.resolved(backend.kind)
    scheduler = config.scheduler.resolved(backend.kind)
    with quiet_torch(backend):
        model = load_model(
            checkpoint,
            backend,
            model_dtype(options.dtype),
            progress,
            max_context=scheduler.max_context,
        )
    check_page(cache.page_tokens, model.groups, backend.kind)
    runner = Runner(
        model,
        backend,
        page_tokens=cache.page_tokens,
        memory_bytes=cache.memory_bytes,
        max_context=scheduler.max_context,
        step_tokens=scheduler.max_step_tokens,
        max_sequences=scheduler.max_sequences,
        graphs=options.cuda_graphs,
    )
    runner.warm_up(progress)
    runner.identity = Identity(options.name, checkpoint.weights_hash(), time.monotonic() - started)
    return runner


def check_page(page_tokens: int, groups: Sequence[LayerGroup], kind: str) -> None:
    """Pages and attention blocks, which have absolute positions, must fit into each other."""
    for group in groups:
        block = tree.BLOCK[kind].get(group.head_dim, page_tokens)
        whole = kind == "cuda" and page_tokens % block == 0  # blocks in a page
        if block % page_tokens and not whole:
            raise ConfigError(
                f"page_tokens ({page_tokens}) must divide the attention block of {block} tokens"
                + (" or be a multiple of it" if kind == "cuda" else "")
            )
