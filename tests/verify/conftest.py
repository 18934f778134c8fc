"""The real SmolLM2 in this process, once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lockstep import LLM


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    with LLM("smollm2", threads=1, cache_bytes=128 << 20, progress=False) as made:
        yield made
