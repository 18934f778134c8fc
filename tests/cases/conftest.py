"""The real SmolLM2 behind each door: one `LLM` in this process and one server, for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from lockstep import LLM
from lockstep.async_llm import AsyncLLM
from tests.server.support import ServerThread

CACHE_BYTES = 256 << 20


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    with LLM(
        "smollm2",
        threads=1,
        cache_bytes=CACHE_BYTES,
        max_sequences=320,
        max_step_tokens=1024,
        progress=False,
    ) as made:
        yield made


@pytest.fixture(scope="session")
def server() -> Iterator[ServerThread]:
    def make() -> AsyncLLM:
        return AsyncLLM("smollm2", threads=1, cache_bytes=CACHE_BYTES)

    with ServerThread(make) as running:
        yield running


@pytest.fixture(scope="session")
def http(server: ServerThread) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def client(server: ServerThread) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as made:
        yield made
