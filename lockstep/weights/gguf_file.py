"""The GGUF container: metadata and a directory of tensors, read from a memory map.

Source: the GGUF specification in the ggml repository (docs/gguf.md), versions 2 and 3,
little-endian. Every length and offset is checked against the file's size before it is
used, so that a truncated or damaged file is one clear error.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.types import ModelError
from lockstep.weights.dequant import TensorType, block_layout

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
# Metadata value types -> numpy's names (little-endian).
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4",
    6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One entry of the directory.

    Attributes:
        shape: rows first, as torch counts (the file lists the fastest dimension first).
        kind: how its values are stored.
        offset: of its first byte in the file; `size`: its bytes.
    """

    name: str
    shape: tuple[int, ...]
    kind: TensorType
    offset: int
    size: int


class _Cursor:
    """Reads forward through a file's bytes, refusing to pass its end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.at = 0
        self.end = len(data)

    def fail(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: {what}")

    def take(self, count: int, what: str) -> int:
        """Skips `count` bytes; returns where they start."""
        start = self.at
        if count > self.end - start:
            raise self.fail(f"truncated: {what} needs {count} bytes at {start} of {self.end}")
        self.at = start + count
        return start

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.data, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.data, self.take(8, what))[0])

    def raw(self, what: str) -> bytes:
        length = self.u64(what)
        start = self.take(length, what)
        return self.data[start : start + length]

    def name(self, what: str) -> str:
        try:
            return self.raw(what).decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8") from None

    def strings(self, count: int, what: str) -> list[str]:
        """An array of strings; the hot loop of opening a file with a large vocabulary."""
        data, at, end = self.data, self.at, self.end
        read: Callable[..., tuple[int]] = _U64.unpack_from
        values: list[bytes] = []
        for _ in range(count):
            if end - at < 8:
                raise self.fail(f"truncated in {what}")
            (length,) = read(data, at)
            at += 8
            if length > end - at:
                raise self.fail(f"truncated in {what}")
            values.append(data[at : at + length])
            at += length
        self.at = at
        try:
            return [value.decode("utf-8") for value in values]
        except UnicodeDecodeError:
            return [value.decode("utf-8", "replace") for value in values]

    def value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.raw(what).decode("utf-8", "replace")
        if kind == _ARRAY:
            item, count = self.u32(what), self.u64(what)
            if item == _STRING:
                if count > (self.end - self.at) // 8:
                    raise self.fail(f"truncated: {what} has {count} strings")
                return self.strings(count, what)
            return self._scalars(item, count, what).tolist()
        return self._scalars(kind, 1, what).tolist()[0]

    def _scalars(self, kind: int, count: int, what: str) -> np.ndarray[Any, Any]:
        if kind not in _SCALARS:
            raise self.fail(f"{what} has unknown value type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        if kind == 7:
            dtype = np.dtype("u1")
        start = self.take(count * dtype.itemsize, what)
        values = np.frombuffer(self.data, dtype, count, start)
        return values != 0 if kind == 7 else values


class GGUFFile:
    """An open GGUF file.

    Attributes:
        path: where it lies.
        metadata: key to value: numbers, booleans, strings, or lists of them.
        tensors: name to entry, in the file's order.

    Raises:
        ModelError: not a GGUF file, an unknown version or tensor type, or lengths and
            offsets that do not fit the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be read: {error}") from None
        cursor = _Cursor(self._data, path)
        if self._data[:4] != _MAGIC:
            raise ModelError(f"{path}: not a GGUF file (it starts with {self._data[:4]!r})")
        cursor.take(4, "magic")
        version = cursor.u32("version")
        if version not in _VERSIONS:
            raise ModelError(f"{path}: GGUF version {version} is not supported (2 and 3 are)")
        tensor_count = cursor.u64("tensor count")
        key_count = cursor.u64("metadata count")
        self.metadata: dict[str, Any] = {}
        for index in range(key_count):
            key = cursor.name(f"metadata key {index}")
            if key in self.metadata:
                raise cursor.fail(f"metadata key {key!r} stands twice")
            self.metadata[key] = cursor.value(cursor.u32(key), f"metadata {key!r}")
        self.tensors: dict[str, GGUFTensor] = {}
        self._read_directory(cursor, tensor_count)
        self.header_bytes = cursor.at

    def _read_directory(self, cursor: _Cursor, count: int) -> None:
        entries = []
        for index in range(count):
            name = cursor.name(f"name of tensor {index}")
            dimensions = cursor.u32(f"tensor {name!r}")
            if not 1 <= dimensions <= _MAX_DIMENSIONS:
                raise cursor.fail(f"tensor {name!r} has {dimensions} dimensions")
            sizes = tuple(cursor.u64(f"tensor {name!r}") for _ in range(dimensions))
            kind = cursor.u32(f"tensor {name!r}")
            entries.append((name, sizes[::-1], kind, cursor.u64(f"tensor {name!r}")))
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise cursor.fail(f"general.alignment is {alignment!r}, not a power of two")
        base = -(-cursor.at // alignment) * alignment
        for name, shape, kind, offset in entries:
            if name in self.tensors:
                raise cursor.fail(f"tensor {name!r} stands twice")
            self.tensors[name] = self._entry(cursor, name, shape, kind, base + offset)

    def _entry(
        self, cursor: _Cursor, name: str, shape: tuple[int, ...], kind: int, offset: int
    ) -> GGUFTensor:
        try:
            tensor_type = TensorType(kind)
        except ValueError:
            raise cursor.fail(f"tensor {name!r} has unsupported type {kind}") from None
        block, block_bytes = block_layout(tensor_type)
        elements = prod(shape)
        if elements == 0:
            raise cursor.fail(f"tensor {name!r} is empty: shape {shape}")
        if shape[-1] % block:
            raise cursor.fail(
                f"tensor {name!r}: rows of {shape[-1]} values do not divide into "
                f"{tensor_type.name} blocks of {block}"
            )
        size = elements // block * block_bytes
        if offset + size > cursor.end:
            raise cursor.fail(
                f"truncated: tensor {name!r} needs bytes {offset} to {offset + size}, "
                f"the file has {cursor.end}"
            )
        return GGUFTensor(name, shape, tensor_type, offset, size)

    def rows(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The stored bytes of a tensor, one row of values a row: uint8 [rows, row bytes].

        A view of the memory map: not writable, valid as long as anything refers to it.
        """
        tensor = self.tensors[name]
        rows = prod(tensor.shape[:-1])
        data = np.frombuffer(self._data, np.uint8, tensor.size, tensor.offset)
        return data.reshape(rows, tensor.size // rows)

    def bytes_at(self, start: int, count: int) -> bytes:
        """Bytes of the file, fewer at its end."""
        return self._data[start : start + count]

    @property
    def file_bytes(self) -> int:
        return len(self._data)
