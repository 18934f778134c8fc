"""Llama 3's rope scaling, recovered from the factors that a GGUF file stores."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lockstep.types import ModelError

Factors = np.ndarray[Any, np.dtype[np.float32]]

# What every published Llama 3 model uses beside its factor (8 for 3.1 and 3.3, 32 for 3.2).
_LOW, _HIGH, _CONTEXT = 1.0, 4.0, 8192


def llama3_factors(
    theta: float, head_dim: int, *, factor: float, low: float, high: float, context: int
) -> Factors:
    """What each rope frequency is divided by: float32 [head_dim / 2].

    Frequencies whose wavelength is longer than context / low are divided by `factor`,
    those shorter than context / high are left, those between are blended.
    """
    factors = np.ones(head_dim // 2, np.float32)
    for index in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * index / head_dim)
        if wavelength > context / low:
            factors[index] = factor
        elif wavelength >= context / high:
            smooth = (context / wavelength - low) / (high - low)
            factors[index] = 1 / ((1 - smooth) / factor + smooth)
    return factors


def scaling_of_factors(factors: Factors, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The `rope_scaling` entry that gives these factors; None when they are all one.

    Raises:
        ModelError: the factors are no Llama 3 scaling that is known.
    """
    if factors.shape[0] != head_dim // 2 or not np.isfinite(factors).all():
        raise ModelError(f"{factors.shape[0]} factors for heads of {head_dim}")
    factor = float(factors[-1])
    if (factors == 1).all():
        return None
    expected = llama3_factors(
        theta, head_dim, factor=factor, low=_LOW, high=_HIGH, context=_CONTEXT
    )
    if factor <= 1 or not np.allclose(factors, expected, rtol=1e-3):
        raise ModelError("its values are no Llama 3 rope scaling that this engine knows")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _CONTEXT,
    }
