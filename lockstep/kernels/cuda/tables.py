"""Measured tiles of one NVIDIA H200; written by `python bench/gpu_tune.py --write`.

(output columns, K, gated) -> {bucket of rows: (m, n, k, warps, stages, bulk, group)}.
"""

from __future__ import annotations

TILES: dict[tuple[int, int, bool], dict[int, tuple[int, int, int, int, int, bool, int]]] = {
    (4096, 4096, False): {
        512: (128, 128, 64, 8, 4, True, 8),
        1073741824: (128, 256, 64, 8, 3, True, 8),
    },
    (4096, 12288, False): {
        512: (128, 128, 64, 8, 4, True, 8),
        1073741824: (128, 256, 64, 8, 4, True, 8),
    },
    (6144, 4096, False): {
        512: (128, 256, 64, 8, 4, True, 8),
        1073741824: (128, 256, 64, 8, 4, True, 8),
    },
    (12288, 4096, True): {
        512: (128, 128, 64, 8, 4, True, 8),
        1073741824: (128, 128, 64, 8, 4, True, 8),
    },
    (151936, 4096, False): {
        16: (16, 64, 256, 4, 4, True, 8),
    },
}
