"""Many engine requests for one reply: a few at a time, none left behind."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from lockstep.async_llm import AnswerStream, AsyncLLM
from lockstep.types import Completion, Request

GROUP = 64
"""Requests submitted at once; at most twice as many are in the engine."""


async def complete(llm: AsyncLLM, requests: Iterable[Request]) -> list[Completion]:
    """The completions of all requests, in their order. Cancelling the call cancels them.

    Args:
        requests: taken from the iterable as they are needed, so that it may make them then.

    Raises:
        RequestError, EngineUnavailable, GenerationError: the first failure; the rest ends.
    """
    found: list[Completion] = []
    running: deque[AnswerStream] = deque()
    iterator = iter(requests)
    try:
        while group := list(islice(iterator, GROUP)):
            running.extend(await llm.submit(group))
            while len(running) > GROUP:
                found.append(await running[0].completion())
                running.popleft()
        for stream in running:
            found.append(await stream.completion())
    finally:
        for stream in running:
            stream.cancel()
    return found
