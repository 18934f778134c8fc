"""What a grammar allows, at the draw on the GPU: exact -inf, on its own row only."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.kernels.contract import Backend
from lockstep.runner.penalties import LogitAdjuster
from lockstep.runner.plan import SampleSpec
from lockstep.runner.sampler import Sampler
from lockstep.types import SamplingParams

VOCAB = 49_157  # not whole words of a mask


class Allowed:
    """Ids as the engine hands them over."""

    def __init__(self, ids: list[int]) -> None:
        bits = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
        bits[ids] = 1
        self._words = np.packbits(bits, bitorder="little").view(np.int32)

    def words(self) -> np.ndarray:
        return self._words


def specs(count: int) -> list[SampleSpec]:
    chance = random.Random(3)
    found = []
    for number in range(count):
        ids = chance.sample(range(VOCAB), (1, 2, 50, 40_000)[number % 4])
        params: dict[str, Any] = {
            "temperature": (0.0, 1.0, 0.7)[number % 3],
            "top_p": (1.0, 0.9)[number % 2],
            "top_k": (0, 20, 60_000)[number % 3],
            "min_p": (0.0, 0.1)[number // 2 % 2],
            "logprobs": 3,
            "logprobs_mode": ("raw", "processed")[number // 3 % 2],
        }
        allowed = None if number % 5 == 4 else Allowed(ids)
        chosen = SamplingParams(max_tokens=9, **params)
        found.append(SampleSpec(chosen, number, 0, 2, [1, 2, 3], 1, (), (), allowed))
    return found


def logits(rows: int) -> torch.Tensor:
    return 4 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(1))


def test_masked_logits_have_the_cpus_bits(gpu: Backend) -> None:
    rows, wanted = logits(75), specs(75)
    cpu, cuda = rows.clone(), rows.cuda()
    LogitAdjuster(VOCAB).apply(cpu, wanted, range(75))
    LogitAdjuster(VOCAB).apply(cuda, wanted, range(75))
    assert torch.equal(cuda.cpu(), cpu)
    assert torch.equal(cpu[4], rows[4])
    assert int((cpu[0] != -math.inf).sum()) == 1


def test_draws_stay_inside_the_mask_and_see_no_other_row(gpu: Backend) -> None:
    rows, wanted = logits(70).cuda(), specs(70)
    crowd = Sampler(gpu, VOCAB).draw(rows.clone(), wanted, range(70))
    for row, (spec, drawn) in enumerate(zip(wanted, crowd, strict=True)):
        if spec.allowed is not None:
            words = spec.allowed.words()
            assert drawn.token is not None
            assert (int(words[drawn.token >> 5]) >> (drawn.token & 31)) & 1
            if spec.params.temperature == 0.0:
                bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB]
                masked = np.where(bits, rows[row].cpu().numpy(), -np.inf)
                assert drawn.token == int(masked.argmax())
        if row % 7 == 0:
            (alone,) = Sampler(gpu, VOCAB).draw(rows[row : row + 1].clone(), [spec], [row])
            assert alone == drawn
    flipped = Sampler(gpu, VOCAB).draw(rows.flip(0), wanted[::-1], range(70))
    assert flipped[::-1] == crowd


@pytest.mark.parametrize("rows", [256])
def test_masks_of_a_full_batch_cost_little(gpu: Backend, rows: int) -> None:
    """Bounded loosely; the figure is printed for docs/structured-output.md."""
    given, wanted = logits(rows).cuda(), [s for s in specs(4 * rows) if s.allowed][:rows]
    adjuster = LogitAdjuster(VOCAB)
    adjuster.apply(given.clone(), wanted, range(rows))
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(5):
        adjuster.apply(given, wanted, range(rows))
    end.record()
    torch.cuda.synchronize()
    took = start.elapsed_time(end) / 5
    print(f"masks of {rows} rows: {took:.2f} ms")
    assert took < 20
