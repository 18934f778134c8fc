"""Which bytes of a checkpoint its hash reads."""

from __future__ import annotations

from collections.abc import Iterator

WHOLE_BYTES = 2 << 30
"""Checkpoints up to this size are hashed whole, about a second a gigabyte."""
_PIECE = 1 << 20
_SAMPLES = 64
_SAMPLE_BYTES = 4096


def pieces(size: int, total: int) -> Iterator[tuple[int, int]]:
    """(start, count) of the bytes to hash of a tensor of `size` bytes in a checkpoint of `total`.

    All of them up to `WHOLE_BYTES`; beyond, evenly spaced samples, the first and last
    bytes among them.
    """
    if total <= WHOLE_BYTES or size <= _SAMPLES * _SAMPLE_BYTES:
        for start in range(0, size, _PIECE):
            yield start, min(_PIECE, size - start)
        return
    last = size - _SAMPLE_BYTES
    for index in range(_SAMPLES):
        yield last * index // (_SAMPLES - 1), _SAMPLE_BYTES
