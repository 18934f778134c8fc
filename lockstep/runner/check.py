"""Proves a model on this machine: `python -m lockstep.runner.check NAME`.

It loads the checkpoint and compares logits and greedy text with transformers (where
that is installed) on the very weights that Lockstep computes with, then compares bits
between schedules in each dtype. It prints one line a check and exits with 1 if any
failed, with 2 if the model does not load.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.config import ModelOptions
from lockstep.kernels import make_backend
from lockstep.kernels.contract import Backend
from lockstep.model import load_model
from lockstep.runner.probe import Probe
from lockstep.runner.runner import Runner
from lockstep.types import LockstepError
from lockstep.weights import Checkpoint, open_checkpoint

# Largest difference of a log-probability from transformers' that summation order in
# float32 explains, for models of up to a few hundred million parameters.
LOGPROB_TOLERANCE = 5e-4
GREEDY_TOKENS = 20
TEXTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time there was a small",
    "def fibonacci(n):\n    ",
    "The three primary colours are red,",
    "To make a cup of tea, first",
    "In 1969, the first humans landed on",
    "Q: What is 7 times 8?\nA:",
    "Dear Sir or Madam,\n\nI am writing to",
    "The opposite of hot is",
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One check: `passed` is None when it could not be made here."""

    name: str
    passed: bool | None
    detail: str


def prompts_of(checkpoint: Checkpoint) -> list[list[int]]:
    """Token ids of `TEXTS`, with the model's own beginning of sequence."""
    tokenizer = checkpoint.tokenizer()
    return [list(tokenizer.encode(text)) for text in TEXTS]


def transformers_model(checkpoint: Checkpoint) -> Any:
    """transformers' model in float32, filled with the checkpoint's tensors.

    Raises:
        ImportError: transformers is not installed.
        RuntimeError: its model has other tensors than the checkpoint.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**checkpoint.config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    tensors = {name: checkpoint.tensor(name).float() for name in checkpoint.tensor_names()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if set(missing) - tied or unexpected:
        raise RuntimeError(f"transformers lacks {unexpected} and wants {missing}")
    model.tie_weights()
    return model.eval()


def open_probe(
    checkpoint: Checkpoint, dtype: torch.dtype, backend: Backend, pool_bytes: int = 128 << 20
) -> Probe:
    """A probe over the checkpoint with a pool of its own."""
    model = load_model(checkpoint, backend, dtype, max_context=2048)
    return Probe(Runner(model, backend, memory_bytes=pool_bytes))


def against_transformers(
    checkpoint: Checkpoint, probe: Probe, prompts: Sequence[Sequence[int]]
) -> Iterator[Outcome]:
    """Log-probabilities at every position, and greedy text of every prompt.

    Greedy text is compared by feeding Lockstep's continuation to transformers and asking
    whether it would have taken the same token at every position.
    """
    try:
        oracle = transformers_model(checkpoint)
    except ImportError:
        yield Outcome("against transformers", None, "transformers is not installed")
        return
    probe.reset()
    texts = probe.generate(prompts, GREEDY_TOKENS)
    worst, different, positions = 0.0, 0, 0
    for prompt, continuation in zip(prompts, texts, strict=True):
        tokens = [*prompt, *continuation]
        with torch.no_grad():
            expected = oracle(torch.tensor([tokens])).logits[0].float()
        probe.reset()
        found = probe.score(tokens, chunk=64).cpu()
        delta = found.log_softmax(-1) - expected.log_softmax(-1)
        worst = max(worst, float(delta.abs().max()))
        positions += len(tokens)
        chosen = expected[len(prompt) - 1 : -1].argmax(-1).tolist()
        different += chosen != continuation
    yield Outcome(
        "logprobs as transformers, float32",
        worst <= LOGPROB_TOLERANCE,
        f"largest difference {worst:.1e} over {positions} positions "
        f"(allowed {LOGPROB_TOLERANCE:.0e})",
    )
    yield Outcome(
        "greedy text as transformers, float32",
        different == 0,
        f"{len(prompts) - different} of {len(prompts)} prompts, {GREEDY_TOKENS} tokens each",
    )


def bits_hold(probe: Probe, prompts: Sequence[Sequence[int]]) -> Iterator[Outcome]:
    """Rows of one sequence: alone, in chunks, in a crowd, on a prefix that lies elsewhere."""
    dtype = str(probe.runner.model.dtype).removeprefix("torch.")
    tokens = [token for prompt in prompts for token in prompt][:96]
    crowd = list(prompts)
    probe.reset()
    alone = probe.score(tokens)
    cut = len(tokens) // 2 // probe.runner.page_tokens * probe.runner.page_tokens

    def prefix_hit() -> Tensor:
        shared = probe.pages(cut)
        probe.score(tokens[:cut], chunk=7, pages=shared)
        own = probe.pages(len(tokens) - cut)
        pages = tuple(a + b for a, b in zip(shared, own, strict=True))
        return torch.cat([alone[:cut], probe.score(tokens, start=cut, pages=pages)])

    schedules: dict[str, Callable[[], Tensor]] = {
        "one token a step": lambda: probe.score(tokens, chunk=1),
        "chunks of 7": lambda: probe.score(tokens, chunk=7),
        f"with {len(crowd)} strangers": lambda: probe.score(tokens, chunk=64, strangers=crowd),
        "decoding among strangers": lambda: probe.score(tokens, chunk=1, strangers=crowd),
        "on a shared prefix": prefix_hit,
    }
    for name, schedule in schedules.items():
        probe.reset()
        differing = int((schedule() != alone).any(dim=1).sum())
        yield Outcome(
            f"bits {name}, {dtype}", differing == 0, f"{differing} of {len(tokens)} rows differ"
        )


def check_model(name: str, options: ModelOptions | None = None) -> Iterator[Outcome]:
    """All checks of one model, as they are made.

    Raises:
        LockstepError: the model does not load.
    """
    checkpoint = open_checkpoint(name)
    backend = make_backend(options or ModelOptions(name=name))
    prompts = prompts_of(checkpoint)
    probe = open_probe(checkpoint, torch.float32, backend)
    yield Outcome("loads", True, probe.runner.model.architecture)
    yield from against_transformers(checkpoint, probe, prompts)
    yield from bits_hold(probe, prompts)
    del probe
    yield from bits_hold(open_probe(checkpoint, torch.bfloat16, backend), prompts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; the exit status says whether every check passed."""
    parser = argparse.ArgumentParser(
        prog="python -m lockstep.runner.check",
        description="Compare a model with transformers, and its bits between schedules.",
    )
    parser.add_argument("name", help="a path, a packaged name or a hub id")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args(arguments)
    words = {True: "PASS", False: "FAIL", None: "SKIP"}
    failed = False
    try:
        for outcome in check_model(given.name, ModelOptions(given.name, device=given.device)):
            print(f"{words[outcome.passed]}  {outcome.name}: {outcome.detail}", flush=True)
            failed = failed or outcome.passed is False
    except LockstepError as error:
        print(f"FAIL  {error}", file=sys.stderr)
        return 2
    print("FAIL" if failed else "PASS")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
