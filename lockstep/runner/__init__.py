"""Runner: a `Plan` in, a `StepResult` out. It computes; it never decides.

Where does my class go?
- `plan.py`: the two records that cross between scheduler and device (no torch here).
- `lanes.py`: which rows of a plan pass through which layers together (no torch).
- `batch.py`: a plan turned into tensors. `forward.py`: the forward pass over them.
- `finish.py`: what a step reports of the rows that left. `runner.py`: these, as one.
- `branches.py`: the branches that are loaded; `groups.py`: the cache groups that they need
  (no torch).
- `sampler.py`: logits to tokens and logprobs; `penalties.py`: what changes logits first;
  `bans.py`: ids that may not be drawn (no torch here either).
- `memory.py`: how the pool is laid out and how large it may be.

Importing this package imports no torch; `load_runner` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lockstep.config import EngineConfig

if TYPE_CHECKING:
    from lockstep.runner.runner import Runner


def load_runner(
    config: EngineConfig, progress: Callable[[str, float], None] | None = None
) -> Runner:
    """Load the model that the configuration names; see `runner.load_runner`."""
    from lockstep.runner.runner import load_runner as load

    return load(config, progress)
