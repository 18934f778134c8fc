"""A server around an engine that computes nothing: what is left is the server's own work.

    python -m bench.scripted PORT STEP_MS

Its engine process takes STEP_MS for a step whatever is in it, and writes ordinary words.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence

from lockstep import logs
from lockstep.async_llm import AsyncLLM
from lockstep.config import EngineConfig, ServerConfig
from lockstep.engine.client import EngineClient
from lockstep.engine.loop import Engine
from lockstep.server.serve import listen, make_server
from lockstep.settings import engine_config
from tests.fakes import FakeExecutor

STEP_SECONDS = "BENCH_STEP_SECONDS"
ORDINARY = range(300, 40_000)  # ids of SmolLM2 that are text


def make_engine(config: EngineConfig, progress: Callable[[str, float], None]) -> Engine:
    """Runs in the engine's process."""

    def word(history: Sequence[int], prompt_len: int, position: int) -> int:
        return ORDINARY[(7919 * len(history)) % len(ORDINARY)]

    executor = FakeExecutor(
        vocab_size=49_152,
        max_context=2048,
        num_slabs=4096,
        script=word,
        latency=float(os.environ[STEP_SECONDS]),
    )
    executor.keep_plans = False
    return Engine(executor, config.scheduler, config.cache)


async def serve(port: int) -> None:
    """Until a signal."""
    client = EngineClient(
        engine_config("smollm2", max_sequences=256), factory="bench.scripted:make_engine"
    )
    config = ServerConfig(port=port)
    async with AsyncLLM.from_client(client) as llm:
        await make_server(llm, config).serve(sockets=[listen(config)])


def main() -> None:
    """The command line."""
    os.environ[STEP_SECONDS] = str(float(sys.argv[2]) / 1000)
    logs.configure()
    asyncio.run(serve(int(sys.argv[1])))


if __name__ == "__main__":
    main()
