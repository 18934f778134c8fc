"""Models that several files of this folder use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lockstep import LLM
from tests.model.tiny import build_oracle, save


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    """The real SmolLM2 in this process, once for all tests."""
    with LLM("smollm2", threads=1, cache_bytes=128 << 20, progress=False) as made:
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small random model with room for every probe."""
    folder = tmp_path_factory.mktemp("tiny")
    save(build_oracle("llama", max_position_embeddings=1024), folder)
    return str(folder)
