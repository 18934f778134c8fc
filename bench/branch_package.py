"""A branch with random adapters and head for a public shape, on disk."""

from __future__ import annotations

from pathlib import Path

from lockstep.branch import TARGETS, Branch

BASE = "random"
"""Weights hash of a base with random weights."""
OPTIONS = ("answer", "refuse")
_RANK = 16


def write_random_branch(name: str, shape: str, folder: Path) -> str:
    """The package of a branch.

    Args:
        name: fork-exit-adapt, as "20-24-suffix". shape: a key of `bench.shapes.SHAPES`.
        folder: is made.

    Returns: the folder.
    """
    import torch

    from bench.shapes import SHAPES
    from lockstep.weights.branch import write_package

    fork, exit_, adapt = parts_of(name)
    config = SHAPES[shape]
    hidden, inner, head = (
        int(config[key]) for key in ("hidden_size", "intermediate_size", "head_dim")
    )
    queries = int(config["num_attention_heads"]) * head
    keys = int(config["num_key_value_heads"]) * head
    sizes = {
        "q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden),
        "o_proj": (hidden, queries), "gate_proj": (inner, hidden), "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }  # fmt: skip
    branch = Branch(
        base=BASE, base_name=shape, fork=fork, exit=exit_,
        adapt="context" if adapt == "context" else "suffix",
        rank=_RANK, scale=1.0, targets=TARGETS, head="options", options=OPTIONS, suffix="?",
    )  # fmt: skip
    generator = torch.Generator().manual_seed(fork)
    tensors = {
        "norm.weight": torch.ones(hidden),
        "head.weight": torch.randn(2, hidden, generator=generator) * hidden**-0.5,
        "head.bias": torch.zeros(2),
    }
    for layer in range(fork, exit_):
        for target in TARGETS:
            n, k = sizes[target]
            a = torch.randn(_RANK, k, generator=generator) * k**-0.5
            b = torch.randn(n, _RANK, generator=generator) * (0.3 * _RANK**-0.5)
            tensors[f"layers.{layer}.{target}.lora_A"] = a
            tensors[f"layers.{layer}.{target}.lora_B"] = b
    write_package(branch, tensors, folder)
    return str(folder)


def parts_of(name: str) -> tuple[int, int, str]:
    """Fork, exit and what a branch's adapters act on, of its name here."""
    fork, exit_, adapt = name.split("-")
    return int(fork), int(exit_), adapt
