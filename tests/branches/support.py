"""A small random trunk, its branches' descriptions, and examples made of ids."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
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

JUDGE = Path(__file__).parents[2] / "examples" / "groundedness" / "judge"
SETTINGS: Any = {"threads": 1, "cache_bytes": 64 << 20, "max_context": 512}  # of SmolLM2


def written(folder: Path, *rows: Any) -> Path:
    """A file of rows; a text is a line as it is."""
    file = folder / "rows.jsonl"
    file.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n")
    return file


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


def groundedness() -> ModuleType:
    """The example's generator, which imports its templates from its own folder."""
    folder = str(JUDGE.parent)
    spec = importlib.util.spec_from_file_location("groundedness", JUDGE.parent / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, folder)
    sys.modules["groundedness"] = module  # where dataclasses look up their annotations
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
    return module
