"""Listen until told to stop, then finish what was begun."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from lockstep.async_llm import AsyncLLM
from lockstep.config import ConfigError, ServerConfig
from lockstep.server.app import create_app
from lockstep.server.connections import Connection, Watchman
from lockstep.server.operations import Operations

log = logging.getLogger("lockstep.server")

GRACE_SECONDS = 5  # for last bytes, after the answers have ended
BACKLOG = 2048  # connections that the system keeps for us
_ADDRESS_HINTS = {
    errno.EADDRINUSE: "the port is in use; name another with --port, 0 takes a free one",
    errno.EADDRNOTAVAIL: "this machine has no such address; name one of its own with --host",
    errno.EACCES: "this user may not; name a port of 1024 or more with --port",
}
ACCEPTS = 16  # of them are taken in at once, so that `Connection` counts before the next come


def listen(config: ServerConfig) -> socket.socket:
    """A socket on the configured address; from here on connections queue.

    Raises:
        OSError: the address is taken or not this machine's; says what to do about it.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, backlog=BACKLOG)
    except OSError as error:
        hint = _ADDRESS_HINTS.get(error.errno or 0)
        if hint is None:
            raise
        raise OSError(f"cannot listen on {config.host}, port {config.port}: {hint}") from error


def base_url(listener: socket.socket, config: ServerConfig | None = None) -> str:
    """Where clients reach a listening socket."""
    scheme = "https" if config is not None and config.tls_cert else "http"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class Server(uvicorn.Server):
    """Drains on the first SIGINT, SIGTERM or SIGHUP, and exits at once on the second.

    Draining: new requests get 503, running answers have `drain_seconds`; what then still
    runs ends with an error, and the server stops.
    """

    def __init__(self, config: uvicorn.Config, operations: Operations) -> None:
        super().__init__(config)
        self._operations = operations
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Until a signal or `should_exit`."""
        self._loop = asyncio.get_running_loop()
        config = self._operations.config
        watchman = Watchman(
            self.server_state.connections, config.keep_alive_seconds, config.stall_seconds
        )
        watching = asyncio.create_task(watchman.watch())
        try:
            with self._hangup_means_stop():
                await super().serve(sockets)
        finally:
            watching.cancel()
            if self._draining is not None:
                self._draining.cancel()
            self._operations.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, which takes as many connections at once as it lets queue."""
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(BACKLOG)

    @contextmanager
    def _hangup_means_stop(self) -> Iterator[None]:
        """A terminal that closes asks to stop, as SIGTERM does; not so under nohup."""
        by_default = signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
        if not by_default or threading.current_thread() is not threading.main_thread():
            yield
            return
        signal.signal(signal.SIGHUP, self.handle_exit)
        try:
            yield
        finally:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn for every signal that means stop."""
        if self._operations.leaving:
            self.force_exit = self.should_exit = True
            return
        self._operations.drain(leaving=True)
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._begin_drain, signal.Signals(sig).name)

    def _begin_drain(self, why: str) -> None:
        seconds = self._operations.config.drain_seconds
        running = self._operations.metrics.in_flight
        log.info("%s: %d requests have %d s to finish", why, running, seconds)
        self._draining = asyncio.create_task(self._drain(seconds))

    async def _drain(self, seconds: float) -> None:
        if not await self._operations.drained(seconds):
            log.warning("ended what still ran after %d s", seconds)
        self.should_exit = True


def make_server(llm: AsyncLLM, config: ServerConfig) -> Server:
    """A server over an `AsyncLLM`.

    Run it with `await server.serve(sockets=[listen(config)])`: until SIGINT, SIGTERM or
    `server.should_exit`.

    Raises:
        ConfigError: a file of keys or certificates that cannot be used; a data directory
            that another server uses.
    """
    app = create_app(llm, config)
    settings = uvicorn.Config(
        app,
        log_config=None,  # the process has configured logging
        access_log=False,  # see frontdoor.py
        server_header=False,
        lifespan="on",
        http=Connection,
        backlog=ACCEPTS,
        ws="none",  # there is no WebSocket here, and nothing else would ask one for a key
        timeout_keep_alive=config.keep_alive_seconds,
        timeout_graceful_shutdown=GRACE_SECONDS,
        proxy_headers=bool(config.trusted_proxies),
        forwarded_allow_ips=list(config.trusted_proxies),
        ssl_certfile=config.tls_cert or None,
        ssl_keyfile=config.tls_key or None,
        ssl_keyfile_password=config.tls_key_password or None,
        ssl_ca_certs=config.tls_client_ca or None,
        ssl_cert_reqs=ssl.CERT_REQUIRED if config.tls_client_ca else ssl.CERT_NONE,
    )
    try:
        settings.load()  # reads the certificates, so that a mistake shows before the model loads
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"the certificate or its key cannot be used: {error}") from None
    app.state.batches.open()
    return Server(settings, app.state.operations)
