"""Stored blocks of GGUF tensors to float32 values, vectorised.

Layouts follow ggml's block structures (ggml-common.h, ggml-quants.c): a block is a run of
values of one row with its scales. The frequent types are done here, a cache-sized run of
blocks at a time; the rest by the `gguf` package, several times slower. Both round once per
multiplication and once per addition, so that values are equal to those of ggml's own scalar
code where that is not compiled with contraction.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np

from lockstep.types import ModelError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]

_RUN_VALUES = 1 << 17  # values made at a time: 512 KiB of float32, to stay in cache


class TensorType(IntEnum):
    """ggml's numbers of the types that can be read."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40


# Values a block, bytes a block.
_LAYOUTS = {
    TensorType.F32: (1, 4),
    TensorType.F16: (1, 2),
    TensorType.BF16: (1, 2),
    TensorType.Q4_0: (32, 18),
    TensorType.Q4_1: (32, 20),
    TensorType.Q5_0: (32, 22),
    TensorType.Q5_1: (32, 24),
    TensorType.Q8_0: (32, 34),
    TensorType.Q2_K: (256, 84),
    TensorType.Q3_K: (256, 110),
    TensorType.Q4_K: (256, 144),
    TensorType.Q5_K: (256, 176),
    TensorType.Q6_K: (256, 210),
    TensorType.IQ2_XXS: (256, 66),
    TensorType.IQ2_XS: (256, 74),
    TensorType.IQ3_XXS: (256, 98),
    TensorType.IQ1_S: (256, 50),
    TensorType.IQ4_NL: (32, 18),
    TensorType.IQ3_S: (256, 110),
    TensorType.IQ2_S: (256, 82),
    TensorType.IQ4_XS: (256, 136),
    TensorType.IQ1_M: (256, 56),
    TensorType.TQ1_0: (256, 54),
    TensorType.TQ2_0: (256, 66),
    TensorType.MXFP4: (32, 17),
    TensorType.NVFP4: (64, 36),
}


def block_layout(kind: TensorType) -> tuple[int, int]:
    """Values and bytes of one block of `kind`."""
    return _LAYOUTS[kind]


def dequantize(rows: Bytes, kind: TensorType) -> Floats:
    """Float32 values of a tensor's stored bytes.

    Args:
        rows: uint8 [rows, bytes of a row].
        kind: how they are stored; a row holds whole blocks.

    Returns:
        float32 [rows, values of a row], newly allocated and writable.

    Raises:
        ModelError: the type is read by the `gguf` package only, which is not installed.
    """
    block_values, block_bytes = _LAYOUTS[kind]
    count = rows.shape[0]
    blocks = np.ascontiguousarray(rows).reshape(-1, block_bytes)
    if kind is TensorType.F32:
        return blocks.reshape(-1).view("<f4").reshape(count, -1).astype(np.float32, copy=True)
    if kind is TensorType.F16:
        return blocks.reshape(-1).view("<f2").reshape(count, -1).astype(np.float32)
    if kind is TensorType.BF16:
        high = blocks.reshape(-1).view("<u2").astype(np.uint32)
        return (high << np.uint32(16)).view(np.float32).reshape(count, -1)
    expand = _EXPANDERS.get(kind)
    if expand is None:
        return _by_package(rows, kind)
    out = np.empty((blocks.shape[0], block_values), np.float32)
    step = max(1, _RUN_VALUES // block_values)
    for start in range(0, blocks.shape[0], step):
        expand(blocks[start : start + step], out[start : start + step])
    return out.reshape(count, -1)


def _by_package(rows: Bytes, kind: TensorType) -> Floats:
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError:
        raise ModelError(
            f"tensors of type {kind.name} need the gguf package: pip install gguf"
        ) from None
    with np.errstate(all="ignore"):
        values = quants.dequantize(rows, GGMLQuantizationType(int(kind)))
    return np.asarray(values, np.float32)


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of each block, as float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes, out: Floats) -> None:
    """Low halves of 16 bytes to the first 16 values, high halves to the last 16."""
    half = packed.shape[1]
    np.copyto(out[:, :half], packed & np.uint8(15))
    np.copyto(out[:, half:], packed >> np.uint8(4))


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """Bit i of the 32 bits at byte `at` as 0 or 16, for value i: uint8 [blocks, 32]."""
    packed = np.ascontiguousarray(blocks[:, at : at + 4])
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 2:], out)
    out -= np.float32(8)
    out *= _half(blocks, 0)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 4:], out)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _five_bits(blocks: Bytes, high_at: int, out: Floats) -> None:
    packed, high = blocks[:, high_at + 4 :], _fifth_bits(blocks, high_at)
    np.copyto(out[:, :16], (packed & np.uint8(15)) | high[:, :16])
    np.copyto(out[:, 16:], (packed >> np.uint8(4)) | high[:, 16:])


def _q5_0(blocks: Bytes, out: Floats) -> None:
    _five_bits(blocks, 2, out)
    out -= np.float32(16)
    out *= _half(blocks, 0)


def _q5_1(blocks: Bytes, out: Floats) -> None:
    _five_bits(blocks, 4, out)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q8_0(blocks: Bytes, out: Floats) -> None:
    np.copyto(out, blocks[:, 2:].view(np.int8))
    out *= _half(blocks, 0)


def _k_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """Eight 6-bit scales and minima from 12 bytes: float32 [blocks, 8] each."""
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    six, four = np.uint8(63), np.uint8(15)
    top = np.uint8(0x30)
    scales = [low & six, (high & four) | ((low >> np.uint8(2)) & top)]
    minima = [middle & six, (high >> np.uint8(4)) | ((middle >> np.uint8(2)) & top)]
    return (
        np.concatenate(scales, axis=1).astype(np.float32),
        np.concatenate(minima, axis=1).astype(np.float32),
    )


def _k_affine(blocks: Bytes, out: Floats) -> None:
    """Scales and shifts eight groups of 32 quants, already in `out`."""
    scales, minima = _k_scales(blocks[:, 4:16])
    scales *= _half(blocks, 0)
    minima *= _half(blocks, 2)
    groups = out.reshape(-1, 8, 32)
    groups *= scales[:, :, None]
    groups -= minima[:, :, None]


def _q4_k(blocks: Bytes, out: Floats) -> None:
    packed = blocks[:, 16:].reshape(-1, 4, 32)
    groups = out.reshape(-1, 4, 2, 32)
    np.copyto(groups[:, :, 0], packed & np.uint8(15))
    np.copyto(groups[:, :, 1], packed >> np.uint8(4))
    _k_affine(blocks, out)


def _q5_k(blocks: Bytes, out: Floats) -> None:
    high, packed = blocks[:, 16:48], blocks[:, 48:].reshape(-1, 4, 32)
    groups = out.reshape(-1, 4, 2, 32)
    for group in range(4):
        for half in range(2):
            fifth = ((high >> np.uint8(2 * group + half)) & np.uint8(1)) << np.uint8(4)
            quants = packed[:, group] >> np.uint8(4 * half)
            np.copyto(groups[:, group, half], (quants & np.uint8(15)) | fifth)
    _k_affine(blocks, out)


def _q6_k(blocks: Bytes, out: Floats) -> None:
    low = blocks[:, :128].reshape(-1, 2, 2, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    scales *= _half(blocks, 208)
    quarters = out.reshape(-1, 2, 4, 32)
    for quarter in range(4):
        four = (low[:, :, quarter % 2] >> np.uint8(4 * (quarter // 2))) & np.uint8(15)
        two = (high >> np.uint8(2 * quarter)) & np.uint8(3)
        np.copyto(quarters[:, :, quarter], four | (two << np.uint8(4)))
    groups = out.reshape(-1, 16, 16)
    groups -= np.float32(32)
    groups *= scales[:, :, None]


_EXPANDERS: dict[TensorType, Callable[[Bytes, Floats], None]] = {
    TensorType.Q4_0: _q4_0,
    TensorType.Q4_1: _q4_1,
    TensorType.Q5_0: _q5_0,
    TensorType.Q5_1: _q5_1,
    TensorType.Q8_0: _q8_0,
    TensorType.Q4_K: _q4_k,
    TensorType.Q5_K: _q5_k,
    TensorType.Q6_K: _q6_k,
}
