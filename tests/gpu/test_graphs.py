"""Captured decode steps have the bits of those launched kernel by kernel."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.kernels.contract import Backend
from lockstep.model import load_model
from lockstep.runner.groups import own_groups
from lockstep.runner.plan import Plan, SampleSpec
from lockstep.runner.probe import Pages, Probe
from lockstep.runner.runner import Runner
from lockstep.types import Request, SamplingParams
from tests.gpu.test_engine_bits import Answer, answers, engine_on, some_requests
from tests.model.branches import describe
from tests.model.tiny import build_oracle, save
from tests.runner.test_stops import CONTEXT, at_once, fresh, same, through

NAMES = ("qwen3", "llama", "gemma3")


def runners(name: str, gpu: Backend, folder: Path, dtype: torch.dtype) -> tuple[Runner, Runner]:
    """Two over the same weights: with graphs and large pages, and without."""
    model = load_model(save(build_oracle(name), folder), gpu, dtype)
    with_graphs, without = (
        Runner(
            model,
            gpu,
            memory_bytes=64 << 20,
            max_sequences=128,
            graphs=page_tokens == 64,
            page_tokens=page_tokens,
        )
        for page_tokens in (64, 16)
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


def tokens_of(runner: Runner, requests: list[Request], **settings: Any) -> dict[str, list[int]]:
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


def test_weights_read_ahead(gpu: Backend, tmp_path: Path) -> None:
    """Weights wide enough to be streamed, in captured steps on either side of sixteen rows."""
    oracle = build_oracle(
        "qwen3", hidden_size=1024, intermediate_size=2048, head_dim=64,
        num_attention_heads=16, num_key_value_heads=8,
    )  # fmt: skip
    model = load_model(save(oracle, tmp_path), gpu, torch.bfloat16)
    graphs, eager = (
        Runner(
            model, gpu, memory_bytes=64 << 20, max_sequences=32,
            graphs=page == 64, page_tokens=page,
        )
        for page in (64, 16)
    )  # fmt: skip
    requests = plain(some_requests(32, 131, 200, 1), 60)
    expected = tokens_of(eager, requests, overlap=False)
    for sequences in (1, 5, 16, 17, 32):
        assert tokens_of(graphs, requests, sequences=sequences) == expected, sequences


@pytest.mark.parametrize("name", NAMES)
def test_draws_without_logprobs(gpu: Backend, tmp_path: Path, name: str) -> None:
    graphs, eager = runners(name, gpu, tmp_path, torch.bfloat16)
    requests = plain(some_requests(60, 131, 200, 1), 40)
    expected = tokens_of(eager, requests, overlap=False)
    assert tokens_of(eager, requests) == expected
    for sequences in (1, 5, 60):
        for overlap in (False, True):
            found = tokens_of(graphs, requests, sequences=sequences, overlap=overlap)
            assert found == expected, (sequences, overlap)


def test_stops_that_the_host_learns_late(gpu: Backend, tmp_path: Path) -> None:
    """Sequences end in the middle of steps that were begun before anybody knew."""
    graphs, eager = runners("qwen3", gpu, tmp_path, torch.bfloat16)
    requests = [
        replace(request, stop_ids=tuple(range(0, 131, 7)))
        for request in plain(some_requests(90, 131, 120, 1), 60)
    ]
    expected = tokens_of(eager, requests, overlap=False)
    assert len({len(ids) for ids in expected.values()}) > 10
    for sequences in (2, 17, 90):
        assert tokens_of(graphs, requests, sequences=sequences) == expected


def on_one_prefix(seed: int) -> list[Request]:
    """48 requests that begin with the same 1,100 ids, or with 700 of these."""
    source = random.Random(seed)
    common = [source.randrange(131) for _ in range(1100)]
    requests = []
    for index in range(48):
        own = [source.randrange(131) for _ in range(source.randint(1, 90))]
        begun = common[: 1100 if index % 4 else 700]
        requests.append(Request(f"r{index}", (*begun, *own), SamplingParams()))
    return plain(requests, 24)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_prefix_that_many_share(gpu: Backend, tmp_path: Path, name: str) -> None:
    oracle = build_oracle(name, max_position_embeddings=2048)
    model = load_model(save(oracle, tmp_path), gpu, torch.bfloat16)
    graphs, eager = (
        Runner(model, gpu, memory_bytes=256 << 20, max_sequences=64, graphs=on, page_tokens=64)
        for on in (True, False)
    )
    requests = on_one_prefix(9)
    expected = tokens_of(eager, requests, sequences=3, keep=False)
    assert tokens_of(graphs, requests, sequences=64) == expected
    assert graphs._graphs is not None
    assert any(sharing for _, _, sharing in graphs._graphs._graphs)


def test_groups_that_are_cut_at_stops(gpu: Backend, tmp_path: Path) -> None:
    """Heads and pages as of Qwen3 8B: decode steps, prefixes that many share, and rows that
    stopped and went on, which are decoded behind."""
    oracle = build_oracle(
        "qwen3", hidden_size=1024, intermediate_size=1536, head_dim=128, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=2048,
    )  # fmt: skip
    model = load_model(save(oracle, tmp_path), gpu, torch.bfloat16)
    branches = [describe(fork=0, exit=2), describe(adapt="context", fork=5, exit=6)]
    cut, whole, eager = (
        Runner(
            model, gpu, memory_bytes=256 << 20, max_sequences=64, graphs=on, page_tokens=64,
            branches=some,
        )
        for on, some in ((True, branches), (True, []), (False, []))
    )  # fmt: skip
    assert [group.name for group in own_groups(cut.groups)] == ["full:0-2", "full:2-5", "full:5-6"]
    requests = on_one_prefix(3)
    expected = tokens_of(eager, requests, sequences=3, keep=False)
    for runner in (whole, cut):
        for sequences in (1, 64):
            some = requests[: 4 if sequences == 1 else 48]
            found = tokens_of(runner, some, sequences=sequences)
            assert found == {request.id: expected[request.id] for request in some}
        assert runner._graphs is not None
        assert any(sharing for _, _, sharing in runner._graphs._graphs)

    probe = Probe(cut)
    logits, cells = at_once(probe)

    def decoded(pages: Pages) -> list[int]:
        """Greedy tokens behind the context, each by a captured step."""
        tokens = list(CONTEXT)
        more = probe.pages(64)
        pages = tuple(a + b for a, b in zip(pages, more, strict=True))
        for position in range(8):
            spec = SampleSpec(SamplingParams(temperature=0.0), 0, 0, position, tokens, len(CONTEXT))
            run = probe.run(tokens[-1:], len(tokens) - 1, pages, logits=1)
            launched = cut.launch(Plan(position, (replace(run, sample=spec),)))
            assert launched.draws
            token = launched.result().runs[0].token
            assert token is not None
            tokens.append(token)
        return tokens[len(CONTEXT) :]

    stopped, straight = fresh(probe), fresh(probe)
    rows = through(probe, stopped, (0, 2, 5, 6), (25, 0, 17))
    assert torch.equal(rows, logits)
    assert same(probe, stopped, cells)
    probe.score(CONTEXT, pages=straight)
    assert decoded(stopped) == decoded(straight)


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
