"""A branch's folder: what is written comes back, and anything else is refused by name."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lockstep.branch import DESCRIPTION, TENSORS, Branch, BranchError, read_branch, write_branch
from lockstep.weights.branch import read_tensors, write_package
from tests.model.branches import describe

SHAPES: dict[str, tuple[int, ...]] = {
    "layers.1.q_proj.lora_A": (2, 6),
    "layers.1.q_proj.lora_B": (5, 2),
    "norm.weight": (6,),
    "head.weight": (3, 6),
    "head.bias": (3,),
}


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def test_a_package_comes_back_as_it_was_written(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "judge"
    written = write_package(describe(), tensors(), folder)
    assert read_branch(folder) == written
    assert len(written.tensors) == 64
    found = read_tensors(folder, written, SHAPES)
    for name, tensor in tensors().items():
        assert torch.equal(found[name], tensor)
    # What a loaded one holds of a device is no part of what it is.
    write_branch(replace(written, weight_bytes=7), folder)
    assert read_branch(folder) == replace(written, weight_bytes=7)
    assert read_branch(folder).weight_bytes == 0
    # The same tensors are the same branch, whatever their order; other tensors are another.
    again = write_package(describe(), dict(reversed(tensors().items())), tmp_path / "again")
    assert again.key == written.key
    other = write_package(describe(), {**tensors(), "head.bias": torch.zeros(3)}, tmp_path / "o")
    assert other.key != written.key


def test_rounded_tensors_are_written_in_full(tmp_path: Path) -> None:
    rounded = {name: tensor.bfloat16() for name, tensor in tensors().items()}
    branch = write_package(describe(), rounded, tmp_path)
    found = read_tensors(tmp_path, branch, SHAPES)
    assert torch.equal(found["norm.weight"], rounded["norm.weight"].float())


Change = Callable[[dict[str, Any]], None]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda t: t.pop("norm.weight"), r"'norm.weight' \(6,\) is missing"),
        (lambda t: t.update({"head.bias": torch.zeros(4)}), r"'head.bias' has shape \(4,\)"),
        (
            lambda t: t.update({"layers.1.q_proj.lora_A": torch.zeros(6, 2)}),
            r"lora_A' has shape \(6, 2\), .* ask for \(2, 6\)",
        ),
        (lambda t: t.update({"norm.weight": torch.ones(6).bfloat16()}), "bfloat16, not float32"),
        (
            lambda t: t.update({"head.weight": torch.full((3, 6), float("nan"))}),
            "'head.weight' holds values that are not finite",
        ),
        (
            lambda t: t.update({"layers.1.q_proj.lora_B": torch.full((5, 2), float("inf"))}),
            "lora_B' holds values that are not finite",
        ),
        (
            lambda t: t.update({"layers.1.w_proj.lora_A": torch.zeros(2, 6)}),
            "'layers.1.w_proj.lora_A' is not known",
        ),
    ],
)
def test_tensors_are_named_when_they_are_wrong(
    tmp_path: Path, change: Change, complaint: str
) -> None:
    """D07: an unknown or odd tensor is an error, never left out in silence."""
    wrong = tensors()
    change(wrong)
    save_file(wrong, tmp_path / TENSORS)
    branch = hashed(tmp_path)
    with pytest.raises(BranchError, match=complaint) as caught:
        read_tensors(tmp_path, branch, SHAPES)
    assert str(tmp_path / TENSORS) in str(caught.value)


def hashed(folder: Path) -> Branch:
    """A description that fits whatever file is there."""
    digest = hashlib.sha256((folder / TENSORS).read_bytes()).hexdigest()
    return replace(describe(), tensors=digest)


def test_a_file_that_is_another_is_refused(tmp_path: Path) -> None:
    branch = write_package(describe(), tensors(), tmp_path)
    path = tmp_path / TENSORS
    good = path.read_bytes()
    for bad in (good[:-1], good[:40], b"", bytes([*good[:-1], good[-1] ^ 1])):
        path.write_bytes(bad)
        with pytest.raises(BranchError, match="SHA-256"):
            read_tensors(tmp_path, branch, SHAPES)
    for bad in (good[:40], b"", b"\xff" * 64):  # the hash is right, the file is not
        path.write_bytes(bad)
        with pytest.raises(BranchError, match="not a safetensors file"):
            read_tensors(tmp_path, hashed(tmp_path), SHAPES)
    path.write_bytes(good + bytes(10**5))  # it is not read at all
    with pytest.raises(BranchError, match=r"bytes, such a branch has less than \d+"):
        read_tensors(tmp_path, hashed(tmp_path), SHAPES)
    path.unlink()
    with pytest.raises(BranchError, match="No such file"):
        read_tensors(tmp_path, branch, SHAPES)
    path.write_bytes(good)
    with pytest.raises(BranchError, match="written for none"):
        read_tensors(tmp_path, replace(branch, tensors=""), SHAPES)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_only_files_are_read(tmp_path: Path, kind: str) -> None:
    """A pipe would keep the engine waiting for ever, and a device fill its memory."""
    branch = write_package(describe(), tensors(), tmp_path)
    (tmp_path / TENSORS).unlink()
    if kind == "pipe":
        os.mkfifo(tmp_path / TENSORS)
    else:
        (tmp_path / TENSORS).symlink_to("/dev/zero")
    with pytest.raises(BranchError, match="not a file"):
        read_tensors(tmp_path, branch, SHAPES)


def test_a_description_without_its_tensors_hash_loads_no_tensor(tmp_path: Path) -> None:
    write_package(describe(), tensors(), tmp_path)
    write_branch(describe(), tmp_path)
    assert json.loads((tmp_path / DESCRIPTION).read_text())["tensors"] == ""
    with pytest.raises(BranchError, match="SHA-256"):
        read_tensors(tmp_path, read_branch(tmp_path), SHAPES)
