"""Lockstep as a benchmark worker: `python -m bench.worker_lockstep MODEL DTYPE THREADS`."""

from __future__ import annotations

import sys
from typing import Literal

from bench.worker import Job, serve
from lockstep import LLM, SamplingParams


def main() -> None:
    model, threads = sys.argv[1], int(sys.argv[3])
    dtype: Literal["bfloat16", "float32"] = "float32" if sys.argv[2] == "float32" else "bfloat16"
    llm = LLM(model, dtype=dtype, threads=threads, device="cpu", progress=False)

    def generate(job: Job) -> tuple[int, int | None]:
        before = llm.stats().computed_tokens
        params = SamplingParams(temperature=0.0, max_tokens=job.new_tokens, ignore_eos=True)
        answers = llm.generate(job.prompts, params)
        computed = llm.stats().computed_tokens - before
        return sum(len(answer.token_ids) for answer in answers), computed

    serve(generate)


if __name__ == "__main__":
    main()
