"""Random decision branches of small models, and what transformers makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.branch import TARGETS, Branch
from lockstep.model import DecoderModel
from lockstep.model.adapters import tensor_shapes
from lockstep.weights.branch import write_package

BASE = "hash of the small model"


def describe(**changes: Any) -> Branch:
    """A branch over layers [1, 3) with every target; `changes` of its description."""
    return Branch(
        **{
            "base": BASE,
            "base_name": "tiny",
            "fork": 1,
            "exit": 3,
            "adapt": "suffix",
            "rank": 4,
            "scale": 0.75,
            "targets": TARGETS,
            "head": "options",
            "options": ("yes", "no", "unsure"),
            "suffix": "?",
            **changes,
        }
    )


def random_tensors(model: DecoderModel, branch: Branch, seed: int = 0) -> dict[str, Tensor]:
    """Tensors in which everything matters."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(model, branch).items():
        noise = torch.randn(shape, generator=generator)
        if name == "norm.weight":
            tensors[name] = 1.0 + 0.3 * noise
        else:
            tensors[name] = (0.3 if "lora" in name else 0.15) * noise
    return tensors


def package(model: DecoderModel, folder: Path, seed: int = 0, **changes: Any) -> Branch:
    """Writes a random branch's folder."""
    branch = describe(**changes)
    return write_package(branch, random_tensors(model, branch, seed), folder)


def reference_scores(
    oracle: Any,
    branch: Branch,
    tensors: dict[str, Tensor],
    context: list[int],
    suffix: list[int],
) -> Tensor:
    """The head's outputs [N] by transformers' modules in float32, over the whole sequence.

    The adapters are added to its linears by hooks: to every row, or to the suffix's.
    """
    rows = torch.zeros(len(context) + len(suffix), 1)
    rows[0 if branch.adapt == "context" else len(context) :] = 1.0
    found: list[Tensor] = []
    hooks = []
    for layer in range(branch.fork, branch.exit):
        modules = oracle.model.layers[layer]
        for target in branch.targets:
            part = modules.mlp if target in ("gate_proj", "up_proj", "down_proj") else None
            linear = getattr(part or modules.self_attn, target)
            a = tensors[f"layers.{layer}.{target}.lora_A"]
            b = tensors[f"layers.{layer}.{target}.lora_B"]

            def added(_m: Any, inputs: Any, out: Tensor, a: Tensor = a, b: Tensor = b) -> Tensor:
                delta: Tensor = rows * branch.scale * (inputs[0] @ a.T @ b.T)
                return out + delta

            hooks.append(linear.register_forward_hook(added))

    def seen(_m: Any, _inputs: Any, out: Any) -> None:
        found.append(out[0] if isinstance(out, tuple) else out)

    hooks.append(oracle.model.layers[branch.exit - 1].register_forward_hook(seen))
    try:
        with torch.no_grad():
            oracle(torch.tensor([[*context, *suffix]]))
    finally:
        for hook in hooks:
            hook.remove()
    row = found[0].reshape(-1, found[0].shape[-1])[-1]
    normed = row * torch.rsqrt(row.pow(2).mean() + oracle.config.rms_norm_eps)
    scores: Tensor = tensors["head.weight"] @ (normed * tensors["norm.weight"])
    return scores + tensors["head.bias"]
