"""Many engine requests for one reply: a few at a time, none left behind."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

from lockstep.async_llm import AnswerStream, AsyncLLM
from lockstep.types import Completion, Request, RequestError

GROUP = 64
"""Requests submitted at once, or as many as the queue takes; at most twice as many are in the
engine."""


async def complete(llm: AsyncLLM, requests: Iterable[Request]) -> list[Completion]:
    """The completions of all requests, in their order. Cancelling the call cancels them.

    A queue that is full waits for this call's own requests, and refuses it when it has none.

    Args:
        requests: taken from the iterable as they are needed, so that it may make them then.

    Raises:
        RequestError, EngineUnavailable, GenerationError: the first failure; the rest ends.
    """
    found: list[Completion] = []
    running: deque[AnswerStream] = deque()
    iterator = iter(requests)
    size = min(GROUP, llm.client.config.scheduler.max_queue or GROUP)
    group: list[Request] = []
    try:
        while group := group or list(islice(iterator, size)):
            try:
                running.extend(await llm.submit(group))
                group = []
            except RequestError as error:
                if error.code != "queue_full" or not running:
                    raise
                # Some may have been taken and cancelled: what the engine still says of them
                # must not be read as an answer.
                group = [replace(request, id=uuid.uuid4().hex) for request in group]
            while running and (group or len(running) > GROUP):
                found.append(await running[0].completion())
                running.popleft()
        for stream in running:
            found.append(await stream.completion())
    finally:
        for stream in running:
            stream.cancel()
    return found
