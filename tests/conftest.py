"""Settings that every test shares: hypothesis profiles, one thread by default, no network."""

from __future__ import annotations

import os
from pathlib import Path

# Before torch is imported anywhere: the suite shares two cores with the engines it starts, and
# weights never come from a network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import HealthCheck, settings

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
# The same examples on every run: a red run is red again. `HYPOTHESIS_PROFILE=explore` looks for
# new ones.
settings.register_profile("ci", derandomize=True, database=None, **_COMMON)
settings.register_profile("explore", max_examples=1000, print_blob=True, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


FUZZ_REQUESTS = 20_000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-requests",
        type=int,
        default=FUZZ_REQUESTS,
        help=f"requests that tests/fuzz sends altogether (default {FUZZ_REQUESTS})",
    )


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parents[1]
