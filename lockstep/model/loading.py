"""Checkpoint tensors to packed weights: by name, one at a time, every shape checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from lockstep.kernels.contract import Backend, Weight
from lockstep.types import ModelError

Progress = Callable[[str, float], None]


class TensorSource(Protocol):
    """What loading needs of a checkpoint (`lockstep.weights.Checkpoint` is one)."""

    @property
    def name(self) -> str: ...

    def tensor_names(self) -> tuple[str, ...]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def tensor(self, name: str) -> Tensor: ...


class WeightLoader:
    """Reads tensors by their Hugging Face names and lays them out for a backend.

    One source tensor and one unpacked matrix are held beside the packed weights at
    any time. `weight_bytes` counts what was laid out.

    Raises (every method):
        ModelError: a tensor that is missing, holds no floating-point numbers, or has
            another shape than the configuration asks for; it names the tensor, found and
            expected shape.
    """

    def __init__(
        self,
        source: TensorSource,
        backend: Backend,
        dtype: torch.dtype,
        progress: Progress | None = None,
        prefix: str = "",
    ) -> None:
        self.backend = backend
        self.dtype = dtype
        self.weight_bytes = 0
        self._source = source
        self._progress = progress
        self._prefix = prefix
        self._names = frozenset(source.tensor_names())
        self._taken: set[str] = set()
        self._scratch = torch.empty(0, dtype=dtype)

    def has(self, name: str) -> bool:
        return self._prefix + name in self._names

    def vector(self, name: str, size: int) -> Tensor:
        """A norm's weight or a bias: [size] in the model's dtype on the device."""
        return self.bias([name], [size])

    def bias(self, names: Sequence[str], sizes: Sequence[int]) -> Tensor:
        """Biases of a fused projection, joined: [sum of sizes]."""
        joined = torch.empty(sum(sizes), dtype=self.dtype)
        self._fill(joined, names, sizes)
        return self._count(joined.to(self.backend.device))

    def matrix(self, names: Sequence[str], sizes: Sequence[int], inputs: int) -> Weight:
        """Matrices [size, inputs] stacked in order and packed as one."""
        stacked = self._workspace(sum(sizes), inputs)
        self._fill(stacked, names, sizes)
        return self._packed(self.backend.pack(stacked))

    def gated(self, gate: str, up: str, size: int, inputs: int) -> Weight:
        """The two matrices [size, inputs] of a gated MLP as one packed pair."""
        stacked = self._workspace(2 * size, inputs)
        self._fill(stacked, [gate, up], [size, size])
        return self._packed(self.backend.pack_gated(stacked[:size], stacked[size:]))

    def finish(self, ignored: Callable[[str], bool]) -> None:
        """Refuse tensors that nothing read; `ignored` names those that change nothing."""
        for name in sorted(self._names - self._taken):
            if not ignored(name):
                raise ModelError(
                    f"{self._source.name}: tensor {name!r} {self._source.shape(name)} is in the "
                    "file but not in the architecture"
                )

    def _workspace(self, rows: int, columns: int) -> Tensor:
        """Uninitialised [rows, columns], valid until the next call: packing copies it."""
        if self._scratch.numel() < rows * columns:
            self._scratch = torch.empty(rows * columns, dtype=self.dtype)
        return self._scratch[: rows * columns].view(rows, columns)

    def _fill(self, target: Tensor, names: Sequence[str], sizes: Sequence[int]) -> None:
        """Copy tensors into consecutive rows of the target, rounded to its dtype."""
        begin = 0
        for name, size in zip(names, sizes, strict=True):
            part = target[begin : begin + size]
            part.copy_(self._read(name, tuple(part.shape)))
            begin += size

    def _read(self, name: str, expected: tuple[int, ...]) -> Tensor:
        name = self._prefix + name
        if name not in self._names:
            raise ModelError(f"{self._source.name}: tensor {name!r} {expected} is missing")
        found = tuple(self._source.shape(name))
        if found != expected:
            raise ModelError(
                f"{self._source.name}: tensor {name!r} has shape {found}, "
                f"the configuration asks for {expected}"
            )
        self._taken.add(name)
        if self._progress is not None:
            self._progress("loading weights", len(self._taken) / len(self._names))
        tensor = self._source.tensor(name)
        if not tensor.is_floating_point():
            raise ModelError(
                f"{self._source.name}: tensor {name!r} is {tensor.dtype}: quantised weights of "
                "this kind are not supported, floating-point ones and GGUF files are"
            )
        return tensor

    def _packed(self, weight: Weight) -> Weight:
        # A backend whose layout is the plain matrix may have kept the workspace itself.
        workspace = self._scratch.untyped_storage().data_ptr()
        if weight.data.untyped_storage().data_ptr() == workspace:
            weight = replace(weight, data=weight.data.clone())
        self._count(weight.data)
        return weight

    def _count(self, tensor: Tensor) -> Tensor:
        self.weight_bytes += tensor.numel() * tensor.element_size()
        return tensor
