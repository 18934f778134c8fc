"""Engines on the GPU with what small models lack: heads of 256 over large pages, grammars."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config import CacheConfig, SchedulerConfig
from lockstep.engine.loop import Engine
from lockstep.kernels.contract import Backend
from lockstep.model import load_model
from lockstep.runner.runner import Runner
from lockstep.text.grammar_matcher import GrammarCompiler
from lockstep.types import FinishReason, Grammar, Request, SamplingParams
from lockstep.weights import Checkpoint
from tests.gpu.test_engine_bits import answers, engine_on, some_requests
from tests.gpu.test_graphs import plain, tokens_of
from tests.model.tiny import build_oracle, save

# Gemma 3 270M (its config.json) with six of the eighteen layers and a small vocabulary.
GEMMA3: dict[str, Any] = {
    "vocab_size": 1031,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "max_position_embeddings": 4096,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_wide_heads_on_large_pages(gpu: Backend, tmp_path: Path, dtype: torch.dtype) -> None:
    """Prompts around the window, on pages of 64 with graphs and of 16 without, in chunks or not."""
    model = load_model(save(build_oracle("gemma3", **GEMMA3), tmp_path), gpu, dtype)
    graphs, eager = (
        Runner(
            model, gpu, memory_bytes=512 << 20, max_sequences=64,
            graphs=page == 64, page_tokens=page,
        )
        for page in (64, 16)
    )  # fmt: skip
    requests = some_requests(24, 1031, 1700, 70)
    requests += [replace(r, id=f"short {r.id}") for r in some_requests(24, 1031, 90, 20)]
    expected, _ = answers(engine_on(eager, keep=False), requests)
    assert len({ids for ids, _ in expected.values()}) > 40
    assert answers(engine_on(graphs), requests)[0] == expected
    assert answers(engine_on(graphs, tokens=300, chunk=100), requests[::-1])[0] == expected
    for request in requests[::8]:
        assert answers(engine_on(graphs), [request])[0][request.id] == expected[request.id]
    drawn = plain(requests, 50)
    assert tokens_of(graphs, drawn) == tokens_of(eager, drawn, overlap=False, sequences=7)


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "s": {"type": ["string", "null"], "maxLength": 9}},
    "required": ["n", "s"],
    "additionalProperties": False,
}
WORDS = r"[a-z]{3,20}(-\d{1,3}){0,2}"
CHOICES = ["yes", "no", "perhaps tomorrow"]
GRAMMARS = [
    Grammar("json_schema", json.dumps(SCHEMA)),
    Grammar("regex", WORDS),
    Grammar("choice", json.dumps(CHOICES)),
    None,
]


def fulfils(grammar: Grammar, text: str) -> bool:
    if grammar.kind == "regex":
        return re.fullmatch(WORDS, text) is not None
    if grammar.kind == "choice":
        return text in CHOICES
    return set(json.loads(text)) == {"n", "s"}


def test_grammars(gpu: Backend, smollm2: Checkpoint) -> None:
    """Free and constrained sequences side by side: each fulfils its own, none moves another."""
    tokenizer = smollm2.tokenizer()
    model = load_model(smollm2, gpu, torch.bfloat16)
    runner = Runner(model, gpu, memory_bytes=1 << 30, max_sequences=64, page_tokens=64)
    compiler = GrammarCompiler(lambda: tokenizer, runner.vocab_size)
    source = random.Random(11)
    requests = []
    for index in range(96):
        params = SamplingParams(
            temperature=(0.0, 0.7, 1.2)[index % 3],
            top_k=(0, 20)[index // 2 % 2],
            top_p=(1.0, 0.9)[index // 4 % 2],
            seed=index,
            max_tokens=60,
            grammar=GRAMMARS[index % 4],
            logprobs=1 if index % 5 == 0 else None,
        )
        prompt = tuple(source.randrange(49152) for _ in range(source.randint(1, 150)))
        requests.append(Request(f"r{index}", prompt, params, stop_ids=tokenizer.eos_ids))

    def run(some: list[Request], **settings: Any) -> dict[str, tuple[list[int], FinishReason]]:
        engine = Engine(runner, SchedulerConfig(**settings), CacheConfig(), grammars=compiler)
        for request in some:
            engine.submit(request)
        found: dict[str, tuple[list[int], FinishReason]] = {r.id: ([], None) for r in some}  # type: ignore[misc]
        while engine.has_work():
            for out in engine.step():
                assert not out.error, out.error
                ids = found[out.request][0] + list(out.tokens)
                found[out.request] = (ids, out.finish)  # type: ignore[assignment]
        return found

    together = run(requests)
    assert run(requests[::-1], max_sequences=5, max_chunk_tokens=40, overlap=False) == together
    for request in requests[::12]:
        assert run([request])[request.id] == together[request.id]
    ended = 0
    for request in requests:
        grammar = request.sampling.grammar
        ids, finish = together[request.id]
        if grammar is not None and finish is FinishReason.STOP:
            ids = [token for token in ids if token not in tokenizer.eos_ids]
            text = b"".join(map(tokenizer.token_bytes, ids)).decode()
            assert fulfils(grammar, text), (request.id, text)
            ended += 1
    assert ended > 40
