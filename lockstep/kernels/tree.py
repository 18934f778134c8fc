"""The versioned constants of every reduction: whatever moves bits is here.

A change to any value, or to a tree described in `contract.py`, needs a new
`VERSION`: cache keys and response fingerprints hash this module's constants.
Tuning tables may not touch it.
"""

from __future__ import annotations

import hashlib
import json

VERSION = 1

# Attention walks key positions in segments at absolute positions, restarted at
# each segment, and within a segment in blocks; partials merge ascending.
SEGMENT = 512
BLOCK = {"cpu": {64: 32, 128: 32, 256: 32}, "cuda": {16: 64, 32: 64, 64: 64, 128: 64, 256: 32}}

# Block of the fixed summation tree of norms and log-sum-exp, in elements.
NORM_BLOCK = {"cpu": 16, "cuda": 1024}
VOCAB_BLOCK = 1024


def k_slices(device_kind: str, n: int, k: int) -> int:
    """Number of K slices of a weight [n, k]; slices are added in ascending order.

    A function of the global weight's shape alone, never of the batch.
    """
    return 1


def slice_length(k: int, slices: int) -> int:
    """Input features of a K slice (the last may be shorter): a multiple of 256, or all of k."""
    return k if slices == 1 else -(-k // (slices * 256)) * 256


def fingerprint_parts() -> dict[str, object]:
    """The constants as plain values, in a form that hashes the same everywhere."""
    return {
        "version": VERSION,
        "segment": SEGMENT,
        "block": BLOCK,
        "norm_block": NORM_BLOCK,
        "vocab_block": VOCAB_BLOCK,
    }


def fingerprint(**context: object) -> str:
    """16 hex digits over the tree constants and the caller's context.

    Args:
        context: what else fixes the bits: device kind, instruction set, dtypes,
            backend and library versions, the model's weights hash.
    """
    text = json.dumps({"tree": fingerprint_parts(), **context}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
