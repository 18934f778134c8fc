"""Pooled rows and late prompt logprobs on the GPU: one set of bits for every schedule."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.embeddings import embedding
from lockstep.kernels.contract import Backend
from lockstep.model import load_model
from lockstep.runner.runner import Runner
from lockstep.types import Completion, Request, SamplingParams, TokenLogprob
from tests.gpu.test_engine_bits import engine_on
from tests.model.tiny import build_oracle, save

Found = dict[str, tuple[bytes, tuple[TokenLogprob | None, ...] | None]]


def made(vocab: int) -> list[Request]:
    source = random.Random(7)
    common = [source.randrange(vocab) for _ in range(70)]
    requests = []
    for index in range(24):
        prompt = common * (index % 2) + [
            source.randrange(vocab) for _ in range(source.randint(2, 120))
        ]
        kind = ("last", "mean", "")[index % 3]
        params = SamplingParams(
            temperature=0.0, max_tokens=0, seed=0, prompt_logprobs=None if kind else 1
        )
        first = 1 if kind else max(1, len(prompt) - 5)
        requests.append(
            Request(f"r{index}", tuple(prompt), params, score_from=first, pooling=kind)  # type: ignore[arg-type]
        )
    return requests


def run(runner: Runner, requests: list[Request], **settings: int) -> Found:
    engine = engine_on(runner, **settings)
    for request in requests:
        engine.submit(request)
    found: Found = {}
    by_id = {request.id: request for request in requests}
    while engine.has_work():
        for out in engine.step():
            assert not out.error, out.error
            request = by_id[out.request]
            vector = b""
            if request.pooling:
                completion = Completion("", request.prompt, (), pooled=out.pooled)
                vector = embedding(completion, request.pooling, None).tobytes()
            found[out.request] = (vector, out.prompt_logprobs)
    return found


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_pooled_rows_have_one_set_of_bits(name: str, gpu: Backend, tmp_path: Path) -> None:
    model = load_model(save(build_oracle(name), tmp_path), gpu, torch.bfloat16)
    runner = Runner(model, gpu, memory_bytes=64 << 20)
    requests = made(131)
    together = run(runner, requests)
    assert run(runner, requests[::-1], chunk=16, tokens=64) == together
    for request in requests[::5]:
        assert run(runner, [request])[request.id] == together[request.id]
    vectors = [np.frombuffer(vector, np.float32) for vector, _ in together.values() if vector]
    assert len(vectors) == 16
    assert all(np.isclose(np.linalg.norm(vector), 1.0, rtol=1e-5) for vector in vectors)
