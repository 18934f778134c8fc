"""The control: one engine, alone against in a crowd, on fixed trees and on torch's own operations.

Reads a JSON list of prompts (token ids) on standard input and prints one JSON object that says,
for each of the two backends, how many logprobs have other bits. In float32, where a matrix product
in torch takes another kernel for one row than for several. `examples/demo.py` runs it.
"""

from __future__ import annotations

import argparse
import json
import sys

import torch

from lockstep.config import CacheConfig, SchedulerConfig
from lockstep.engine.loop import Engine
from lockstep.kernels.contract import Backend
from lockstep.kernels.cpu import make_backend
from lockstep.kernels.plain import PlainBackend
from lockstep.model import load_model
from lockstep.runner.runner import Runner
from lockstep.types import Request, SamplingParams
from lockstep.weights import Checkpoint, open_checkpoint

CROWD = 6  # prompts asked together
ALONE = 3  # of these, asked alone as well
TOKENS = 6


def generate(engine: Engine, prompts: list[list[int]], name: str) -> list[list[tuple[int, float]]]:
    """(token, logprob) pairs of every prompt, all in flight together, greedy."""
    results: dict[str, list[tuple[int, float]]] = {}
    for index, prompt in enumerate(prompts):
        key = f"{name}-{index}"
        results[key] = []
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS, logprobs=0, seed=0)
        engine.submit(Request(key, tuple(prompt), params))
    while engine.has_work():
        for output in engine.step():
            values = [entry.logprob for entry in output.logprobs]
            results[output.request] += zip(output.tokens, values, strict=True)
    return list(results.values())


def compare(backend: Backend, checkpoint: Checkpoint, prompts: list[list[int]]) -> dict[str, float]:
    """Count what differs between the crowd and the same prompts alone, on one backend."""
    model = load_model(checkpoint, backend, torch.float32)
    cache = CacheConfig(prefix_caching=False).resolved(backend.kind)
    runner = Runner(model, backend, page_tokens=cache.page_tokens, memory_bytes=256 << 20)
    engine = Engine(runner, SchedulerConfig(), cache)
    crowd = generate(engine, prompts, "crowd")[:ALONE]
    alone = [
        generate(engine, [prompt], f"alone{index}")[0]
        for index, prompt in enumerate(prompts[:ALONE])
    ]
    engine.close()
    pairs = [
        (one, other)
        for first, second in zip(crowd, alone, strict=True)
        for one, other in zip(first, second, strict=True)
    ]
    gaps = [abs(one[1] - other[1]) for one, other in pairs if one != other]
    return {"logprobs": len(pairs), "differ": len(gaps), "largest": max(gaps, default=0.0)}


def main() -> None:
    """Compare on Lockstep's kernels and on torch's own operations, and print both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    prompts: list[list[int]] = json.load(sys.stdin)[:CROWD]
    checkpoint = open_checkpoint(options.model)
    backends = {"fixed": make_backend("auto", options.threads), "plain": PlainBackend("cpu")}
    print(json.dumps({k: compare(b, checkpoint, prompts) for k, b in backends.items()}))


if __name__ == "__main__":
    main()
