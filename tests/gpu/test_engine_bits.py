"""Whole answers on the GPU: alone, in a crowd, in chunks, on a prefix, after preemption."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from lockstep.config import CacheConfig, SchedulerConfig
from lockstep.engine.loop import Engine
from lockstep.kernels.contract import Backend
from lockstep.model import load_model
from lockstep.runner.runner import Runner
from lockstep.types import FinishReason, Request, SamplingParams
from lockstep.weights import Checkpoint
from tests.kernels.support import DTYPES
from tests.model.tiny import TINY, build_oracle, probe_of, save
from tests.runner.test_bits import TOKENS, differing_rows

Answer = tuple[tuple[int, ...], bytes]


def engine_on(
    runner: Runner,
    *,
    tokens: int = 4096,
    chunk: int = 2048,
    sequences: int = 256,
    keep: bool = True,
    overlap: bool = True,
) -> Engine:
    scheduler = SchedulerConfig(
        max_step_tokens=tokens,
        max_sequences=sequences,
        max_chunk_tokens=chunk,
        overlap=overlap,
    )
    return Engine(runner, scheduler, CacheConfig(prefix_caching=keep))


def answers(engine: Engine, requests: Sequence[Request]) -> tuple[dict[str, Answer], int]:
    """Tokens and every logprob's bits by request, and the tokens that came from the cache."""
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    values: dict[str, list[float]] = {request.id: [] for request in requests}
    cached: dict[str, int] = {}
    for request in requests:
        engine.submit(request)
    while engine.has_work():
        for out in engine.step():
            assert out.finish is not FinishReason.ERROR, out.error
            tokens[out.request] += out.tokens
            for entry in out.logprobs:
                values[out.request] += [entry.logprob, *(v for _, v in entry.top)]
            cached[out.request] = max(cached.get(out.request, 0), out.cached_tokens)
    bits = {
        name: (tuple(ids), struct.pack(f"<{len(values[name])}d", *values[name]))
        for name, ids in tokens.items()
    }
    assert all(ids and packed for ids, packed in bits.values())
    return bits, sum(cached.values())


def some_requests(count: int, vocab: int, longest: int, output: int) -> list[Request]:
    """Greedy and drawn requests; a third begin with a common prefix."""
    source = random.Random(count)
    common = [source.randrange(vocab) for _ in range(48)]
    made = []
    for index in range(count):
        prompt = [source.randrange(vocab) for _ in range(source.randint(1, longest))]
        if index % 3 == 0:
            prompt = common + prompt[: longest - 48]
        params = SamplingParams(
            temperature=(0.0, 0.8, 1.3)[index % 3],
            top_k=(0, 40, 0)[index % 3],
            top_p=(1.0, 1.0, 0.9)[(index // 3) % 3],
            seed=index,
            max_tokens=output,
            ignore_eos=True,
            logprobs=2,
        )
        made.append(Request(f"r{index}", tuple(prompt), params))
    return made


def check_all_ways(runner: Runner, requests: list[Request], alone_every: int) -> int:
    """Every request in five crowds, and some alone: the answers are one. Returns runs made."""
    first, _ = answers(engine_on(runner), requests)
    shuffled = list(requests)
    random.Random(5).shuffle(shuffled)
    ways = {
        "small chunks": answers(engine_on(runner, tokens=300, chunk=37, keep=False), shuffled)[0],
        "few at once": answers(engine_on(runner, tokens=64, sequences=3), requests[::4])[0],
    }
    again = engine_on(runner)
    answers(again, requests[:16])
    ways["prefix hits"], cached = answers(again, shuffled)
    assert cached > 0
    for way, found in ways.items():
        for name, answer in found.items():
            assert answer == first[name], (way, name)
    lonely = requests[::alone_every]
    for request in lonely:
        assert answers(engine_on(runner), [request])[0][request.id] == first[request.id], request.id
    return len(first) + sum(len(found) for found in ways.values()) + len(lonely)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mistral-window"])
def test_small_random_models(name: str, dtype: torch.dtype, gpu: Backend, tmp_path: Path) -> None:
    checkpoint = save(build_oracle(name), tmp_path)
    model = load_model(checkpoint, gpu, dtype)
    runner = Runner(model, gpu, memory_bytes=64 << 20)
    made = check_all_ways(runner, some_requests(256, 131, 120, 8), alone_every=16)
    assert made >= 500
    # Pools for a handful of them: sequences are released and computed again.
    requests = some_requests(64, 131, 120, 24)
    roomy, _ = answers(engine_on(runner), requests)
    preemptions = 0
    for size in (1 << 20, 1 << 19, 1 << 18):
        engine = engine_on(Runner(model, gpu, memory_bytes=size, step_tokens=128), sequences=64)
        crowded, _ = answers(engine, requests)
        assert crowded == roomy, size
        preemptions += engine.stats().preemptions
    assert preemptions > 0 or name in ("gemma3", "mistral-window")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mistral-window"])
def test_logits_of_every_row(name: str, dtype: torch.dtype, gpu: Backend, tmp_path: Path) -> None:
    found = differing_rows(probe_of(save(build_oracle(name), tmp_path), dtype, gpu), TOKENS)
    assert not any(found.values()), found


@pytest.mark.parametrize("name", sorted(TINY))
def test_logits_against_transformers(name: str, gpu: Backend, tmp_path: Path) -> None:
    oracle = build_oracle(name)
    logits = probe_of(save(oracle, tmp_path), torch.float32, gpu).score(TOKENS, chunk=50).cpu()
    with torch.no_grad():
        expected = oracle(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits, expected, rtol=2e-3, atol=2e-3)


def test_the_control_moves(control: Backend, tmp_path: Path) -> None:
    checkpoint = save(build_oracle("llama"), tmp_path)
    moved = [differing_rows(probe_of(checkpoint, dtype, control), TOKENS) for dtype in DTYPES]
    assert any(sum(found.values()) for found in moved), "cuBLAS and SDPA passed"


@pytest.mark.parametrize("dtype", DTYPES)
def test_smollm2(smollm2: Checkpoint, gpu: Backend, dtype: torch.dtype) -> None:
    runner = Runner(load_model(smollm2, gpu, dtype), gpu, memory_bytes=2 << 30)
    made = check_all_ways(runner, some_requests(512, 49152, 700, 12), alone_every=32)
    assert made >= 1000
