"""The control: the same engine on torch's own operations, alone against in a crowd.

Reads a JSON list of prompts (token ids) on standard input and prints one JSON object that says
how many logprobs and answers have other bits. `examples/demo.py` runs it.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys

import torch

from lockstep.config import CacheConfig, SchedulerConfig
from lockstep.engine.loop import Engine
from lockstep.kernels.plain import PlainBackend
from lockstep.model import load_model
from lockstep.runner.runner import Runner
from lockstep.types import Request, SamplingParams
from lockstep.weights import open_checkpoint

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


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    prompts: list[list[int]] = json.load(sys.stdin)[:CROWD]

    backend = PlainBackend(torch.device("cpu"))
    model = load_model(open_checkpoint(options.model), backend, torch.bfloat16)
    cache = CacheConfig(prefix_caching=False)
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
        for one, other in zip(first, second, strict=False)
    ]
    differ = [
        abs(one[1] - other[1])
        for one, other in pairs
        if struct.pack("<d", one[1]) != struct.pack("<d", other[1])
    ]
    result = {
        "logprobs": len(pairs),
        "logprobs_differ": len(differ),
        "largest": max(differ, default=0.0),
        "answers": len(alone),
        "answers_differ": sum(a != b for a, b in zip(crowd, alone, strict=True)),
        "texts_differ": sum(
            [t for t, _ in a] != [t for t, _ in b] for a, b in zip(crowd, alone, strict=True)
        ),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
