"""How many requests the fuzzers send."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def fuzz_requests(request: pytest.FixtureRequest) -> int:
    """What `--fuzz-requests` says."""
    found: int = request.config.getoption("--fuzz-requests")
    return found
