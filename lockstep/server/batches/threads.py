"""Blocking work off the loop, which a cancelled caller does not leave behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def to_the_end(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run blocking work in a thread; a cancelled call waits for it before it gives way."""
    return await _whole(asyncio.to_thread(work, *args, **kwargs))


async def stoppable(work: Callable[[threading.Event], T]) -> T:
    """As `to_the_end`, for long work: a cancelled call sets the event that `work` looks at."""
    stop = threading.Event()
    return await _whole(asyncio.to_thread(work, stop), stop)


async def _whole(call: Coroutine[Any, Any, T], stop: threading.Event | None = None) -> T:
    running = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if stop is not None:
            stop.set()
        await asyncio.wait({running})
        running.exception()  # nobody else will ask
        raise
