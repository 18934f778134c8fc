"""Listen until told to stop."""

from __future__ import annotations

from collections.abc import Callable

import uvicorn

from lockstep.async_llm import AsyncLLM
from lockstep.config import ServerConfig
from lockstep.server.app import create_app

GRACE_SECONDS = 10


async def serve(
    llm: AsyncLLM, config: ServerConfig, on_listening: Callable[[str], None] | None = None
) -> None:
    """Serve a started `AsyncLLM` until SIGINT or SIGTERM; running answers get ten seconds.

    Args:
        on_listening: called with the base URL once connections are taken.

    Raises:
        OSError: the address cannot be listened on.
    """
    app = create_app(llm, config)
    server = _Server(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            log_level="warning",
            timeout_graceful_shutdown=GRACE_SECONDS,
            lifespan="off",
        ),
        on_listening,
    )
    await server.serve()
    if not server.started:
        raise OSError(f"cannot listen on {config.host}:{config.port}")


class _Server(uvicorn.Server):
    """Tells where it listens; port 0 is known only then."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[str], None] | None) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    async def startup(self, sockets: object = None) -> None:
        await super().startup(None)
        if self.started and self._on_listening is not None:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            self._on_listening(f"http://{shown}:{port}")
