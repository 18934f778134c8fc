"""Which tile computes a product: by weight shape and number of rows. No bit depends on it.

For what `stream.py` leaves. The measured table is `tables.py`, written by
`bench/gpu_tune.py`; shapes that it does not know take the defaults below.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from lockstep.kernels.cuda.tables import TILES

# A bucket holds the row counts up to its value; the last has no upper end.
BUCKETS = (16, 32, 64, 128, 256, 512, 1 << 30)


@dataclass(frozen=True, slots=True)
class Tile:
    """Shape of one program of a product.

    Attributes:
        m, n, k: rows, output features and input features of a tile.
        warps, stages: of a program, and of its software pipeline.
        bulk: a persistent kernel that loads with the bulk copy engine; else one
            program a tile with plain loads.
        group: row tiles that are walked before the next column of tiles.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    bulk: bool = False
    group: int = 8


def bucket(rows: int) -> int:
    """The bucket that `rows` falls in."""
    return next(limit for limit in BUCKETS if rows <= limit)


def default_tile(rows: int, n: int, dtype: torch.dtype, gated: bool) -> Tile:
    """A reasonable tile for a shape that nobody measured. n counts output columns."""
    limit = bucket(rows)
    if dtype == torch.float32:
        return Tile(16, 32, 32, 4, 2) if limit <= 32 else Tile(64, 64, 16, 8, 2)
    if limit <= 16:
        return Tile(16, 32 if gated or n <= 8192 else 64, 128, 4, 5)
    if limit <= 32:
        return Tile(32, 32 if gated or n <= 8192 else 64, 128, 4, 4)
    if limit <= 64:
        return Tile(64, 32 if gated or n <= 8192 else 64, 128, 4, 4)
    if limit <= 256:
        return Tile(64 if limit <= 128 else 128, 64, 64, 4, 4)
    if n < 1024:
        return Tile(64, 64, 64, 4, 4)
    return Tile(128, 128 if gated else 256, 64, 8, 3, bulk=True)


@lru_cache(maxsize=4096)
def _choose(limit: int, n: int, k: int, dtype: torch.dtype, gated: bool) -> Tile:
    if dtype == torch.bfloat16:
        known = TILES.get((n, k, gated), {}).get(limit)
        if known is not None:
            return Tile(*known)
    return default_tile(limit, n, dtype, gated)


def choose(rows: int, n: int, k: int, dtype: torch.dtype, gated: bool) -> Tile:
    """The tile for `rows` rows of a weight with n output columns (2 n stored, if gated)."""
    return _choose(bucket(rows), n, k, dtype, gated)
