"""One Triton backend and the control on the GPU; everything here skips where there is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from lockstep.kernels.contract import Backend
from lockstep.kernels.plain import PlainBackend
from lockstep.weights import Checkpoint, open_checkpoint

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before `-m gpu` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = not torch.cuda.is_available()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if missing:
                item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))


@pytest.fixture(scope="session")
def gpu() -> Backend:
    from lockstep.kernels.cuda import make_backend

    return make_backend("cuda")


@pytest.fixture(scope="session")
def control() -> Backend:
    return PlainBackend("cuda")


@pytest.fixture(scope="session")
def smollm2() -> Checkpoint:
    """The real weights: carried in as a file, or from the package that holds them."""
    carried = os.environ.get("LOCKSTEP_SMOLLM2", "")
    try:
        return open_checkpoint(carried or "smollm2")
    except Exception as error:
        pytest.skip(f"SmolLM2's weights are not here (LOCKSTEP_SMOLLM2 names a GGUF file): {error}")
