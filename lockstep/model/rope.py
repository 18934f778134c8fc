"""Rotary position embeddings (Su et al. 2021): one table of cosines and sines a rope.

Tables are computed in float64 and stored in float32, once, so that every form of
every kernel reads the same values. A rope whose frequencies depend on the length of
the sequence ("dynamic", "longrope") is refused: keys already in the cache would have
been rotated by other frequencies, and a token's bits would depend on what follows.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.kernels.contract import RopeTable
from lockstep.model.config import ConfigReader

_DEFAULT_THETA = 10000.0
_Frequencies = NDArray[np.float64]


def rope_table(
    frequencies: _Frequencies, scale: float, positions: int, device: torch.device
) -> RopeTable:
    """cos and sin of position * frequency, times `scale`: float32 [positions, E / 2]."""
    cos = np.empty((positions, len(frequencies)), np.float32)
    sin = np.empty_like(cos)
    # In pieces: a table of 131,072 positions would need gigabytes of float64 at once.
    for begin in range(0, positions, 4096):
        end = min(begin + 4096, positions)
        angles = np.arange(begin, end, dtype=np.float64)[:, None] * frequencies
        cos[begin:end] = np.cos(angles) * scale
        sin[begin:end] = np.sin(angles) * scale
    return RopeTable(cos=torch.from_numpy(cos).to(device), sin=torch.from_numpy(sin).to(device))


def read_rope(
    reader: ConfigReader,
    head_dim: int,
    max_positions: int,
    *,
    default_theta: float = _DEFAULT_THETA,
) -> tuple[_Frequencies, float]:
    """Frequencies float64 [head_dim / 2] and the factor on cos and sin, from either spelling.

    transformers 5 writes one object `rope_parameters` that includes `rope_theta`;
    earlier ones wrote `rope_theta` and, where scaled, `rope_scaling`.

    Raises:
        ModelError: an unknown rope type or key, or one that depends on sequence length.
    """
    theta = reader.number("rope_theta", default_theta)
    scaling = reader.section("rope_scaling")
    parameters = reader.section("rope_parameters")
    if scaling is not None and parameters is not None:
        raise reader.fail("rope_scaling", "stands beside rope_parameters; only one of them may")
    chosen = parameters or scaling
    if chosen is None:
        return default_frequencies(theta, head_dim), 1.0
    if parameters is not None:
        theta = parameters.number("rope_theta", theta)
    return scaled_frequencies(chosen, theta, head_dim, max_positions)


def default_frequencies(theta: float, head_dim: int) -> _Frequencies:
    """theta^(-2i / head_dim) for i in [0, head_dim / 2)."""
    exponents: _Frequencies = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    return theta**-exponents


def scaled_frequencies(
    scaling: ConfigReader, theta: float, head_dim: int, max_positions: int
) -> tuple[_Frequencies, float]:
    """Frequencies of one rope object; reads every key of it or refuses it."""
    kind = scaling.optional("rope_type") or scaling.optional("type") or "default"
    scaling.optional("type")
    scaling.optional("rope_theta")
    scaling.only("partial_rotary_factor", 1.0)
    plain = default_frequencies(theta, head_dim)
    scale = 1.0
    if kind == "default":
        scaling.optional("factor")  # transformers ignores it in this type
        frequencies = plain
    elif kind == "linear":
        frequencies = plain / scaling.number("factor")
    elif kind == "llama3":
        frequencies = _llama3(scaling, plain, max_positions)
    elif kind == "yarn":
        frequencies, scale = _yarn(scaling, plain, theta, max_positions)
    elif kind in ("dynamic", "longrope", "su"):
        raise scaling.fail(
            "rope_type",
            f"is {kind!r}: its rotation depends on the sequence's length, which "
            "would change the bits of tokens that are already cached",
        )
    else:
        raise scaling.fail("rope_type", f"is {kind!r}; default, linear, llama3, yarn are supported")
    scaling.finish()
    return frequencies, scale


def _llama3(scaling: ConfigReader, plain: _Frequencies, max_positions: int) -> _Frequencies:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a ramp between."""
    factor = scaling.number("factor")
    low = scaling.number("low_freq_factor")
    high = scaling.number("high_freq_factor")
    original = scaling.number("original_max_position_embeddings", max_positions)
    wavelength = 2 * math.pi / plain
    if high == low:
        return np.where(wavelength > original / low, plain / factor, plain)
    ramp = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return (1 - ramp) * plain / factor + ramp * plain


def _yarn(
    scaling: ConfigReader, plain: _Frequencies, theta: float, max_positions: int
) -> tuple[_Frequencies, float]:
    """YaRN (Peng et al. 2023), as transformers reads its keys."""
    original = scaling.number("original_max_position_embeddings", max_positions)
    factor = scaling.number("factor", max(max_positions / original, 1.0))
    dim = 2 * len(plain)
    if theta <= 1:  # its logarithm tells which dimensions turn how often
        raise scaling.fail("rope_theta", f"must be above 1, is {theta}")

    def dimension(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(scaling.number("beta_fast", 32.0))
    high = dimension(scaling.number("beta_slow", 1.0))
    if scaling.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low if high != low else 0.001
    keep = 1 - np.clip((np.arange(len(plain), dtype=np.float64) - low) / span, 0.0, 1.0)
    frequencies = plain / factor * (1 - keep) + plain * keep
    return frequencies, _yarn_attention_factor(scaling, factor)


def _yarn_attention_factor(scaling: ConfigReader, factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    weight, all_dims = (
        scaling.number(key) if scaling.optional(key) else 0.0
        for key in ("mscale", "mscale_all_dim")
    )
    if scaling.optional("attention_factor") is not None:
        return scaling.number("attention_factor")
    if weight and all_dims:
        return magnitude(weight) / magnitude(all_dims)
    return magnitude(1.0)
