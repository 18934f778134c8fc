"""One server over a parrot for all tests that do not harm it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import httpx
import openai
import pytest

from tests.branch_fake import make_branch
from tests.server.support import ServerThread, fake_llm


@pytest.fixture(scope="session")
def parrot_server() -> Iterator[ServerThread]:
    with ServerThread(fake_llm, max_body_bytes=100_000) as server:
        yield server


@pytest.fixture(scope="session")
def judged_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    """Branches judge (of three options), codes and reward beside a model that says what the
    user has said."""
    at = tmp_path_factory.mktemp("branches")
    branches = {
        "judge": make_branch(at, thresholds={"refuse": 0.2}),
        "codes": make_branch(at, "codes", head="codes", options=("Yes", "No", "A", "B", "C")),
        "reward": make_branch(at, "reward", head="value", options=("value",)),
    }
    make = partial(fake_llm, "judged-speaks", branches=branches)
    with ServerThread(make, max_body_bytes=200_000, served_name="parrot") as server:
        yield server


@pytest.fixture
def judged(judged_server: ServerThread) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=judged_server.url, timeout=30) as client:
        yield client


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
