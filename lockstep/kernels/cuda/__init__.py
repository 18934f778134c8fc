"""The Triton forms: one file a family of operations, on one NVIDIA GPU.

Where does my class go?
- `common.py`: the summation tree and the elementwise functions that every kernel calls.
- `linear.py`, `norm.py`, `rope.py`, `attention.py`, `sampling.py`, `pages.py`: kernels and
  their launches, one family each. `backend.py` ties them to the contract.
- `stream.py`, `decode.py`: products and attention of few rows in Gluon, which says who copies
  what and when; the same trees, on Hopper and later.
- `tuning.py`: tile shapes by weight and number of rows; `tables.py`: the measured ones
  (written by `bench/gpu_tune.py`). Neither moves a bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from lockstep.kernels.cuda.backend import TritonBackend


def make_backend(device: str | torch.device = "cuda") -> TritonBackend:
    """The Triton backend on that GPU.

    Args:
        device: a CUDA device; "cpu" only under Triton's interpreter (TRITON_INTERPRET=1).

    Raises:
        ConfigError: Triton is missing, or the device cannot run these kernels.
    """
    from lockstep.config import ConfigError

    try:
        from lockstep.kernels.cuda.backend import TritonBackend
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ConfigError(
            "the CUDA backend needs Triton: pip install '.[cuda]' in Lockstep's folder"
        ) from error

    return TritonBackend(device)
