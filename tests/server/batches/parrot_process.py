"""A parrot's server as a process of its own, to be killed: `MODEL DATA_DIR [SETTING=NUMBER ...]`.

Prints its address when it listens.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from lockstep.config import ServerConfig
from lockstep.server.serve import base_url, listen, make_server
from lockstep.types import LockstepError
from tests.server.support import fake_llm

ROOT = Path(__file__).parents[3]


class ServerProcess:
    """Starts one; `kill` ends it with SIGKILL."""

    def __init__(self, model: str, folder: Path, **settings: int) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.server.batches.parrot_process",
                model,
                str(folder),
                *(f"{name}={value}" for name, value in settings.items()),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.close()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.close()

    def close(self) -> int:
        """Wait for its end; what it wrote to standard error is then in `said`."""
        _, self.said = self.process.communicate(timeout=30)
        return self.process.returncode


async def main(model: str, folder: str, settings: dict[str, Any]) -> None:
    llm = fake_llm(model)
    config = ServerConfig(port=0, data_dir=folder, **settings)
    server = make_server(llm, config)
    await llm.start()
    listener = listen(config)
    print(base_url(listener), flush=True)
    try:
        await server.serve(sockets=[listener])
    finally:
        await llm.close()


if __name__ == "__main__":
    try:
        pairs = (argument.split("=") for argument in sys.argv[3:])
        asyncio.run(main(sys.argv[1], sys.argv[2], {name: int(value) for name, value in pairs}))
    except LockstepError as error:
        sys.exit(f"error: {error}")
