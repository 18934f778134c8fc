"""SmolLM2 and Gemma 3 270M on their real weights against transformers, and their own bits.

The oracle gets the tensors that Lockstep dequantised, so only the computing differs.
Tolerance on log-probabilities: `check.LOGPROB_TOLERANCE` (5e-4; 1.1e-4 and 1.5e-4 were
measured). Greedy text must be equal, token for token, in float32.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from lockstep.kernels.contract import Backend
from lockstep.kernels.cpu import make_backend
from lockstep.kernels.plain import PlainBackend
from lockstep.runner import check
from lockstep.types import ModelError
from lockstep.weights import Checkpoint, open_checkpoint
from tests.control import RowSplitBackend


@pytest.fixture(scope="module", params=["smollm2", "gemma3-270m"])
def checkpoint(request: pytest.FixtureRequest) -> Iterator[Checkpoint]:
    try:
        yield open_checkpoint(request.param)
    except ModelError as error:
        pytest.skip(str(error))
    gc.collect()


def test_logprobs_and_greedy_text_equal_transformers(checkpoint: Checkpoint) -> None:
    probe = check.open_probe(checkpoint, torch.float32, make_backend("native"), 64 << 20)
    outcomes = list(check.against_transformers(checkpoint, probe, check.prompts_of(checkpoint)))
    assert len(outcomes) == 2
    assert all(outcome.passed for outcome in outcomes), outcomes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_smollm2_do_not_move(dtype: torch.dtype) -> None:
    smollm2 = open_checkpoint("smollm2")
    prompts = check.prompts_of(smollm2)
    probe = check.open_probe(smollm2, dtype, make_backend("native"), 64 << 20)
    tokens = [token for prompt in prompts for token in prompt][:70]
    alone = probe.score(tokens)
    probe.reset()
    assert torch.equal(alone, probe.score(tokens, chunk=9, strangers=prompts))
    probe.reset()
    decoded = probe.score(tokens, start=64, chunk=1, pages=_filled(probe, tokens))
    assert torch.equal(alone[64:], decoded)


def _filled(probe: check.Probe, tokens: list[int]) -> tuple[list[int], ...]:
    pages = probe.pages(len(tokens))
    probe.score(tokens[:64], pages=pages)
    return pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_that_follow_the_batch_move_bits_of_smollm2(dtype: torch.dtype) -> None:
    """The control: the comparison above fails on every machine where trees follow the batch."""
    assert _moves(RowSplitBackend(), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_torch_moves_bits_of_smollm2(dtype: torch.dtype) -> None:
    """And with torch's own products, unless they happen to be invariant."""
    if not _moves(PlainBackend(torch.device("cpu")), dtype):
        pytest.skip(f"torch {torch.__version__} moves no bit of SmolLM2 in {dtype} here")


def _moves(control: Backend, dtype: torch.dtype) -> bool:
    smollm2 = open_checkpoint("smollm2")
    probe = check.open_probe(smollm2, dtype, control, 64 << 20)
    tokens = check.prompts_of(smollm2)[0]
    alone = probe.score(tokens)
    probe.reset()
    return not torch.equal(alone, probe.score(tokens, chunk=1))
