"""Kernels: fixed-tree operations. They know tensors, never models or requests.

Where does my class go?
- `tree.py`: everything that moves bits, versioned and hashed into the fingerprint.
- `contract.py`: what every backend offers, operation by operation, with its tree.
- `reference.py`: the same trees spelled out slowly; the tests' ground truth.
- `cpu/`: the native C++ form and the torch form for machines without a compiler.
- `cuda/`: the Triton forms. `plain.py`: torch without fixed trees (the control).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.config import ConfigError, ModelOptions

if TYPE_CHECKING:
    from lockstep.kernels.contract import Backend

_CPU_BACKENDS = ("native", "torch")


def make_backend(options: ModelOptions) -> Backend:
    """The backend that `options.device` and `options.backend` name.

    "auto" takes CUDA when a GPU is present, else the CPU. What is named must be
    there: nothing falls back in silence.

    Raises:
        ConfigError: the device is absent, or the backend does not run on it.
    """
    import torch

    device_name, backend = options.device, options.backend
    if device_name == "auto":
        use_cuda = torch.cuda.is_available() and backend not in _CPU_BACKENDS
        device_name = "cuda" if use_cuda or backend == "triton" else "cpu"
    try:
        device = torch.device(device_name)
    except RuntimeError as error:
        raise ConfigError(
            f"device {device_name!r} is not a device; use 'auto', 'cpu' or 'cuda'"
        ) from error
    if device.type == "cpu":
        if backend == "triton":
            raise ConfigError("backend 'triton' runs on CUDA only; use 'native', 'torch' or 'auto'")
        from lockstep.kernels import cpu

        return cpu.make_backend(backend, options.threads)
    if device.type != "cuda":
        raise ConfigError(f"device {device_name!r} is not supported; use 'cpu' or 'cuda'")
    if backend in _CPU_BACKENDS:
        raise ConfigError(f"backend {backend!r} runs on a CPU only; use 'triton' or 'auto'")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise ConfigError(
            f"device {device_name!r} is not present: torch {torch.__version__} sees {count} "
            "CUDA devices; use device='cpu', or install a CUDA build of torch and its driver"
        )
    from lockstep.kernels import cuda

    return cuda.make_backend(device)
