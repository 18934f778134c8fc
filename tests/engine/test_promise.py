"""The promise, whole: SmolLM2's answers on its real weights do not move by a bit.

Greedy and drawn requests run alone and cold, in a crowd of strangers, in chunks of several
sizes, on a prefix hit and through preemption in a tiny pool, in both dtypes and on one and
two threads. There is one expectation a dtype. A backend whose sums follow the batch must
fail the same comparison in both dtypes.
"""

from __future__ import annotations

import random
import struct
from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from lockstep.config import CacheConfig, SchedulerConfig
from lockstep.engine.loop import Engine
from lockstep.kernels.contract import Backend
from lockstep.kernels.cpu import make_backend
from lockstep.model import DecoderModel, load_model
from lockstep.runner.runner import Runner
from lockstep.types import FinishReason, Request, SequenceOutput
from lockstep.weights import open_checkpoint
from tests.control import RowSplitBackend
from tests.engine.harness import drain, request, tokens

VOCAB = 49152
DTYPES = (torch.float32, torch.bfloat16)
WAYS = ("alone", "crowd", "chunks of 5", "chunks of 64", "chunks of 512", "hit", "preempted")
ROOMY, TINY_SLABS, CONTEXT = 64 << 20, 8, 128

Answer = tuple[tuple[int, ...], bytes]
Answers = dict[str, Answer]


class World(NamedTuple):
    """A model and the backend that it computes on."""

    model: DecoderModel
    backend: Backend

    def engine(self, *, slabs: int = 0, **settings: int) -> Engine:
        """An engine with a cold cache and a pool of that many slabs, or a roomy one."""
        size = {"num_slabs": slabs} if slabs else {"memory_bytes": ROOMY}
        runner = Runner(self.model, self.backend, page_tokens=16, max_context=CONTEXT, **size)
        settings = {"max_sequences": 128, **settings}
        return Engine(runner, SchedulerConfig(**settings), CacheConfig())


def ids(source: random.Random, count: int) -> list[int]:
    return [source.randrange(VOCAB) for _ in range(count)]


def probes() -> list[Request]:
    """Greedy, drawn, drawn with filters, and drawn with penalties; unlike lengths."""
    source = random.Random(3)
    ways: tuple[dict[str, object], ...] = (
        {"temperature": 0.0, "prompt_logprobs": 2},
        {"temperature": 1.0, "seed": 11},
        {"temperature": 0.8, "seed": -5, "top_k": 50, "top_p": 0.9},
        {"temperature": 1.2, "seed": 7, "repetition_penalty": 1.3, "n": 2},
    )
    lengths = (23, 37, 5, 18)
    return [
        request(f"probe{i}", ids(source, length), 5, logprobs=3, **params)  # type: ignore[arg-type]
        for i, (length, params) in enumerate(zip(lengths, ways, strict=True))
    ]


def strangers(count: int, longest: int) -> list[Request]:
    source = random.Random(count)
    return [
        request(
            f"stranger{i}",
            ids(source, source.randint(1, longest)),
            source.randint(1, 5),
            temperature=(0.0, 0.7, 1.5)[i % 3],
            top_k=(0, 20)[i % 2],
            seed=i,
            logprobs=(None, 1)[i % 2],
        )
        for i in range(count)
    ]


def packed(outputs: list[SequenceOutput]) -> Answer:
    """Tokens, and the bits of every logprob that was reported."""
    assert all(out.finish is not FinishReason.ERROR for out in outputs), outputs
    entries = [entry for out in outputs for entry in out.logprobs]
    entries += [e for out in outputs for e in out.prompt_logprobs or () if e is not None]
    values = [v for e in entries for v in (e.logprob, *(value for _, value in e.top))]
    named = [i for e in entries for i in (e.token, e.rank, *(other for other, _ in e.top))]
    assert len(entries) >= len(tokens(outputs)) > 0
    bits = struct.pack(f"<{len(values)}d{len(named)}q", *values, *named)
    return tuple(tokens(outputs)), bits


def run(
    engine: Engine, work: list[Request], urgent: Request | None = None
) -> tuple[Answers, list[SequenceOutput]]:
    """Answers of the probes among the work, one a choice, and all of their outputs.

    Args:
        urgent: arrives after three steps, in the middle of the others' answers.
    """
    for one in work:
        engine.submit(one)
    found: dict[tuple[str, int], list[SequenceOutput]] = defaultdict(list)
    if urgent is not None:
        for out in [out for _ in range(3) for out in engine.step()]:
            found[(out.request, out.choice)].append(out)
        engine.submit(urgent)
    for key, outputs in drain(engine).items():
        found[key] += outputs
    asked = {key: outputs for key, outputs in found.items() if key[0].startswith("probe")}
    flat = [out for outputs in asked.values() for out in outputs]
    return {f"{name} {choice}": packed(outputs) for (name, choice), outputs in asked.items()}, flat


def alone(world: World) -> Answers:
    engine = world.engine()
    found: Answers = {}
    for probe in probes():
        engine.flush_cache()
        answers, outputs = run(engine, [probe])
        assert outputs[0].cached_tokens == 0
        found |= answers
    return found


def answers(world: World, way: str) -> Answers:
    """The probes' answers under one schedule, which is asserted to have taken place."""
    work = probes()
    if way == "alone":
        return alone(world)
    if way == "crowd":
        others = strangers(64, 12)
        engine = world.engine()
        found, _ = run(engine, others[:30] + work[:2] + others[30:50] + work[2:] + others[50:])
        assert engine.stats().steps < 16, "they ran together"
        return found
    if way.startswith("chunks"):
        size = int(way.rpartition(" ")[2])
        return run(world.engine(max_step_tokens=size, max_chunk_tokens=size), work)[0]
    if way == "hit":
        engine = world.engine()
        run(engine, [replace(one, id=f"warm {one.id}") for one in work])
        # One that scores its prompt computes all of it, so the greedy probe hits without scores.
        found, outputs = run(engine, work)
        hits = {out.request for out in outputs if out.cached_tokens > 0}
        assert hits == {"probe1", "probe2", "probe3"}
        return found
    assert way == "preempted"
    engine = world.engine(slabs=TINY_SLABS, max_step_tokens=64)
    urgent = request("stranger", ids(random.Random(9), 100), 2, priority=-1)
    found, _ = run(engine, work, urgent)
    assert engine.stats().preemptions >= 3, "probes made way"
    return found


@pytest.fixture(
    scope="module",
    params=[(dtype, threads) for dtype in DTYPES for threads in (1, 2)],
    ids=lambda param: f"{str(param[0])[6:]}-{param[1]}",
)
def world(request: pytest.FixtureRequest) -> World:
    dtype, threads = request.param
    backend = make_backend("native", threads)
    return World(load_model(open_checkpoint("smollm2"), backend, dtype), backend)


@pytest.fixture(scope="module")
def expectations() -> dict[torch.dtype, Answers]:
    """Answers alone and cold by dtype, of whichever thread count ran first."""
    return {}


@pytest.mark.parametrize("way", WAYS)
def test_no_schedule_moves_a_bit(
    world: World, way: str, expectations: dict[torch.dtype, Answers]
) -> None:
    dtype = world.model.dtype
    if dtype not in expectations:
        expectations[dtype] = alone(world)
    assert len(expectations[dtype]) == 5
    assert answers(world, way) == expectations[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_that_follow_the_batch_are_caught(dtype: torch.dtype) -> None:
    """The control: in each dtype a crowd, chunks and a hit all move bits of some answer."""
    backend = RowSplitBackend()
    world = World(load_model(open_checkpoint("smollm2"), backend, dtype), backend)
    expected = alone(world)
    for way in ("crowd", "chunks of 64", "hit"):
        assert answers(world, way) != expected, way
