"""How many pieces of a batch may be in the engine at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Places:
    """So many at once, first come, first served; and one alone, where its company is in doubt."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = asyncio.Semaphore(count)
        self._one_alone = asyncio.Lock()

    @asynccontextmanager
    async def take(self, *, alone: bool = False) -> AsyncIterator[None]:
        """A place, or all of them."""
        if not alone:
            async with self._free:
                yield
            return
        async with self._one_alone:
            held = 0
            try:
                for _ in range(self.count):
                    await self._free.acquire()
                    held += 1
                yield
            finally:
                for _ in range(held):
                    self._free.release()
