"""Hidden rows to one vector of a prompt; the forms are those of `RunResult.pooled`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.runner.plan import POOLED_UNIT
from lockstep.types import Pooling

_LIMIT = 2.0**18  # times 2**24 units times 2**20 rows stays below 2**63
_ROWS = 1024  # widened to float64 at once


def pool(exits: Tensor, spans: Sequence[tuple[int, int]], kinds: Sequence[Pooling]) -> list[bytes]:
    """What to report of each span of normed hidden rows [X, D]; one copy to the host a kind.

    Values that are not finite give worthless sums; the caller reports such runs.
    """
    found: dict[int, bytes] = {}
    for kind in ("last", "mean"):
        at = [i for i, own in enumerate(kinds) if own == kind]
        if at:
            form = _last if kind == "last" else _sum
            vectors = torch.stack([form(exits[slice(*spans[i])]) for i in at]).cpu().numpy()
            found.update((i, vector.tobytes()) for i, vector in zip(at, vectors, strict=True))
    return [found[i] for i in range(len(kinds))]


def _last(rows: Tensor) -> Tensor:
    return rows[-1].to(torch.float32)


def _sum(rows: Tensor) -> Tensor:
    total = torch.zeros(rows.shape[1], dtype=torch.int64, device=rows.device)
    for begin in range(0, rows.shape[0], _ROWS):
        values = rows[begin : begin + _ROWS].to(torch.float64).clamp(-_LIMIT, _LIMIT).nan_to_num()
        total += (values / POOLED_UNIT).round().to(torch.int64).sum(0)
    return total
