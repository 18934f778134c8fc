"""Every family against transformers, in float32 on small random weights.

Tolerance: 2e-4 on logits whose standard deviation is above 1. Both sides sum in
float32, in different orders; transformers also computes rotation angles in float32.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.kernels.cpu import make_backend
from lockstep.kernels.plain import PlainBackend
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


@pytest.mark.parametrize("form", ["plain", "torch"])
def test_other_backends_compute_the_same_model(form: str, tmp_path: Path) -> None:
    """The control of the bit tests too: it differs in bits, not in what it computes."""
    cpu = torch.device("cpu")
    backend = PlainBackend(cpu) if form == "plain" else make_backend("torch", 1)
    for name in ("llama-tied-bias", "gemma3"):
        oracle = build_oracle(name)
        probe = probe_of(save(oracle, tmp_path / name), backend=backend)
        with torch.no_grad():
            expected = oracle(torch.tensor([TOKENS])).logits[0]
        found = probe.score(TOKENS, chunk=50)
        assert (found - expected).abs().max() < TOLERANCE * max(1.0, float(expected.std()))


def test_a_rope_that_is_read_wrongly_would_be_seen(tmp_path: Path) -> None:
    """The comparison can fail: another factor moves logits far beyond the tolerance."""
    oracle = build_oracle("llama-linear")
    checkpoint = save(oracle, tmp_path)
    key = "rope_parameters" if checkpoint.config.get("rope_parameters") else "rope_scaling"
    checkpoint.config[key] = {**checkpoint.config[key], "factor": 4.1}
    with torch.no_grad():
        expected = oracle(torch.tensor([TOKENS])).logits[0]
    assert (probe_of(checkpoint).score(TOKENS) - expected).abs().max() > 100 * TOLERANCE
