"""What a step reports: hidden rows to tokens, logprobs, pooled vectors and scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from lockstep.model import DecoderModel
from lockstep.runner.branches import BranchTable
from lockstep.runner.penalties import is_plain
from lockstep.runner.plan import Plan, RunResult, SampleSpec, StepResult
from lockstep.runner.pooling import pool
from lockstep.runner.sampler import Draw, Sampler, wants_logprob
from lockstep.types import SamplingParams, TokenLogprob

NOT_FINITE = "the model's hidden states are not finite numbers"
NOT_FINITE_SCORES = "the branch's scores are not finite numbers"

Spans = Sequence[tuple[int, int]]


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


class Reporter:
    """Makes a plan's results from the rows that left the layers.

    Args:
        chunk_rows: rows of logits at once.
    """

    def __init__(
        self, model: DecoderModel, sampler: Sampler, branches: BranchTable, chunk_rows: int
    ) -> None:
        self.chunk_rows = chunk_rows
        self._model = model
        self._sampler = sampler
        self._branches = branches

    def report(self, plan: Plan, spans: Spans, left: Tensor) -> StepResult:
        """Results from hidden rows [X, D] as they left, run i's at `spans[i]`."""
        scored = self._scored(plan, spans, left)
        if not scored:
            return self.report_normed(plan, spans, self._model.final_norm(left))
        rest = [i for i in range(len(plan.runs)) if i not in scored]
        kept = [row for i in rest for row in range(*spans[i])]
        results = [RunResult()] * len(plan.runs)
        if kept:
            at = torch.tensor(kept, dtype=torch.int64, device=left.device)
            part = Plan(plan.step, tuple(plan.runs[i] for i in rest))
            normed = self._model.final_norm(left.index_select(0, at))
            found = self.report_normed(part, _closed_up([spans[i] for i in rest]), normed)
            for i, result in zip(rest, found.runs, strict=True):
                results[i] = result
        for i, result in scored.items():
            results[i] = result
        return StepResult(plan.step, tuple(results))

    def report_normed(self, plan: Plan, spans: Spans, exits: Tensor) -> StepResult:
        """As `report`, from rows after the final norm; no run of the plan is scored."""
        if self.only_draws(plan):
            return results_of(plan, self.draw_ids(plan, exits)[1].tolist)
        rows = _rows_of(plan, spans)
        draws: dict[int, Draw] = {}
        scores: dict[int, list[TokenLogprob]] = {}
        bad = _unsound_runs([row.run for row in rows], _finite_rows(exits))
        pooled = _pooled(plan, spans, exits)
        if pooled:  # their rows need no head
            heads = [i for i, row in enumerate(rows) if row.run not in pooled]
            rows = [rows[i] for i in heads]
            at = torch.tensor(heads, dtype=torch.int64, device=exits.device)
            exits = exits.index_select(0, at)
        for begin in range(0, len(rows), self.chunk_rows):
            chunk = rows[begin : begin + self.chunk_rows]
            logits = self._model.head(exits[begin : begin + self.chunk_rows])
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

    def only_draws(self, plan: Plan) -> bool:
        """Whether every run leaves the trunk with one row of logits that is drawn from as it is."""
        trunk = (0, self._model.num_layers)
        return len(plan.runs) <= self.chunk_rows and all(
            run.logits == 1
            and run.layers == trunk
            and run.sample is not None
            and not run.prompt_targets
            and is_plain(run.sample)
            and not wants_logprob(run.sample.params)
            for run in plan.runs
        )

    def draw_ids(self, plan: Plan, exits: Tensor) -> tuple[Tensor, Tensor]:
        """Drawn ids [R] of a plan that only draws, from its normed rows, and [2, R] of them and
        their rows' soundness: what the host must know of a step, in one tensor."""
        specs = [run.sample for run in plan.runs if run.sample is not None]
        drawn = self._sampler.draw_ids(self._model.head(exits), specs)
        return drawn, torch.stack([drawn, _finite_rows(exits).to(drawn.dtype)])

    def _scored(self, plan: Plan, spans: Spans, left: Tensor) -> dict[int, RunResult]:
        """Results of the runs that a branch's head reads, by the run's index."""
        by_branch: dict[str, list[int]] = {}
        for i, run in enumerate(plan.runs):
            if run.scores:
                by_branch.setdefault(run.branch, []).append(i)
        found: dict[int, RunResult] = {}
        for key, members in by_branch.items():
            at = torch.tensor([spans[i][0] for i in members], device=left.device)
            hidden = left.index_select(0, at)
            scores = self._branches.scores(key, hidden)
            sound = torch.stack([_finite_rows(hidden), _finite_rows(scores)]).tolist()
            for i, row, rows_good, good in zip(members, scores.tolist(), *sound, strict=True):
                error = "" if good else NOT_FINITE_SCORES
                found[i] = RunResult(
                    error=error if rows_good else NOT_FINITE,
                    scores=tuple(row) if rows_good else (),
                )
        return found

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


def fetch(report: Tensor) -> Callable[[], list[list[int]]]:
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


def results_of(plan: Plan, fetched: Callable[[], list[list[int]]]) -> StepResult:
    """The result of a step that only draws, from its report (`Reporter.draw_ids`)."""
    tokens, finite = fetched()
    results = (
        RunResult(token, error="" if good else NOT_FINITE)
        for token, good in zip(tokens, finite, strict=True)
    )
    return StepResult(plan.step, tuple(results))


def _closed_up(spans: Spans) -> list[tuple[int, int]]:
    """The same stretches, one behind the other."""
    found, total = [], 0
    for begin, end in spans:
        found.append((total, total + end - begin))
        total += end - begin
    return found


def _finite_rows(exits: Tensor) -> Tensor:
    """Which rows [X, D] are wholly finite: bool [X]."""
    return torch.isfinite(exits).all(dim=1)


def _unsound_runs(runs: Sequence[int], finite: Tensor) -> set[int]:
    """Runs with a row that is not finite; `runs` names the run of each row."""
    return {run for run, good in zip(runs, finite.tolist(), strict=True) if not good}


def _rows_of(plan: Plan, spans: Spans) -> list[_Row]:
    """One `_Row` for every row of logits, in the order in which they exit."""
    total = max(end for _begin, end in spans)
    rows: list[_Row] = [_Row(-1)] * total
    for index, (run, (begin, end)) in enumerate(zip(plan.runs, spans, strict=True)):
        if begin == end:
            continue
        params = run.prompt_params or (run.sample.params if run.sample is not None else None)
        targets = run.prompt_targets or (-1,) * (end - begin)
        for row, target in zip(range(begin, end), targets, strict=True):
            rows[row] = _Row(index, target, params)
        rows[end - 1].spec = run.sample
    return rows


def _pooled(plan: Plan, spans: Spans, exits: Tensor) -> dict[int, bytes]:
    """What every run with pooled rows reports of them, by the run's index."""
    at = [index for index, run in enumerate(plan.runs) if run.pooling]
    if not at:
        return {}
    found = pool(exits, [spans[index] for index in at], [plan.runs[index].pooling for index in at])
    return dict(zip(at, found, strict=True))
