"""Decisions and gates of small real models: whatever is kept, let go, cut, shared or pushed out,
each gives the bits that it gives alone on a cold cache."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from lockstep.branch import Branch
from lockstep.config import BranchOptions, CacheConfig, SchedulerConfig
from lockstep.engine.loop import Engine
from lockstep.kernels.contract import Backend
from lockstep.kernels.cpu import make_backend
from lockstep.model import DecoderModel, load_model
from lockstep.runner.runner import Identity, Runner
from lockstep.types import FinishReason, Gate, GateProbe, Request, SamplingParams, SequenceOutput
from tests.engine.harness import drain, request
from tests.model.branches import BASE, package
from tests.model.tiny import build_oracle, save

VOCAB = 131
KINDS = {"suffix": (1, 3), "context": (1, 3), "context0": (0, 2)}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"depth": "exit"},
    {"keep_activations": True, "keep_tails": True},
    {"keep_activations": True},
]
WAYS: list[dict[str, Any]] = [
    {},
    {"max_step_tokens": 7, "max_chunk_tokens": 3},
    {"keep": False, "max_sequences": 3},
    {"slabs": 40, "overlap": True},
]
FAMILIES = ["llama", "gemma3", "mistral-window"]
Bits = dict[tuple[str, int], tuple[object, ...]]


@cache
def world(family: str) -> tuple[DecoderModel, Backend, dict[str, str], dict[str, Branch]]:
    """A small model and its branches; the folder lives as long as the tests."""
    folder = Path(FOLDER.name) / family
    backend = make_backend("native", 1)
    model = load_model(save(build_oracle(family), folder / "model"), backend, torch.float32)
    branches = {
        name: package(
            model,
            folder / name,
            seed,
            fork=fork,
            exit=exit_,
            adapt="context" if name.startswith("context") else "suffix",
        )
        for seed, (name, (fork, exit_)) in enumerate(KINDS.items())
    }
    return model, backend, {name: str(folder / name) for name in KINDS}, branches


FOLDER = TemporaryDirectory()


def build(family: str, *, slabs: int = 200, keep: bool = True, **more: Any) -> Engine:
    model, backend, folders, branches = world(family)
    options = BranchOptions(load=tuple(folders.items()), **more.pop("options", {}))
    runner = Runner(
        model,
        backend,
        page_tokens=4,
        num_slabs=slabs,
        identity=Identity("small", BASE),
        branches=list(branches.values()),
    )
    return Engine(
        runner,
        SchedulerConfig(**more),
        CacheConfig(prefix_caching=keep),
        runner.info(),
        branches=options,
    )


def work() -> list[Request]:
    """Chats, decisions and gates that share beginnings."""
    source = random.Random(5)
    stems = [[source.randrange(VOCAB) for _ in range(24)] for _ in range(2)]
    found = []
    for index in range(18):
        stem = source.choice(stems)
        context = stem[: source.randint(3, 24)] + [
            source.randrange(VOCAB) for _ in range(index % 4)
        ]
        question = tuple(source.randrange(VOCAB) for _ in range(source.randint(1, 6)))
        name = source.choice(list(KINDS))
        if index % 3 == 0:
            found.append(request(f"r{index}", context, 4, seed=index, logprobs=1))
        elif index % 3 == 1:
            params = SamplingParams(max_tokens=0, seed=0)
            found.append(
                Request(
                    f"r{index}",
                    (*context, *question),
                    params,
                    branch=name,
                    branch_from=len(context),
                )
            )
        else:
            headers = source.sample([(), (1, 2), (3,)], 3)
            gate = Gate(
                name, (GateProbe(question),), tuple(headers), (None,) * 3, outputs=(0, 1, 2)
            )
            if index % 2:
                sequences = ((5, 6), (5, 7), (8,))
                probe = (GateProbe(question, (5,), (5, 6, 7, 8)),)
                gate = replace(gate, branch="", probes=probe, sequences=sequences, outputs=())
            one = request(f"r{index}", context, 3, seed=index, logprobs=1, n=1 + index % 2)
            found.append(replace(one, gate=gate))
    return found


def run(engine: Engine, requests: list[Request], every: int = 0) -> Bits:
    """What came of each choice; a step is taken after `every` so many requests."""
    told: dict[tuple[str, int], list[SequenceOutput]] = defaultdict(list)
    for index, one in enumerate(requests):
        engine.submit(one)
        for output in engine.step() if every and index % every == 0 else ():
            told[(output.request, output.choice)].append(output)
    for key, outputs in drain(engine).items():
        told[key] += outputs
    found: Bits = {}
    for key, outputs in told.items():
        assert all(output.finish is not FinishReason.ERROR for output in outputs), outputs
        found[key] = (
            tuple(token for output in outputs for token in output.tokens),
            tuple(entry for output in outputs for entry in output.logprobs),
            outputs[-1].scores,
            outputs[0].gate,
        )
    return found


@cache
def alone(family: str) -> Bits:
    engine = build(family)
    found: Bits = {}
    for one in work():
        engine.flush_cache()
        found |= run(engine, [one])
    return found


@pytest.mark.parametrize("option", range(len(OPTIONS)))
@pytest.mark.parametrize("way", range(len(WAYS)))
def test_no_company_moves_a_bit(option: int, way: int) -> None:
    family = FAMILIES[(option + way) % len(FAMILIES)]
    engine = build(family, options=OPTIONS[option], **WAYS[way])
    expected = alone(family)
    for every in (0, 3):  # cold, then on what the first turn has left
        assert run(engine, work(), every) == expected
    stats = engine.stats()
    assert stats.pages_used == 0
    engine.flush_cache()
    assert engine.stats().pages_tail == 0
