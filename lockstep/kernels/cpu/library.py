"""The compiled library's functions, and memory for what they walk through."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lockstep.config import ConfigError
from lockstep.kernels.cpu.build import Library, build_library

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_HUGE_PAGE = 2 << 20
_CHUNK_BYTES = 16 << 20

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "lk_pool_new": (_P, [_I]),
    "lk_pool_free": (None, [_P]),
    "lk_panel": (_I, []),
    "lk_advise_huge": (None, [_P, _I]),
    "lk_isa": (ctypes.c_char_p, []),
    "lk_packed_size": (_I, [_I, _I, _I]),
    "lk_pack": (None, [_P, _I, _P, _I, _I, _P, _I, _I]),
    "lk_unpack": (None, [_P, _I, _P, _I, _I, _P, _I, _I]),
    "lk_embedding": (None, [_P, _I, _P, _I, _P, _I, _I, _F, _P]),
    "lk_linear": (None, [_P, _I, _P, _I, _P, _I, _I, _P, _I, _P, _P]),
    "lk_logits": (None, [_P, _I, _P, _I, _P, _I, _I, _P]),
    "lk_gated": (None, [_P, _I, _P, _I, _P, _I, _I, _I, _P]),
    "lk_adapted_linear": (None, [_P, _I, _P, _I, _P, _I, _I, _P, _P, _P, _I, _P, _I, _P, _P]),
    "lk_adapted_gated": (None, [_P, _I, _P, _I, _P, _I, _I, _P, _P, _P, _I, _I, _P]),
    "lk_rms_norm": (None, [_P, _I, _P, _I, _I, _P, _I, _F, _I, _P, _P]),
    "lk_write_kv": (
        None,
        [_P, _I, _P, _I, _P, _P, _P, _I, _P, _P, _I, _I, _I, _P, _I, _I, _P, _P, _I, _F, _I, _P],
    ),
    "lk_copy_pages": (None, [_P, _I, _P, _I]),
    "lk_attention": (
        None,
        [_P, _I, _P, _P, _P, _P, _I, _I, _I, _I, _I, _I, _I, _P, _P, _P, _I, _I, _I, _F],
    ),
    "lk_log_sum_exp": (None, [_P, _P, _I, _I, _I, _P]),
    "lk_argmax": (None, [_P, _P, _I, _I, _P]),
    "lk_sample": (None, [_P, _P, _I, _I, _P, _P, _P, _P, _P, _P, _P, _P]),
    "lk_philox": (None, [_P, _I, ctypes.c_uint32, ctypes.c_uint32, _P]),
}
# The operations of a layer, some 240 calls a step: their arguments travel in one block.
_PACKED = (
    "lk_linear",
    "lk_gated",
    "lk_adapted_linear",
    "lk_adapted_gated",
    "lk_rms_norm",
    "lk_write_kv",
    "lk_attention",
)
_WORDS = {_P: "q", _I: "q", _F: "d"}


def load_library() -> tuple[SimpleNamespace, Library]:
    """The compiled library's functions by name."""
    built = build_library()
    try:
        library = ctypes.CDLL(str(built.path))
    except OSError as error:
        raise ConfigError(
            f"cannot load {built.path}: {error}; delete it to have it built again"
        ) from error
    functions = SimpleNamespace()
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
        setattr(functions, name, _packed(library, name) if name in _PACKED else function)
    return functions, built


def _packed(library: ctypes.CDLL, name: str) -> Callable[..., None]:
    """A function whose arguments are packed before they are passed, see packed.h."""
    function = getattr(library, f"{name}_packed")
    function.restype, function.argtypes = None, [ctypes.c_char_p]
    pack = struct.Struct("".join(_WORDS[kind] for kind in _SIGNATURES[name][1])).pack

    def call(*arguments: float) -> None:
        function(pack(*arguments))

    return call


class HugePages:
    """Memory on huge pages, where the system grants them: weights and caches are walked
    through once a step, and small pages cost a table walk for each 4 KiB of it.

    Small requests share chunks; a chunk lives as long as a tensor that lies in it.
    """

    def __init__(self, library: SimpleNamespace) -> None:
        self._lib = library
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor without values, aligned to 64 bytes."""
        size = elements * dtype.itemsize
        if size >= _CHUNK_BYTES:
            return self._new_chunk(size)[:size].view(dtype)
        if self._used + size > self._chunk.numel():
            self._chunk, self._used = self._new_chunk(_CHUNK_BYTES), 0
        found = self._chunk[self._used : self._used + size].view(dtype)
        self._used += -(-size // 64) * 64
        return found

    def _new_chunk(self, size: int) -> Tensor:
        whole = torch.empty(size + _HUGE_PAGE, dtype=torch.uint8)
        start = -whole.data_ptr() % _HUGE_PAGE
        self.advise(whole)
        return whole[start : start + size]

    def advise(self, tensor: Tensor) -> None:
        """Ask for huge pages under a tensor that nobody has written to yet."""
        self._lib.lk_advise_huge(tensor.data_ptr(), tensor.numel() * tensor.element_size())
