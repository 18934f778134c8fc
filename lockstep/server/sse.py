"""Server-sent events, several streams as one, and the client that goes away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lockstep.async_llm import AnswerStream
from lockstep.outputs import Delta
from lockstep.server import errors
from lockstep.server.replies import Reply, encode

log = logging.getLogger("lockstep.server")
T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection before its answer was ready."""


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; cancel it as soon as the client closes the connection.

    Raises:
        ClientGone: it did.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _end(task, gone)


async def merge(streams: Sequence[AnswerStream]) -> AsyncGenerator[tuple[int, Delta], None]:
    """Deltas of all streams as they come, each with its stream's index.

    Closing the iterator cancels every request that still runs.

    Raises:
        LockstepError: the first failure of any stream.
    """
    if len(streams) == 1:
        try:
            async for delta in streams[0]:
                yield 0, delta
        finally:
            streams[0].cancel()
        return
    queue: asyncio.Queue[tuple[int, Delta] | None] = asyncio.Queue()

    async def pump(index: int, stream: AnswerStream) -> None:
        try:
            async for delta in stream:
                queue.put_nowait((index, delta))
        finally:
            queue.put_nowait(None)

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is not None:
                yield item
                continue
            running -= 1
            for task in tasks:
                if task.done():
                    task.result()
        await asyncio.gather(*tasks)
    finally:
        for stream in streams:
            stream.cancel()
        await _end(*tasks)


class FrameStream(Response):
    """Writes frames of server-sent events as they come.

    When the client goes away, the iterator is closed at once, even between frames.

    Args:
        frames: events as bytes, each with its blank line; turns failures into events itself.
        on_end: called however it ends, also when no frame was ever asked for.
    """

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[bytes, None], on_end: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._respond(receive, send)
        finally:
            self._on_end()

    async def _respond(self, receive: Receive, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        writer = asyncio.ensure_future(self._write(send))
        gone = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait({writer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
        finally:
            await _end(writer, gone)

    async def _write(self, send: Send) -> None:
        try:
            async with aclosing(self._frames) as frames:
                async for frame in frames:
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            return  # the connection broke while writing


class EventStream(FrameStream):
    """Writes each reply as one event and `[DONE]` at the end.

    A failure after the first byte becomes an event with an error in OpenAI's shape.

    Args:
        replies, on_end: as `FrameStream`'s.
    """

    def __init__(self, replies: AsyncGenerator[Reply, None], on_end: Callable[[], None]) -> None:
        super().__init__(_reply_frames(replies), on_end)


async def _reply_frames(replies: AsyncGenerator[Reply, None]) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(replies):
            async for reply in replies:
                yield _frame(encode(reply))
    except Exception as error:
        status, body, _ = errors.describe(error)
        if status >= 500:
            log.error("a streamed answer failed: %s", error)
        yield _frame(encode(body))
    yield _frame(b"[DONE]")


def _frame(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
