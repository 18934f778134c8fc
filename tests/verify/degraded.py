"""SmolLM2 with its weights made worse in known ways, as folders that load like any model."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from lockstep.weights import Checkpoint, open_checkpoint

Change = Callable[[str, Tensor], Tensor]


def rounded(weight: Tensor, bits: int, group: int) -> Tensor:
    """Symmetric rounding to so many bits, one scale for each `group` of a row; 0 is the row."""
    rows = weight.float().clone().reshape(-1, group or weight.shape[1])
    most = 2 ** (bits - 1) - 1
    low, high = rows.aminmax(dim=1, keepdim=True)
    scale = torch.maximum(high, -low).clamp(min=1e-12) / most
    return rows.div_(scale).round_().clamp_(-most - 1, most).mul_(scale).reshape(weight.shape)


def quantised(bits: int, group: int, where: str = "layers.") -> Change:
    """All linear layers whose name has `where` in it."""

    def change(name: str, weight: Tensor) -> Tensor:
        linear = weight.ndim == 2 and where in name and "embed" not in name
        return rounded(weight, bits, group) if linear else weight

    return change


def merged(rank: int, scale: float, seed: int = 0) -> Change:
    """A random adapter merged into the query and value projections."""

    def change(name: str, weight: Tensor) -> Tensor:
        if not name.endswith(("q_proj.weight", "v_proj.weight")):
            return weight
        source = torch.Generator().manual_seed(seed + sum(name.encode()))
        b = torch.randn(weight.shape[0], rank, generator=source)
        a = torch.randn(rank, weight.shape[1], generator=source)
        delta = b @ a
        return weight.float() + scale * float(weight.float().norm()) * delta / delta.norm()

    return change


def unchanged(name: str, weight: Tensor) -> Tensor:
    return weight


@cache
def _original() -> tuple[Checkpoint, dict[str, Tensor]]:
    checkpoint = open_checkpoint("smollm2")
    return checkpoint, {name: checkpoint.tensor(name) for name in checkpoint.tensor_names()}


def write_model(folder: Path, change: Change = unchanged) -> str:
    """The model as a folder of safetensors in bfloat16, changed; returns its path."""
    checkpoint, originals = _original()
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: change(name, weight).to(torch.bfloat16).contiguous()
        for name, weight in originals.items()
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(checkpoint.config))
    tokenizer = checkpoint.tokenizer()
    tokenizer.save(folder / "tokenizer.json")
    settings = {"chat_template": checkpoint.chat_template, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


def chained(*changes: Change) -> Change:
    """One after another."""

    def change(name: str, weight: Tensor) -> Tensor:
        for each in changes:
            weight = each(name, weight)
        return weight

    return change
