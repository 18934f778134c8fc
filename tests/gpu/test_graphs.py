"""Captured decode steps have the bits of those launched kernel by kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.kernels.contract import Backend
from lockstep.model import load_model
from lockstep.runner.runner import Runner
from lockstep.types import Request, SamplingParams
from tests.gpu.test_engine_bits import Answer, answers, engine_on, some_requests
from tests.model.tiny import build_oracle, save

NAMES = ("qwen3", "llama", "gemma3")


def runners(name: str, gpu: Backend, folder: Path, dtype: torch.dtype) -> tuple[Runner, Runner]:
    """Two over the same weights: with graphs and without."""
    model = load_model(save(build_oracle(name), folder), gpu, dtype)
    with_graphs, without = (
        Runner(model, gpu, memory_bytes=64 << 20, max_sequences=128, graphs=graphs)
        for graphs in (True, False)
    )
    return with_graphs, without


def plain(requests: list[Request], output: int) -> list[Request]:
    """The same without logprobs, half of them greedy: steps that never wait in between."""
    made = []
    for index, request in enumerate(requests):
        params = SamplingParams(
            temperature=0.0 if index % 2 else 0.9, seed=index, max_tokens=output, ignore_eos=True
        )
        made.append(Request(request.id, request.prompt, params))
    return made


def tokens_of(runner: Runner, requests: list[Request], **settings: int) -> dict[str, list[int]]:
    engine = engine_on(runner, **settings)
    found: dict[str, list[int]] = {request.id: [] for request in requests}
    for request in requests:
        engine.submit(request)
    while engine.has_work():
        for out in engine.step():
            assert not out.error
            found[out.request] += out.tokens
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_and_off(gpu: Backend, tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    graphs, eager = runners(name, gpu, tmp_path, dtype)
    requests = some_requests(100, 131, 300, 24)
    expected: dict[str, Answer] = answers(engine_on(eager, sequences=128), requests)[0]
    for sequences in (1, 3, 7, 30, 65, 100):
        some = requests[: max(4, sequences)]
        found = answers(engine_on(graphs, sequences=sequences), some)[0]
        assert all(found[r.id] == expected[r.id] for r in some), sequences
    assert graphs._graphs is not None
    assert len(graphs._graphs) >= 6


@pytest.mark.parametrize("name", NAMES)
def test_draws_without_logprobs(gpu: Backend, tmp_path: Path, name: str) -> None:
    graphs, eager = runners(name, gpu, tmp_path, torch.bfloat16)
    requests = plain(some_requests(60, 131, 200, 1), 40)
    expected = tokens_of(eager, requests)
    for sequences in (1, 5, 60):
        assert tokens_of(graphs, requests, sequences=sequences) == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_long_prompt_joins(gpu: Backend, tmp_path: Path, name: str) -> None:
    graphs, eager = runners(name, gpu, tmp_path, torch.bfloat16)
    requests = plain(some_requests(12, 131, 60, 1), 60)
    stranger = Request("stranger", tuple(i * 7 % 131 for i in range(440)), SamplingParams(seed=1))
    expected = tokens_of(eager, requests)
    engine = engine_on(graphs, tokens=64, chunk=48)
    found: dict[str, list[int]] = {r.id: [] for r in [*requests, stranger]}
    for request in requests:
        engine.submit(request)
    for step in range(10_000):
        if step == 20:
            engine.submit(stranger)
        for out in engine.step():
            assert not out.error
            found[out.request] += out.tokens
        if step > 20 and not engine.has_work():
            break
    assert found.pop("stranger")
    assert found == expected


def test_padding_touches_no_page(gpu: Backend, tmp_path: Path) -> None:
    graphs, _ = runners("qwen3", gpu, tmp_path, torch.bfloat16)
    graphs._pool.fill_(7.0)
    graphs.warm_up()
    torch.cuda.synchronize()
    assert bool((graphs._pool == 7.0).all())


def test_a_spent_budget_runs_eagerly(gpu: Backend, tmp_path: Path) -> None:
    graphs, eager = runners("llama", gpu, tmp_path, torch.bfloat16)
    assert graphs._graphs is not None
    graphs._graphs._left = 0
    requests = plain(some_requests(9, 131, 60, 1), 12)
    assert tokens_of(graphs, requests) == tokens_of(eager, requests)
    assert len(graphs._graphs) == 0
