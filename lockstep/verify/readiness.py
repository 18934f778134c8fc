"""Waits for a server that is still starting: what fails meanwhile says nothing about its answers.

A port that refuses, and a status by which servers and the proxies before them say "not yet", are
waited out. Then one token is asked for, because some servers load a model at the first request
that names it, and list none before. Any other answer, be it an error, is the server's own and
ends the wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx

from lockstep.verify.endpoint import STARTING, Endpoint, EndpointError, NotReady
from lockstep.verify.probe import ProbeRequest

PAUSE = 0.5  # seconds between two attempts

FIRST = {
    True: ProbeRequest(messages=({"role": "user", "content": "Are you there?"},), max_tokens=1),
    False: ProbeRequest(prompt="Are you there?", max_tokens=1),
}


async def wait_until_ready(
    endpoint: Endpoint,
    seconds: float,
    *,
    chat: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Return when the server has answered a request of one token.

    Args:
        seconds: how long to wait; with 0 nothing is asked.
        chat: whether it is asked as a conversation, as the requests to come are.
        say: told once, in one line, that there is something to wait for, and what.

    Raises:
        EndpointError: it was not ready in time, or its model must be named.
    """
    if not seconds:
        return
    seen = told = ""
    try:
        async with asyncio.timeout(seconds):
            while seen := await _missing(endpoint, FIRST[chat]):
                if not told:
                    told = f"waiting up to {seconds:g} s for {endpoint.url}: {seen}"
                    say(told)
                await asyncio.sleep(PAUSE)
    except TimeoutError:
        seen = seen or "no answer to the first request"
        raise EndpointError(
            f"{endpoint.url} is not ready after {seconds:g} s: {seen} (--wait allows longer)"
        ) from None


async def _missing(endpoint: Endpoint, first: ProbeRequest) -> str:
    """Why the server is not ready; "" when it is."""
    try:
        status, _ = await endpoint.send(first)
    except NotReady as error:
        return str(error)
    except TimeoutError:
        return "the first request timed out"
    except httpx.HTTPError as error:
        return type(error).__name__
    except ValueError:
        return ""  # too large a reply: odd, and there
    return f"status {status}" if status in STARTING else ""
