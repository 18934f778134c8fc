"""The forward pass of one step, and how a runner comes to be."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import metadata

import numpy as np
import torch
from torch import Tensor

import lockstep
from lockstep.branch import Branch, read_branch
from lockstep.config import ConfigError, EngineConfig
from lockstep.kernels import make_backend, tree
from lockstep.kernels.contract import Backend
from lockstep.model import DecoderModel, load_model
from lockstep.model.base import model_dtype
from lockstep.runner.batch import BatchBuilder, StepBatch
from lockstep.runner.branches import BranchTable
from lockstep.runner.finish import Reporter, fetch, results_of
from lockstep.runner.forward import ForwardPass
from lockstep.runner.graphs import Capture, CudaCapture, DecodeGraphs
from lockstep.runner.groups import executor_groups, own_groups
from lockstep.runner.memory import default_pool_bytes, largest_steps, plan_pool
from lockstep.runner.plan import Launched, PageCopy, Plan, RunResult, StepResult
from lockstep.runner.sampler import Sampler
from lockstep.types import BranchLayers, EngineInfo, LayerGroup
from lockstep.weights import open_checkpoint

_MIB = 1024 * 1024
_LOGIT_BYTES = {"cpu": 64 * _MIB, "cuda": 512 * _MIB}  # of one chunk of rows
_GRAPH_BYTES = 1024 * _MIB  # of device memory for captured decode steps


@dataclass(frozen=True, slots=True)
class Identity:
    """What a runner is told about the model beside its tensors, for `Runner.info`."""

    name: str = ""
    weights_hash: str = ""
    load_seconds: float = 0.0


class Runner:
    """A model, its page pool, its branches and a sampler: satisfies `plan.Executor`, `Launcher`
    and `BranchHost`.

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
        branches: branches to come, or their layers, for which cache groups are laid out.

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
        branches: Sequence[Branch | BranchLayers] = (),
    ) -> None:
        self.model = model
        self.backend = backend
        self.groups = executor_groups(model.groups, branches, model.hidden_size)
        self.num_layers = model.num_layers
        self.vocab_size = model.vocab_size
        self.page_tokens = page_tokens
        self.identity = identity or Identity()
        on_cuda = backend.device.type == "cuda"
        self._branches = BranchTable(model, self.groups)
        self._builder = BatchBuilder(
            model.groups, self.groups, page_tokens, backend.device, self._branches.places
        )
        chunk_rows = max(16, _LOGIT_BYTES[backend.kind] // (4 * self.vocab_size))
        sampler = Sampler(backend, self.vocab_size)
        self._reporter = Reporter(model, sampler, self._branches, chunk_rows)
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
        own = own_groups(self.groups)
        self.max_context = self._pool_shape.longest_sequence(own, limit, step_tokens)
        if self.max_context < 1:
            raise ConfigError(f"cache_bytes ({budget}) holds not one page of every layer group")
        if capture is None and graphs and on_cuda:
            capture = CudaCapture(backend.device)
        if capture is not None:
            self._graphs = DecodeGraphs(
                self._trunk,
                model_groups=model.groups,
                groups=self.groups,
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
        self._pass = ForwardPass(
            self.model, self.groups, self._pool, self._pool_shape, self._branches
        )

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
        captured = self._captured(plan)
        if captured is not None:
            spans = [(i, i + 1) for i in range(len(plan.runs))]
            return self._reporter.report_normed(plan, spans, captured)
        batch = self._builder.build(plan)
        left = self._pass.run(batch)
        if left is None:
            return StepResult(plan.step, tuple(RunResult() for _ in plan.runs))
        return self._reporter.report(plan, batch.logit_rows, left)

    def launch(self, plan: Plan) -> Launched:
        """See `Launcher`. A step that only draws is begun, and its ids stay on the device
        for runs that follow; any other is run to its end.

        Raises:
            ValueError: a plan that makes no sense.
        """
        with quiet_torch(self.backend):
            if not plan.runs or not self._reporter.only_draws(plan):
                if any(run.follows is not None for run in plan.runs):
                    raise ValueError("a run that follows must be one that only draws")
                result = self._execute(plan)
                return Launched(False, lambda: result)
            self._copy_pages(plan.copies)
            drawn, report = self._reporter.draw_ids(plan, self._exits(plan))
            self._drawn = drawn
            return Launched(True, partial(results_of, plan, fetch(report)))

    def _exits(self, plan: Plan) -> Tensor:
        """Hidden rows [R, D] of a plan of which every run has one row of logits."""
        follows = plan.runs[0].follows is not None
        feed = partial(self._feed, plan) if follows else None
        captured = self._captured(plan, feed)
        if captured is not None:
            return captured
        batch = self._builder.build(plan)
        if feed is not None and batch.ids is not None:
            feed(batch.ids)
        return self._trunk(batch)

    def _captured(self, plan: Plan, feed: Callable[[Tensor], None] | None = None) -> Tensor | None:
        """Normed hidden rows by a captured step; None where the plan is not for one."""
        if self._graphs is None or any(run.branch or run.keeps for run in plan.runs):
            return None
        return self._graphs.run(plan, feed)

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
        left = self._pass.run(batch)
        if left is None:
            return [torch.empty(0, self.vocab_size) for _ in plan.runs]
        logits = self.model.logits(left)
        return [logits[begin:end] for begin, end in batch.logit_rows]

    @torch.inference_mode()
    def rows(self, plan: Plan) -> list[Tensor]:
        """As `execute`, but each run's hidden rows [run.logits, D] as they leave `layers[1]`,
        before any norm: what training reads. Holds all rows at once.
        """
        self._copy_pages(plan.copies)
        batch = self._builder.build(plan)
        left = self._pass.run(batch)
        if left is None:
            left = torch.empty(0, self.model.hidden_size, dtype=self.model.dtype)
        return [left[begin:end] for begin, end in batch.logit_rows]

    def _copy_pages(self, copies: Sequence[PageCopy]) -> None:
        for group, stride in enumerate(self._pool_shape.strides):
            pairs = [(copy.source, copy.target) for copy in copies if copy.group == group]
            if pairs:
                self.backend.copy_pages(
                    self._pool, stride, torch.tensor(pairs, device=self.backend.device)
                )

    def _trunk(self, batch: StepBatch) -> Tensor:
        """Normed hidden rows of a batch of which every row needs logits."""
        left = self._pass.run(batch)
        assert left is not None
        return self.model.final_norm(left)

    # --- branches ------------------------------------------------------------

    @torch.inference_mode()
    def load_branch(self, folder: str) -> Branch:
        """See `plan.BranchHost`."""
        return self._branches.load(folder, self.identity.weights_hash)

    def unload_branch(self, key: str) -> None:
        """See `plan.BranchHost`."""
        self._branches.unload(key)

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
            weights_hash=self.identity.weights_hash,
        )


def _grammar_library() -> str:
    """Its version, without loading it; "" on a machine that has none and so serves no grammar."""
    try:
        return metadata.version("llguidance")
    except metadata.PackageNotFoundError:
        return ""


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
    """Open the checkpoint, build backend and model, and lay out the pool, with room for the
    tails of the branches that the configuration names (`Runner.load_branch` loads them).

    Raises:
        ModelError: the model cannot be loaded.
        BranchError: a branch's description that cannot be read.
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
        branches=[
            *(read_branch(folder).layers for _, folder in config.branches.load),
            *config.branches.layers,
        ],
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
