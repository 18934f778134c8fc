"""A small random trunk, its branches' descriptions, and examples made of ids."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.branches.activations import Tokens
from lockstep.branches.data import Example
from lockstep.kernels.cpu import make_backend
from lockstep.model import load_model
from lockstep.runner.probe import Probe
from lockstep.runner.runner import Identity, Runner
from tests.model.branches import BASE, describe
from tests.model.tiny import build_oracle, save

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(repr=False)
class Small:
    """A random model of three layers, and transformers' own copy of it."""

    oracle: Any
    runner: Runner

    @property
    def probe(self) -> Probe:
        return Probe(self.runner)


def small(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Small:
    oracle = build_oracle(name)
    backend = make_backend("native", 1)
    model = load_model(save(oracle, folder), backend, dtype)
    tails = [describe(adapt="context")]  # their layers, for a tail in the pool
    runner = Runner(
        model,
        backend,
        memory_bytes=8 << 20,
        identity=Identity(weights_hash=BASE),
        branches=tails,
    )
    return Small(oracle, runner)


def tokens(count: int, seed: int = 0, suffix: int = 5) -> list[Tokens]:
    """Contexts of many lengths, each with a suffix of the same length."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(count):
        length = 3 + (index * 7) % 40
        ids = torch.randint(0, 131, (length + suffix,), generator=generator).tolist()
        found.append(Tokens(tuple(ids[:length]), tuple(ids[length:])))
    return found


def examples(targets: list[int]) -> list[Example]:
    return [Example(line, "-", target) for line, target in enumerate(targets, start=1)]
