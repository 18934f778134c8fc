"""Where a trained branch may be written, and what its folder says about how it came to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import lockstep
from lockstep.branch import DESCRIPTION, BranchError
from lockstep.branches.data import Dataset
from lockstep.branches.train import Recipe, Trained
from lockstep.types import EngineInfo


def check_folder(folder: Path) -> None:
    """Refuse to write into what is no branch: a new name, an empty folder or a branch will do.

    Raises:
        BranchError: a file, or a folder that holds something else.
    """
    if folder.is_dir() and (not any(folder.iterdir()) or (folder / DESCRIPTION).exists()):
        return
    if folder.exists():
        raise BranchError(f"{folder}: exists and is no branch: name another folder")


def training_record(
    recipe: Recipe,
    trained: Trained,
    data: Dataset,
    rows: int,
    counts: dict[str, int],
    info: EngineInfo,
    linears: torch.dtype,
) -> dict[str, Any]:
    """What it takes to train a branch again, and on what machine its bits were made.

    Args:
        linears: in which the trunk's matrices were multiplied (`Layers.dtype`).
    """
    return {
        "data": data.path.name,
        "data_sha256": data.digest,
        "rows": rows,
        "labels": counts,
        "seed": recipe.seed,
        "epochs": recipe.epochs,
        "batch": recipe.batch,
        "learning_rate": recipe.learning_rate,
        "head_rate": recipe.head_rate,
        "decay": recipe.decay,
        "clip": recipe.clip,
        "losses": [round(loss, 5) for loss in trained.losses],
        "dtype": info.dtype,
        "linears": str(linears).removeprefix("torch."),
        "backend": info.backend,
        "fingerprint": info.fingerprint,
        "processor": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "lockstep": lockstep.__version__,
    }
