"""Real clients against the real SmolLM2, on one server for all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lockstep.async_llm import AsyncLLM
from tests.server.support import ServerThread

CACHE_BYTES = 256 << 20


@pytest.fixture(scope="session")
def server() -> Iterator[ServerThread]:
    with ServerThread(lambda: AsyncLLM("smollm2", threads=1, cache_bytes=CACHE_BYTES)) as running:
        yield running


@pytest.fixture(scope="session")
def base_url(server: ServerThread) -> str:
    return f"{server.url}/v1"
