"""The boundary between scheduler and device: `Plan` in, `StepResult` out, nothing else.

This module imports neither torch nor any other room, so the scheduler can be
driven by a simulator without a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lockstep.branch import Branch
from lockstep.types import LayerGroup, Pooling, SamplingParams, TokenLogprob

POOLED_UNIT = 2.0**-24
"""What the integers of a mean count, see `RunResult.pooled`."""


class AllowedIds(Protocol):
    """The ids that a grammar allows next, computed while the forward pass runs."""

    def words(self) -> NDArray[np.int32]:
        """Bit t % 32 of word t // 32 is set if id t may be drawn; waits until that is known."""
        ...


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How to draw the token that follows a run's last row.

    Attributes:
        params: the request's sampling parameters.
        seed: 64-bit seed; `choice`: index of the choice; `position`: index of the
            output token to be drawn (0 for the first). These three and the token id
            are all that the random numbers depend on.
        history: prompt and output ids so far, in order (penalties, bad words);
            a view of the scheduler's list, valid until the step returns.
        prompt_len: how many of `history` are prompt.
        stop_ids: ids that cannot be drawn while position < params.min_tokens.
        bad_ids: token sequences whose completion is forbidden.
        allowed: what a grammar lets follow; None where there is none.
    """

    params: SamplingParams
    seed: int
    choice: int
    position: int
    history: Sequence[int]
    prompt_len: int
    stop_ids: tuple[int, ...] = ()
    bad_ids: tuple[tuple[int, ...], ...] = ()
    allowed: AllowedIds | None = None


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Consecutive tokens of one sequence that a step computes.

    Attributes:
        sequence: the sequence's number, unique for the engine's life.
        start: absolute position of the first token.
        tokens: ids, at least one.
        pages: one page table per cache group, in the executor's group order. Entry i
            holds positions [i * page_tokens, (i + 1) * page_tokens); -1 where a
            sliding window no longer needs the page. Covers start + len(tokens) - 1 in
            every group that the run's layers read or write; empty in any other.
        layers: half-open range of layers that these rows pass through. (0, num_layers)
            for the trunk. Rows leave after `layers[1] - 1`.
        source: None when the rows enter at layer `layers[0]` == 0 from the embedding;
            else the index in the plan of the run whose hidden rows they copy at the
            entrance of layer `layers[0]` (a fork: the rows double there).
        logits: how many of the last rows need logits (0 none, 1 the next token,
            more for prompt logprobs and verification).
        prompt_targets: for prompt logprobs, the id that follows each of the last
            `logits` rows, -1 where none is wanted; empty otherwise.
        sample: how to draw the next token after the last row; None when the
            prompt is not finished in this step.
        prompt_params: the request's sampling parameters where `prompt_targets` are
            wanted: how many alternatives and which given ids to report, raw or
            processed. None reports the targets alone.
        pooling: the last `logits` rows need no logits: their hidden states are pooled.
        branch: key of the branch (`Branch.key`) whose adapters act on these rows in its layers
            [fork, exit); "" for the trunk's own rows. What the adapters touch leaves at `exit`
            or before; rows that both use are two runs, see `source`.
        scores: the last row, the only one with logits, is read by the branch's head.
        keeps: all rows that come from below to an `activations` group's layer are stored on its
            pages, whether they go on there or leave (layers[1]), whatever `logits` says; for
            every such group in which the run has pages.
        kept: with `source` None and layers[0] > 0: the rows come from the pages of that layer's
            activations group. They go on as any others do, and leave what others leave: a
            trunk run of (stop, num_layers) is the rest of one that kept its rows at (0, stop).
        follows: the run, by its index in the plan before, whose drawn id is this run's only
            token; `tokens` is (0,) in its place. None where the tokens are known.
    """

    sequence: int
    start: int
    tokens: Sequence[int]
    pages: tuple[Sequence[int], ...]
    layers: tuple[int, int]
    source: int | None = None
    logits: int = 0
    prompt_targets: Sequence[int] = ()
    sample: SampleSpec | None = None
    prompt_params: SamplingParams | None = None
    pooling: Pooling = ""
    follows: int | None = None
    branch: str = ""
    scores: bool = False
    keeps: bool = False
    kept: bool = False


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy a page of a group before the step computes anything (copy-on-write)."""

    group: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: copies first, then one forward pass over all runs.

    Every row's keys and values of a layer are written before any row of that
    layer attends, so a run may read pages that another run of the same plan fills.
    """

    step: int
    runs: tuple[TokenRun, ...]
    copies: tuple[PageCopy, ...] = ()


@dataclass(frozen=True, slots=True)
class RunResult:
    """What the device computed for one run, in the plan's order.

    Attributes:
        token: the drawn id; None when the run had no SampleSpec, or was `stuck`.
        logprob: its logprobs when the request asked for them.
        prompt_logprobs: one entry per `prompt_targets` that is not -1, in order.
        error: why this run's numbers are worthless (hidden states that are not finite),
            "" when they are sound; the other runs of the step are not affected.
        pooled: of a run with `pooling`, one value for each hidden dimension, little-endian:
            "last": float32, the last row after the final norm. "mean": int64, the sum over
            the run's pooled rows in units of `POOLED_UNIT`, each value rounded to one and
            held within +-2**18. Integers add up to the same sum in any order, so a mean does
            not depend on how the prompt was cut into runs.
        scores: of a run with `scores`, the head's float32 outputs. Beside an `error` they say
            that the rows are sound and it is the outputs that are not finite.
        stuck: nothing could be drawn: grammar, bad words and min_tokens leave no id.
    """

    token: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str = ""
    pooled: bytes = b""
    stuck: bool = False
    scores: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of a plan; `runs` is parallel to `Plan.runs`."""

    step: int
    runs: tuple[RunResult, ...] = field(default_factory=tuple)


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that was begun.

    Attributes:
        draws: every run draws its token on the device, from logits as they are, so that
            a step whose runs `follow` these may be begun before the result is known.
        result: waits for the step; raises what went wrong with it. Called once.
    """

    draws: bool
    result: Callable[[], StepResult]


class Executor(Protocol):
    """What the engine needs of a runner; a scripted fake satisfies it in tests.

    Attributes:
        groups: the model's own cache groups, cut where the trunk may stop for a branch, and
            behind them those of branches (`runner.groups`), in the order of `TokenRun.pages`.
        num_layers, vocab_size, max_context: of the model.
        page_tokens, num_slabs, pages_per_slab: geometry of the page pool. Page ids
            of group g run from 0 to num_slabs * pages_per_slab[g] - 1; slab s holds
            ids s * pages_per_slab[g] .. (s + 1) * pages_per_slab[g] - 1 of
            whichever one group owns it at the time.
    """

    groups: tuple[LayerGroup, ...]
    num_layers: int
    vocab_size: int
    max_context: int
    page_tokens: int
    num_slabs: int
    pages_per_slab: tuple[int, ...]

    def execute(self, plan: Plan) -> StepResult:
        """Run one step. Raises on failure; then no row of the plan counts as computed."""
        ...


@runtime_checkable
class Launcher(Protocol):
    """An `Executor` that can begin a step and tell its result later.

    Steps run in the order in which they are begun. What a plan refers to (page tables,
    tokens) is read before `launch` returns.
    """

    def launch(self, plan: Plan) -> Launched:
        """Begin a step; `execute` is to launch it and wait. Raises as `execute` does."""
        ...


@runtime_checkable
class BranchHost(Protocol):
    """An `Executor` that runs decision branches. Called between steps."""

    def load_branch(self, folder: str) -> Branch:
        """Read a branch's folder and make its key usable in plans.

        A key that is loaded twice stays until it was unloaded twice.

        Raises:
            BranchError: it is for other weights or does not fit the model, its tensors are
                not what they should be, or its contexts need a tail that was not asked for
                when the executor was made.
        """
        ...

    def unload_branch(self, key: str) -> None:
        """Free a branch; no later plan names its key.

        Raises:
            KeyError: it is not loaded.
        """
        ...
