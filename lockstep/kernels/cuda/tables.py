"""Measured tiles of one NVIDIA H200; written by `python bench/gpu_tune.py --write`.

(output columns, K, gated) -> {bucket of rows: (m, n, k, warps, stages, bulk, group)}.
"""

from __future__ import annotations

TILES: dict[tuple[int, int, bool], dict[int, tuple[int, int, int, int, int, bool, int]]] = {}
