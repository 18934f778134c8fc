"""One engine process and the way to it, as the door sees them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from asyncio.subprocess import Process
from pathlib import Path

import zmq.asyncio

from lockstep import messages

AT_ONCE = 32  # messages that may be read before other tasks get their turn


class Link:
    """One child process and the socket that leads to it."""

    def __init__(self, process: Process, socket: zmq.asyncio.Socket, path: Path) -> None:
        self.process = process
        self._socket = socket
        self._path = path  # of the socket
        self._death = asyncio.ensure_future(process.wait())
        self._incoming: asyncio.Future[bytes] | None = None
        self._at_once = 0  # messages that were read without a wait

    def send(self, message: messages.Message) -> None:
        """Hand a message to the socket; without a high-water mark that never waits."""
        self._socket.send(messages.encode(message))

    async def receive(self, timeout: float | None = None) -> messages.FromEngine | None:
        """The next message; None once the process has ended and all it wrote was read.

        Raises:
            TimeoutError: nothing came within `timeout` seconds.
        """
        if self._incoming is None:
            self._incoming = asyncio.ensure_future(self._socket.recv())
        if self._incoming.done() and self._at_once < AT_ONCE:
            # What has piled up goes to the queues before their readers run: see `OutputQueue`.
            self._at_once += 1
            payload, self._incoming = self._incoming.result(), None
            return messages.decode_from_engine(payload)
        self._at_once = 0
        waiting: set[asyncio.Future[bytes] | asyncio.Future[int]] = {
            self._incoming,
            self._death,
        }
        await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if self._death.done() and not self._incoming.done():
            # What the process wrote last may still be on its way through the io thread.
            await asyncio.wait({self._incoming}, timeout=0.2)
            if not self._incoming.done():
                return None
        if not self._incoming.done():
            raise TimeoutError
        payload, self._incoming = self._incoming.result(), None
        return messages.decode_from_engine(payload)

    def ending(self) -> str:
        """How the process ended, in words."""
        status = self._death.result()
        if status >= 0:
            return f"ended with status {status}"
        hint = " (out of memory?)" if -status == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-status).name}{hint}"

    async def close(self, patience: float) -> None:
        """Give the process `patience` seconds to end by itself, then make it end."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        await asyncio.wait({self._death}, timeout=max(patience, 0.05))
        if not self._death.done():
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()  # it ignores SIGTERM
        await self._death
        if self._incoming is not None:
            self._incoming.cancel()
        self._socket.close(linger=0)
        self._path.unlink(missing_ok=True)
