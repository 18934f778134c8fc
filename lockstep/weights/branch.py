"""A branch's folder to checked tensors, and back."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.branch import TENSORS, Branch, BranchError, write_branch

if TYPE_CHECKING:
    import torch

_HEADER_BYTES = 512  # of one tensor in a file's header, and more than that


def read_tensors(
    folder: str | Path, branch: Branch, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, torch.Tensor]:
    """The tensors of a branch, float32 on the CPU, read once and checked in full.

    Args:
        branch: the folder's description. shapes: every tensor that must be there.

    Raises:
        BranchError: the file is missing, damaged or not the one that the description was
            written with; or a tensor is missing, unknown, of another dtype or shape, or not
            finite. It names the tensor.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load

    path = Path(folder) / TENSORS
    most = 2 * sum(4 * prod(shape) + _HEADER_BYTES for shape in shapes.values())
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for, a device has no end
            raise BranchError(f"{path}: not a file")
        size = status.st_size
        if size > most:
            raise BranchError(f"{path}: {size} bytes, such a branch has less than {most}")
        data = path.read_bytes()
    except OSError as error:
        raise BranchError(f"{path}: {error.strerror or error}") from None
    digest = hashlib.sha256(data).hexdigest()
    if digest != branch.tensors:
        raise BranchError(
            f"{path}: SHA-256 is {digest}, the description was written for "
            f"{branch.tensors or 'none'}"
        )
    try:
        tensors = load(data)
    except (SafetensorError, ValueError) as error:
        raise BranchError(f"{path}: not a safetensors file: {error}") from None
    for name, shape in shapes.items():
        if name not in tensors:
            raise BranchError(f"{path}: tensor {name!r} {shape} is missing")
        found = tensors[name]
        if tuple(found.shape) != shape:
            raise BranchError(
                f"{path}: tensor {name!r} has shape {tuple(found.shape)}, "
                f"the model and the description ask for {shape}"
            )
        if found.dtype != torch.float32:
            raise BranchError(f"{path}: tensor {name!r} is {found.dtype}, not float32")
        if not bool(torch.isfinite(found).all()):
            raise BranchError(f"{path}: tensor {name!r} holds values that are not finite")
    unknown = sorted(tensors.keys() - shapes.keys())
    if unknown:
        raise BranchError(f"{path}: tensor {unknown[0]!r} is not known, and would be left out")
    return tensors


def write_package(
    branch: Branch, tensors: Mapping[str, torch.Tensor], folder: str | Path
) -> Branch:
    """Write both files of a branch; the branch as written, which knows its tensors' hash.

    The folder is made where it is missing.
    """
    from safetensors.torch import save

    Path(folder).mkdir(parents=True, exist_ok=True)
    data = save({name: tensors[name].float().contiguous() for name in sorted(tensors)})
    (Path(folder) / TENSORS).write_bytes(data)
    written = replace(branch, tensors=hashlib.sha256(data).hexdigest())
    write_branch(written, folder)
    return written
