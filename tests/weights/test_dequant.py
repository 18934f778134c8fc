"""Dequantisation against a slow reference written from ggml's block layouts, value by value."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.weights.dequant import TensorType, block_layout, dequantize

f32 = np.float32


def half(block: bytes, at: int) -> np.float32:
    return f32(struct.unpack_from("<e", block, at)[0])


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def slow_f32(block: bytes) -> list[np.float32]:
    return [f32(struct.unpack("<f", block)[0])]


def slow_f16(block: bytes) -> list[np.float32]:
    return [half(block, 0)]


def slow_bf16(block: bytes) -> list[np.float32]:
    return [f32(struct.unpack("<f", b"\0\0" + block)[0])]


def nibble(packed: bytes, value: int) -> int:
    """Value 0..31 of 16 packed bytes: low halves first."""
    return packed[value] & 15 if value < 16 else packed[value - 16] >> 4


def slow_q4_0(block: bytes) -> list[np.float32]:
    return [half(block, 0) * f32(nibble(block[2:], i) - 8) for i in range(32)]


def slow_q4_1(block: bytes) -> list[np.float32]:
    return [half(block, 0) * f32(nibble(block[4:], i)) + half(block, 2) for i in range(32)]


def five(block: bytes, high_at: int, value: int) -> int:
    (high,) = struct.unpack_from("<I", block, high_at)
    return nibble(block[high_at + 4 :], value) | ((high >> value) & 1) << 4


def slow_q5_0(block: bytes) -> list[np.float32]:
    return [half(block, 0) * f32(five(block, 2, i) - 16) for i in range(32)]


def slow_q5_1(block: bytes) -> list[np.float32]:
    return [half(block, 0) * f32(five(block, 4, i)) + half(block, 2) for i in range(32)]


def slow_q8_0(block: bytes) -> list[np.float32]:
    return [half(block, 0) * f32(signed(block[2 + i])) for i in range(32)]


def scale_and_min(packed: bytes, group: int) -> tuple[int, int]:
    """ggml's get_scale_min_k4: eight pairs of six bits in twelve bytes."""
    if group < 4:
        return packed[group] & 63, packed[group + 4] & 63
    low = (packed[group + 4] & 15) | ((packed[group - 4] >> 6) << 4)
    high = (packed[group + 4] >> 4) | ((packed[group] >> 6) << 4)
    return low, high


def k_value(block: bytes, value: int, quant: int) -> np.float32:
    scale, least = scale_and_min(block[4:16], value // 32)
    return (half(block, 0) * f32(scale)) * f32(quant) - half(block, 2) * f32(least)


def slow_q4_k(block: bytes) -> list[np.float32]:
    values = []
    for i in range(256):
        byte = block[16 + (i // 64) * 32 + i % 32]
        values.append(k_value(block, i, byte >> 4 if i % 64 >= 32 else byte & 15))
    return values


def slow_q5_k(block: bytes) -> list[np.float32]:
    values = []
    for i in range(256):
        byte = block[48 + (i // 64) * 32 + i % 32]
        quant = byte >> 4 if i % 64 >= 32 else byte & 15
        quant |= ((block[16 + i % 32] >> (i // 32)) & 1) << 4
        values.append(k_value(block, i, quant))
    return values


def slow_q6_k(block: bytes) -> list[np.float32]:
    values = []
    for i in range(256):
        upper, inside = divmod(i, 128)
        quarter, column = divmod(inside, 32)
        byte = block[upper * 64 + (quarter % 2) * 32 + column]
        low = byte >> 4 if quarter >= 2 else byte & 15
        high = (block[128 + upper * 32 + column] >> (2 * quarter)) & 3
        scale = half(block, 208) * f32(signed(block[192 + i // 16]))
        values.append(scale * f32((low | high << 4) - 32))
    return values


SLOW: dict[TensorType, Callable[[bytes], list[np.float32]]] = {
    TensorType.F32: slow_f32,
    TensorType.F16: slow_f16,
    TensorType.BF16: slow_bf16,
    TensorType.Q4_0: slow_q4_0,
    TensorType.Q4_1: slow_q4_1,
    TensorType.Q5_0: slow_q5_0,
    TensorType.Q5_1: slow_q5_1,
    TensorType.Q8_0: slow_q8_0,
    TensorType.Q4_K: slow_q4_k,
    TensorType.Q5_K: slow_q5_k,
    TensorType.Q6_K: slow_q6_k,
}


def bits(values: object) -> np.ndarray[tuple[int, ...], np.dtype[np.uint32]]:
    return np.asarray(values, np.float32).view(np.uint32)


@pytest.mark.parametrize("kind", SLOW, ids=lambda kind: kind.name)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_equal_bits_to_the_slow_reference(kind: TensorType, data: st.DataObject) -> None:
    block_values, block_bytes = block_layout(kind)
    rows, blocks = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    stored = data.draw(
        st.binary(min_size=rows * blocks * block_bytes, max_size=rows * blocks * block_bytes)
    )
    matrix = np.frombuffer(stored, np.uint8).reshape(rows, blocks * block_bytes)
    with np.errstate(all="ignore"):
        expected = [
            value
            for at in range(0, len(stored), block_bytes)
            for value in SLOW[kind](stored[at : at + block_bytes])
        ]
        found = dequantize(matrix, kind)
    assert found.shape == (rows, blocks * block_values)
    assert found.dtype == np.float32
    assert found.flags.writeable
    flat, reference = found.reshape(-1), np.asarray(expected, np.float32)
    # The payload of a NaN is the processor's business.
    same = (bits(flat) == bits(reference)) | (np.isnan(flat) & np.isnan(reference))
    assert same.all()


@pytest.mark.parametrize("kind", list(TensorType), ids=lambda kind: kind.name)
def test_equal_bits_to_the_gguf_package(kind: TensorType) -> None:
    number = GGMLQuantizationType(int(kind))
    assert block_layout(kind) == GGML_QUANT_SIZES[number]
    random = np.random.default_rng(int(kind))
    # More than one run of blocks, so that the borders between runs are crossed.
    values, size = block_layout(kind)
    blocks = 5 + (1 << 18) // values if kind in SLOW else 12
    stored = random.integers(0, 256, (4, blocks // 4 * size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = quants.dequantize(stored, number)
        found = dequantize(stored, kind)
    same = (bits(found) == bits(expected)) | (np.isnan(found) & np.isnan(expected))
    assert same.all()


def test_every_type_of_the_package_is_known() -> None:
    known = {int(kind) for kind in TensorType}
    for number in quants._type_traits:
        assert int(number) in known


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_values_come_back_near(kind: str) -> None:
    values = np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32)
    stored = quants.quantize(values, GGMLQuantizationType[kind])
    found = dequantize(stored, TensorType[kind])
    step = np.abs(values).max() / (8 if "4" in kind else 16 if "5" in kind else 127)
    assert np.abs(found - values).max() <= step


def test_rows_of_another_layout_in_memory() -> None:
    stored = np.random.default_rng(2).integers(0, 256, (6, 40), dtype=np.uint8)
    order = np.array([3, 0, 5, 1])
    assert (
        bits(dequantize(stored[order], TensorType.Q4_1))
        == bits(dequantize(stored, TensorType.Q4_1)[order])
    ).all()
    assert (
        bits(dequantize(stored[::2, :20], TensorType.Q4_1))
        == bits(dequantize(stored[::2, :20].copy(), TensorType.Q4_1))
    ).all()
