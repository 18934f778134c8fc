"""A busy engine's decisions are those of another process that runs the branches alone.

The other process has weights of its own, generates nothing, decides one input after the other
and lets contexts leave at the branch's exit. Both are asked through the public door.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import AsyncLLM
from lockstep.branch import TARGETS, Branch
from lockstep.kernels.cpu import make_backend
from lockstep.model import load_model
from lockstep.types import EngineStats, SamplingParams
from lockstep.weights import open_checkpoint
from lockstep.weights.branch import write_package
from tests.branches.support import JUDGE
from tests.model.branches import random_tensors

INPUTS, NEW = 64, 6

pytestmark = pytest.mark.timeout(400)  # two engines start, each in a process of its own
PEOPLE = ("Amara", "Bo", "Chidi", "Dora", "Emre", "Fay", "Goran", "Hana")
THINGS = ("the mill", "a school", "the north pier", "an inn", "the library", "a bakery")
SETTINGS: dict[str, Any] = {"threads": 1, "max_context": 512, "cache_bytes": 64 << 20}
OPTIONS = ("yes", "no", "unsure")
OPEN = {"judge": ["search"], "context": ["yes", "unsure"]}

Probabilities = dict[str, list[list[str]]]


@dataclass(frozen=True)
class Busy:
    """What one engine gave, asked for everything at once.

    Attributes:
        decided: of requests that decide. gated: of gates.
    """

    decided: Probabilities
    gated: Probabilities
    stats: EngineStats


@pytest.fixture(scope="module")
def inputs() -> list[str]:
    """Short documents and questions, many of which begin alike."""
    source = random.Random(5)
    found = []
    for index in range(INPUTS):
        who, what, year = source.choice(PEOPLE), source.choice(THINGS), source.randint(1801, 1999)
        asked = source.choice((f"When was {what} built?", f"Where was {who} born?", "Who paid?"))
        begins = "Documents: " if index % 3 else ""
        found.append(f"{begins}{who} built {what} in {year}. Question: {asked}")
    return found


@pytest.fixture(scope="module")
def branches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The shipped `suffix` branch, and a random one whose adapters touch the context."""
    checkpoint = open_checkpoint("smollm2")
    model = load_model(checkpoint, make_backend("native", 1), torch.bfloat16)
    described = Branch(
        base=checkpoint.weights_hash(),
        base_name="smollm2",
        fork=10,
        exit=13,
        adapt="context",
        rank=8,
        scale=0.5,
        targets=TARGETS,
        head="options",
        options=OPTIONS,
        suffix="\nWell?",
    )
    tensors = random_tensors(model, described, 3)
    for name in tensors:  # adapters that matter, and do not drown what they are added to
        if "lora_A" in name:
            tensors[name] = tensors[name] * model.hidden_size**-0.5
        if name.startswith("head"):
            tensors[name] = tensors[name] * 0.2
    folder = tmp_path_factory.mktemp("context")
    write_package(described, tensors, folder)
    return {"judge": str(JUDGE), "context": str(folder)}


async def alone(branches: dict[str, str], inputs: list[str]) -> Probabilities:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.engine.decider",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    asked = {"branches": branches, "inputs": inputs, "settings": SETTINGS}
    out, _ = await process.communicate(json.dumps(asked).encode())
    assert process.returncode == 0
    found: Probabilities = json.loads(out)
    return found


async def busy(branches: dict[str, str], inputs: list[str]) -> Busy:
    """Chats, decisions and gates on the same inputs, all at once."""
    params = SamplingParams(max_tokens=NEW, temperature=0.8, seed=4)
    async with AsyncLLM("smollm2", branches=branches, max_sequences=64, **SETTINGS) as llm:

        async def decide(name: str, text: str) -> list[str]:
            found = await llm.decide(text, branch=name)
            return [value.hex() for value in found.probabilities]

        async def gate(name: str, text: str) -> list[str]:
            conversation = [{"role": "user", "content": text}]
            found = await llm.decide_then_write(
                conversation, params, branch=name, continue_if=OPEN[name]
            )
            return [value.hex() for value in found.decision.probabilities]

        chats = [{"role": "user", "content": text} for text in inputs[::2]]
        work = [llm.chat([[one] for one in chats], params)]
        kinds = [(kind, name) for name in branches for kind in ("decide", "gate")]
        asked = []
        for kind, name in kinds:
            asked += [
                decide(name, text) if kind == "decide" else gate(name, text)
                for text in (inputs if kind == "decide" else inputs[1::4])
            ]
        _, *found = await asyncio.gather(*work, *asked)
        rows = iter(found)
        decided: Probabilities = {}
        gated: Probabilities = {}
        for kind, name in kinds:
            into, count = (decided, INPUTS) if kind == "decide" else (gated, len(inputs[1::4]))
            into[name] = [next(rows) for _ in range(count)]
        return Busy(decided, gated, llm.stats())


async def test_decisions_of_a_busy_engine_are_those_of_a_process_that_only_decides(
    branches: dict[str, str], inputs: list[str]
) -> None:
    expected, found = await asyncio.gather(alone(branches, inputs), busy(branches, inputs))
    assert found.stats.generated_tokens > NEW * INPUTS // 2, "chats, and some gates that opened"
    assert found.stats.cached_tokens > 0
    assert found.decided == expected
    assert found.gated == {name: rows[1::4] for name, rows in expected.items()}
    for name, rows in expected.items():
        assert len(rows) == INPUTS
        assert len({tuple(row) for row in rows}) > INPUTS // 2, f"{name} tells inputs apart"
    searched = {max(row, key=float.fromhex) == row[1] for row in expected["judge"]}
    assert searched == {True, False}, "one option here, another there"
