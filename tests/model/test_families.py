"""Every family against transformers, in float32 on small random weights.

Tolerance: 2e-4 on logits whose standard deviation is above 1. Both sides sum in
float32, in different orders; transformers also computes rotation angles in float32.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.model.tiny import TINY, build_oracle, probe_of, save

TOLERANCE = 2e-4
TOKENS = [(7 * i * i + 3 * i + 1) % 131 for i in range(75)]


@pytest.mark.parametrize("name", TINY)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    oracle = build_oracle(name)
    probe = probe_of(save(oracle, tmp_path))
    with torch.no_grad():
        expected = oracle(torch.tensor([TOKENS])).logits[0]
    found = probe.score(TOKENS, chunk=32)
    assert expected.std() > 0.5, "logits too small to show a difference"
    assert (found - expected).abs().max() < TOLERANCE * max(1.0, float(expected.std()))
