"""The correctly rounded building blocks: accuracy, and independence of place."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.kernels import exact
from tests.kernels.support import randn, same_bits

_FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def _round(value: Fraction) -> float:
    """Nearest float32 of an exact value, ties to even, by bisection over neighbours."""
    guess = np.float32(float(value))
    around = [np.nextafter(guess, np.float32(side)) for side in (-np.inf, np.inf)]
    finite = [c for c in (guess, *around) if np.isfinite(c)]
    return float(
        min(
            finite,
            key=lambda c: (abs(Fraction(float(c)) - value), int(np.float32(c).view(np.uint32)) & 1),
        )
    )


@given(a=_FLOATS, b=_FLOATS, c=_FLOATS)
@settings(max_examples=300)
def test_fused_multiply_add_rounds_once(a: float, b: float, c: float) -> None:
    value = Fraction(a) * Fraction(b) + Fraction(c)
    if abs(value) >= 2**128 - 2**103:
        return  # overflows
    got = float(exact.fused(*(torch.tensor([x], dtype=torch.float32) for x in (a, b, c)))[0])
    assert got == _round(value)


@pytest.mark.parametrize("madd", [exact.fused, exact.separate])
def test_elementwise_functions_are_accurate(madd: exact.Madd) -> None:
    x = torch.linspace(-87, 88, 200_001)
    relative = exact.exp(x, madd).double() / x.double().exp() - 1
    assert float(relative.abs().max()) < 2.5e-7
    x = torch.cat([torch.logspace(-37, 38, 100_001), torch.linspace(0.5, 2.0, 100_001)])
    torch.testing.assert_close(exact.log(x, madd).double(), x.double().log(), rtol=3e-7, atol=1e-7)
    x = torch.linspace(-20, 20, 100_001)
    for mine, torch_form in (
        (exact.silu, torch.nn.functional.silu),
        (exact.gelu_tanh, lambda t: torch.nn.functional.gelu(t, approximate="tanh")),
    ):
        torch.testing.assert_close(
            mine(x, madd).double(), torch_form(x.double()), rtol=2e-6, atol=2e-6
        )


def test_values_do_not_depend_on_place_or_length() -> None:
    x = randn(1003, seed=4) * 10
    for function in (exact.exp, exact.silu, exact.gelu_tanh, lambda t: exact.log(t.abs())):
        whole = function(x)
        for cut in (1, 2, 7, 500):
            assert same_bits(torch.cat([function(x[:cut]), function(x[cut:])]), whole)


def test_special_values() -> None:
    x = torch.tensor([float("-inf"), -200.0, 0.0, 200.0, float("inf"), float("nan")])
    assert exact.exp(x)[:5].tolist() == [0.0, 0.0, 1.0, float("inf"), float("inf")]
    assert torch.isnan(exact.exp(x)[5])
    logs = exact.log(torch.tensor([0.0, 1.0, float("inf"), -1.0]))
    assert logs[:3].tolist() == [float("-inf"), 0.0, float("inf")]
    assert torch.isnan(logs[3])
