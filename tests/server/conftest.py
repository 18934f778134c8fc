"""One server over a parrot for all tests that do not harm it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.server.support import ServerThread, fake_llm


@pytest.fixture(scope="session")
def parrot_server() -> Iterator[ServerThread]:
    with ServerThread(fake_llm, max_body_bytes=100_000) as server:
        yield server


@pytest.fixture
def http(parrot_server: ServerThread) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=parrot_server.url, timeout=30) as client:
        yield client


@pytest.fixture
def client(parrot_server: ServerThread) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{parrot_server.url}/v1", api_key="none", max_retries=0, timeout=30
    ) as made:
        yield made
