"""The folder that is served: `branch.safetensors` first, then the description that names it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep.branch import (
    DESCRIPTION,
    TENSORS,
    Branch,
    BranchError,
    read_branch,
    write_branch,
)


def check_folder(folder: Path) -> None:
    """Refuse to write into what is no branch: a new name, an empty folder or a branch will do.

    Raises:
        BranchError: a file, or a folder that holds something else.
    """
    if folder.is_dir() and (not any(folder.iterdir()) or (folder / DESCRIPTION).exists()):
        return
    if folder.exists():
        raise BranchError(f"{folder}: exists and is no branch: name another folder")


def save_branch(branch: Branch, tensors: Mapping[str, Tensor], folder: Path) -> Branch:
    """Write a branch; returns it with the hash of its tensors.

    Both files are replaced as a whole; of a branch that is overwritten the description goes
    first, so that no moment shows one branch's tensors under another's name.

    Raises:
        BranchError: see `check_folder`, or the disk's complaint.
    """
    check_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / DESCRIPTION).unlink(missing_ok=True)
        draft = folder / f"{TENSORS}.draft"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, draft)
        digest = hashlib.sha256(draft.read_bytes()).hexdigest()
        os.replace(draft, folder / TENSORS)
        branch = replace(branch, tensors=digest)
        write_branch(branch, folder)
    except OSError as error:
        raise BranchError(f"{folder}: {error.strerror or error}") from None
    return branch


def load_branch(folder: Path) -> tuple[Branch, dict[str, Tensor]]:
    """A branch and its float32 tensors.

    Raises:
        BranchError: not a branch, or tensors that are missing or are not its own.
    """
    branch = read_branch(folder)
    file = folder / TENSORS
    try:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        if branch.tensors and digest != branch.tensors:
            raise BranchError(f"{file}: its SHA-256 is {digest}, {DESCRIPTION} names another")
        return branch, load_file(file)
    except OSError as error:
        raise BranchError(f"{file}: {error.strerror or error}") from None
    except SafetensorError as error:
        raise BranchError(f"{file}: {error}") from None
