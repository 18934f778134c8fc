"""CPU backends with fixed trees.

Where does my class go?
- `native.py`: the C++ form's Python face; `library.py`: its functions; `build.py` compiles them.
- `operands.py`: what both forms ask of their operands.
- `packed.h`: arguments in one block; `vec.h`: lanes and elementwise functions; `tiles.h`:
  register tiles; `product.h`: products of them; `threads.*`: the pool; `gemm.cpp`, `lora.cpp`,
  `attention.cpp`, `norm.*`, `sampling.cpp`: one room of operations each.
- `torch_form.py`: the form for machines without a compiler.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from lockstep.kernels.contract import Backend


def usable_threads() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return max(1, os.cpu_count() or 1)


def make_backend(name: Literal["native", "torch", "auto"] = "auto", threads: int = 0) -> Backend:
    """The CPU backend of that name.

    Args:
        name: "auto" takes the native form, or the torch form where there is no
            C++ compiler (`describe()["chosen"]` then says so).
        threads: 0 means every core this process may use. The bits do not depend on it
            in the native form.

    Raises:
        ConfigError: the named form cannot work here.
    """
    from lockstep.kernels.cpu.build import NoCompilerError
    from lockstep.kernels.cpu.native import NativeBackend

    threads = threads or usable_threads()
    if name == "torch":
        from lockstep.kernels.cpu.torch_form import TorchBackend

        return TorchBackend(threads)
    if name == "native":
        return NativeBackend(threads)
    try:
        return NativeBackend(threads)
    except NoCompilerError as error:
        from lockstep.kernels.cpu.torch_form import TorchBackend

        return TorchBackend(threads, chosen=f"no C++ compiler: {error}")
