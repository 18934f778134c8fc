"""Triton's interpreter, made ready before `triton` is imported anywhere.

Import this module first. Where a GPU is present or `triton` was imported without
the interpreter, `AVAILABLE` is False and the tests skip.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import torch


def _prepare() -> bool:
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return False
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    import triton

    if not triton.knobs.runtime.interpret:
        return False
    from triton.runtime import interpreter

    patch: Any = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        # Triton 3.6 takes int() of one-element arrays, which NumPy 2.4 refuses.
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
    return True


AVAILABLE = _prepare()
