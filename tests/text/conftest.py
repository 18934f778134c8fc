"""The two real tokenizers, loaded once; no torch."""

from __future__ import annotations

import pytest

from lockstep.text import Tokenizer
from lockstep.weights import PACKAGED_MODELS, open_checkpoint


def _packaged(name: str) -> Tokenizer:
    model = next(model for model in PACKAGED_MODELS if model.name == name)
    if not model.installed():
        pytest.skip(f"{name} is not installed: {model.install}")
    return open_checkpoint(name).tokenizer()


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    return _packaged("smollm2")


@pytest.fixture(scope="session")
def gemma() -> Tokenizer:
    return _packaged("gemma3-270m")


@pytest.fixture(scope="session", params=["smollm2", "gemma3-270m"])
def real(request: pytest.FixtureRequest) -> Tokenizer:
    """Each real tokenizer in turn: byte-level BPE, then SentencePiece with byte fallback."""
    name = "smollm2" if request.param == "smollm2" else "gemma"
    tokenizer: Tokenizer = request.getfixturevalue(name)
    return tokenizer
