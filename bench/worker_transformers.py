"""transformers as a benchmark worker: `python -m bench.worker_transformers MODEL DTYPE THREADS`.

Batches of 16, sorted by length to pad little, left-padded: how one would use it well.
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM

from bench.worker import Job, serve

BATCH = 16


def main() -> None:
    folder, dtype, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def generate(job: Job) -> tuple[int, int | None]:
        prompts = sorted(job.prompts, key=len)
        tokens = 0
        for begin in range(0, len(prompts), BATCH):
            batch = prompts[begin : begin + BATCH]
            width = max(map(len, batch))
            ids = torch.tensor([[0] * (width - len(p)) + p for p in batch])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
            out = model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=job.new_tokens,
                max_new_tokens=job.new_tokens,
                pad_token_id=0,
            )
            tokens += out[:, width:].numel()
        return tokens, None

    serve(generate)


if __name__ == "__main__":
    main()
