"""A row's bits do not depend on company, chunk or pages; controls fail the same test."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.kernels.contract import Backend
from lockstep.kernels.cpu import make_backend
from lockstep.kernels.plain import PlainBackend
from lockstep.runner.probe import Probe
from lockstep.weights import Checkpoint
from tests.control import RowSplitBackend
from tests.model.tiny import build_oracle, probe_of, save

DTYPES = [torch.float32, torch.bfloat16]
TOKENS = [(11 * i * i + 5 * i + 2) % 131 for i in range(150)]
STRANGERS = [[(13 * i + 7 * s) % 131 for i in range(20 + 9 * s)] for s in range(9)]


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen3", "mistral-window"])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    return save(build_oracle(request.param), tmp_path_factory.mktemp(request.param))


def differing_rows(probe: Probe, tokens: list[int]) -> dict[str, int]:
    """Rows whose bits differ from those of the sequence alone in one chunk, by schedule."""
    alone = probe.score(tokens)
    found = {}
    for chunk in (1, 7, 64):
        probe.reset()
        found[f"chunks of {chunk}"] = _differing(alone, probe.score(tokens, chunk=chunk))
    for chunk in (0, 1, 33):
        probe.reset()
        crowd = probe.score(tokens, chunk=chunk, strangers=STRANGERS)
        found[f"a crowd, chunks of {chunk}"] = _differing(alone, crowd)
    return found


def _differing(expected: torch.Tensor, found: torch.Tensor) -> int:
    return int((expected != found).any(dim=1).sum())


@pytest.mark.parametrize("dtype", DTYPES)
def test_company_and_chunks_change_no_bit(checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    found = differing_rows(probe_of(checkpoint, dtype), TOKENS)
    assert not any(found.values()), found


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_form_without_a_compiler_keeps_bits_too(tmp_path: Path, dtype: torch.dtype) -> None:
    probe = probe_of(save(build_oracle("gemma3"), tmp_path), dtype, make_backend("torch", 1))
    alone = probe.score(TOKENS[:40])
    assert torch.equal(alone, probe.score(TOKENS[:40], chunk=7, strangers=STRANGERS[:3]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_thread_count_changes_no_bit(checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    scores = [
        probe_of(checkpoint, dtype, make_backend("native", threads)).score(TOKENS, chunk=50)
        for threads in (1, 2, 3)
    ]
    assert torch.equal(scores[0], scores[1])
    assert torch.equal(scores[0], scores[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shared_prefix_on_other_pages_changes_no_bit(
    checkpoint: Checkpoint, dtype: torch.dtype
) -> None:
    probe = probe_of(checkpoint, dtype)
    alone = probe.score(TOKENS)
    cut = 64
    shared = probe.pages(cut)
    probe.score(TOKENS[:cut], chunk=30, pages=shared)
    for _ in range(2):
        own = probe.pages(len(TOKENS) - cut)
        pages = tuple(a + b for a, b in zip(shared, own, strict=True))
        hit = probe.score(TOKENS, start=cut, pages=pages, strangers=STRANGERS[:3])
        assert torch.equal(hit, alone[cut:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_that_follow_the_batch_fail_the_same_test(tmp_path: Path, dtype: torch.dtype) -> None:
    """The control: every schedule that changes the split moves some bit, on every machine."""
    checkpoint = save(build_oracle("llama"), tmp_path)
    found = differing_rows(probe_of(checkpoint, dtype, RowSplitBackend()), TOKENS)
    del found["a crowd, chunks of 0"]  # both sides have too many rows for a split
    assert all(found.values()), found


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_torch_fails_the_same_test(tmp_path: Path, dtype: torch.dtype) -> None:
    """Without fixed trees some schedule moves some bit, unless torch happens to be invariant."""
    checkpoint = save(build_oracle("llama"), tmp_path)
    control: Backend = PlainBackend(torch.device("cpu"))
    found = differing_rows(probe_of(checkpoint, dtype, control), TOKENS)
    if not any(found.values()):
        pytest.skip(f"torch {torch.__version__} moves no bit of this model in {dtype} here")
