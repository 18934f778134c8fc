"""A step that has been launched: what it drew stays on the device until somebody waits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.kernels.contract import SampleBatch
from lockstep.runner.plan import Plan, RunResult, StepResult

NOT_FINITE = "the model's hidden states are not finite numbers"


class DoneStep:
    """A step whose results are on the host already."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result


class DrawnStep:
    """A step in which every run drew one token and reports nothing else.

    One small copy brings ids and soundness to the host; `wait` is the step's only sync.

    Attributes:
        ids: int32 [runs] on the device, for the plan that continues this one.
        sampling: parameters of the draw, None where every row was greedy.
    """

    def __init__(
        self, plan: Plan, drawn: Tensor, finite: Tensor, sampling: SampleBatch | None
    ) -> None:
        self._step = plan.step
        self.sampling = sampling
        packed = torch.stack([drawn.to(torch.int32), finite.to(torch.int32)])
        self.ids = packed[0]
        self._arrived: torch.cuda.Event | None = None
        self._host = packed
        if packed.device.type == "cuda":
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def wait(self) -> StepResult:
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens, finite = self._host.tolist()
        return StepResult(self._step, tuple(map(_result, tokens, finite)))


def _result(token: int, finite: int) -> RunResult:
    return RunResult(token) if finite else RunResult(token, error=NOT_FINITE)


def finite_rows(exits: Tensor) -> Tensor:
    """Which hidden rows [X, D] are wholly finite: bool [X]."""
    return torch.isfinite(exits).all(dim=1)


def unsound_runs(runs: Sequence[int], finite: Tensor) -> set[int]:
    """Runs with a row that is not finite; `runs` names the run of each row."""
    if bool(finite.all()):
        return set()
    return {run for run, good in zip(runs, finite.tolist(), strict=True) if not good}
