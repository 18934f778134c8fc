"""Listen until told to stop."""

from __future__ import annotations

import socket

import uvicorn

from lockstep.async_llm import AsyncLLM
from lockstep.config import ServerConfig
from lockstep.server.app import create_app

GRACE_SECONDS = 10
BACKLOG = 2048


def listen(config: ServerConfig) -> socket.socket:
    """A socket on the configured address; from here on connections queue.

    Raises:
        OSError: the address is taken or not this machine's.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    return socket.create_server((config.host, config.port), family=family, backlog=BACKLOG)


def base_url(listener: socket.socket) -> str:
    """Where clients reach a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_server(llm: AsyncLLM, config: ServerConfig) -> uvicorn.Server:
    """A uvicorn server over a started `AsyncLLM`.

    Run it with `await server.serve(sockets=[listen(config)])`: until SIGINT, SIGTERM or
    `server.should_exit`; running answers then get ten seconds.
    """
    return uvicorn.Server(
        uvicorn.Config(
            create_app(llm, config),
            log_level="warning",
            lifespan="off",
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
    )
