"""SmolLM2, loaded once for the room, and a folder of the tests' own for the trunk's rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lockstep.branches.build import Trunk
from lockstep.settings import engine_config
from tests.branches.support import SETTINGS


@pytest.fixture(scope="session")
def trunk() -> Trunk:
    return Trunk(engine_config("smollm2", **SETTINGS))


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiled kernels stay where they are."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.branches.activations.cache_folder", lambda: folder)
        yield
