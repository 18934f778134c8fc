"""One deployment as a thing to ask: over HTTP, or a model in this process."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self
from urllib.parse import urlsplit

import httpx

from lockstep.types import Completion, LockstepError, SamplingParams, TokenLogprob
from lockstep.verify.probe import ProbeRequest, Reading, ToolCall, Usage
from lockstep.verify.reply import SHOWN, loads, read, refusal

if TYPE_CHECKING:
    from lockstep.llm import LLM
    from lockstep.text import Tokenizer

__all__ = [
    "Endpoint",
    "EndpointError",
    "LocalEndpoint",
    "NotReady",
    "ProbeRequest",
    "Reading",
    "Source",
    "ToolCall",
    "Usage",
]

MAX_REPLY_BYTES = 64 << 20
CONNECTIONS = 64
SECRET = 6  # characters
TIMEOUT = 120.0
# What servers, and proxies before them, say of a server that is not there yet.
STARTING = frozenset({425, 502, 503, 504})
MALFORMED = (
    httpx.HTTPError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
)
"""Whatever a foreign server nests where, a field of another kind fails as one of these."""


class EndpointError(LockstepError):
    """A deployment that cannot be asked at all: a bad url, no model to name."""


class NotReady(EndpointError):
    """A deployment that cannot be asked yet, and perhaps later."""


class Source(Protocol):
    """Whatever answers probes. `ask` raises nothing: what went wrong is in the reading."""

    @property
    def name(self) -> str:
        """How reports call it."""

    async def ask(self, request: ProbeRequest) -> Reading:
        """What the request gave."""


def api_base(url: str) -> str:
    """The API's base without a slash at its end; a bare host gets OpenAI's `/v1`.

    Raises:
        EndpointError: not an http or https url, or one with a password, which would stand in
            every report and record.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise EndpointError(f"{url!r} is no url: {error}") from None
    if "@" in parts.netloc:
        raise EndpointError(
            f"the url of {parts.netloc.rpartition('@')[2]} holds a user or a password, which "
            "reports would show: put the key in an environment variable instead"
        )
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise EndpointError(f"{url!r} is no url of the form http://HOST:PORT/v1")
    base = url.rstrip("/")
    return base if parts.path.strip("/") else f"{base}/v1"


def bearer(api_key: str) -> dict[str, str]:
    """The header that carries a key; none without one.

    Raises:
        EndpointError: no header can hold it. Libraries would show it in their message.
    """
    if not all("!" <= one <= "~" for one in api_key):
        raise EndpointError(
            "the API key holds a blank, an end of line or a character beyond ASCII, which no "
            "header can carry"
        )
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


class Endpoint:
    """A server that speaks OpenAI's HTTP. Use as `async with Endpoint(url) as endpoint`.

    Retries nothing: a request that failed is a finding.

    Args:
        url: the API's base, e.g. http://localhost:8000/v1.
        model: as requests name it; "" asks the server, which must then serve exactly one.
        api_key: sent as a bearer token, if there is one.
        timeout: seconds that one request may take from sending to the last byte.
        connections: most requests at once; more of them wait, and their wait is in no reading.
        extra: further fields of every body.
        transport: another way to reach the server, for tests.

    Raises:
        EndpointError: the url is none, or the key cannot be sent.
    """

    def __init__(
        self,
        url: str,
        model: str = "",
        api_key: str = "",
        timeout: float = TIMEOUT,
        *,
        connections: int = CONNECTIONS,
        extra: Mapping[str, Any] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = api_base(url)
        self._model = model
        self._key = api_key
        self._timeout = timeout
        self._extra = dict(extra or {})
        self._client = httpx.AsyncClient(
            headers=bearer(api_key),
            timeout=None,  # each request has a deadline of its own
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=connections),
            transport=transport,
        )
        self._slots = asyncio.Semaphore(connections)
        self._asking_model = asyncio.Lock()

    @property
    def name(self) -> str:
        return f"{self._model} at {self.url}" if self._model else self.url

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def model(self) -> str:
        """The name that requests carry; if none was given, asks `/models` once for the only one
        that is served, adapters and branches of it aside.

        Raises:
            NotReady: the server does not answer, or serves no model.
            EndpointError: it answers otherwise, or serves several.
        """
        async with self._asking_model:
            if not self._model:
                self._model = await self._only_model()
            return self._model

    async def _only_model(self) -> str:
        try:
            async with asyncio.timeout(self._timeout):
                reply = await self._client.get(f"{self.url}/models")
            if reply.status_code in STARTING:
                raise NotReady(f"{self.url}/models: status {reply.status_code}")
            reply.raise_for_status()
            # One with a parent is an adapter, or a branch, of another that is served too.
            names = [
                str(one["id"]) for one in loads(reply.content)["data"] if not one.get("parent")
            ]
        except TimeoutError:
            raise NotReady(f"{self.url}/models: timeout") from None
        except httpx.TransportError as error:
            raise NotReady(f"{self.url}/models: {_said(error)}") from None
        except MALFORMED as error:
            raise EndpointError(f"{self.url}/models: {_said(error)}") from None
        if len(names) != 1:
            kind = EndpointError if names else NotReady  # some list a model once it was asked for
            served = ", ".join(names) or "none"
            raise kind(f"{self.url} serves {served}: name one model (--model, or in the rule)")
        return names[0]

    async def ask(self, request: ProbeRequest) -> Reading:
        """What the request gave; nothing is raised for what a server does."""
        reading = await self._ask(request)
        # Some servers repeat what they refuse. What is shorter is no secret, and stands anywhere.
        if len(self._key) >= SECRET and self._key in reading.error:
            return replace(reading, error=reading.error.replace(self._key, "[API key]"))
        return reading

    async def _ask(self, request: ProbeRequest) -> Reading:
        async with self._slots:
            began = time.perf_counter()
            try:
                await self.model()  # not in the answer's time
                began = time.perf_counter()
                status, content = await self.send(request)
            except TimeoutError:
                return Reading(False, error="timeout", seconds=time.perf_counter() - began)
            except EndpointError as error:
                return Reading(False, error=f"unreachable: {error}")
            except httpx.HTTPError as error:
                seconds = time.perf_counter() - began
                return Reading(False, error=f"unreachable: {_said(error)}", seconds=seconds)
            except ValueError as error:  # too large
                return Reading(False, error=f"unreadable: {error}")
            seconds = time.perf_counter() - began
        if status != httpx.codes.OK:
            return refusal(status, content, seconds)
        return read(content, chat=bool(request.messages), seconds=seconds)

    async def send(self, request: ProbeRequest) -> tuple[int, bytes]:
        """As `post`, of a probe.

        Raises:
            EndpointError: as `model`.
        """
        return await self.post(request.path, {**request.body(await self.model()), **self._extra})

    async def post(self, path: str, body: dict[str, object]) -> tuple[int, bytes]:
        """The status and the content of a reply. Waits for no slot: that is the caller's.

        Raises:
            TimeoutError: its last byte was not there in time, however many came before.
            ValueError: it is too large.
            httpx.HTTPError: what httpx says.
        """
        async with (
            asyncio.timeout(self._timeout),
            self._client.stream("POST", self.url + path, json=body) as reply,
        ):
            content = bytearray()
            async for piece in reply.aiter_bytes():
                content += piece
                if len(content) > MAX_REPLY_BYTES:
                    raise ValueError(f"the reply is longer than {MAX_REPLY_BYTES} bytes")
            return reply.status_code, bytes(content)


def _said(error: Exception) -> str:
    return f"{type(error).__name__} {error}".strip()[:SHOWN]


class LocalEndpoint:
    """A model in this process, behind the same interface; requests at once share its steps.

    It gives token ids and exact logprobs. It has no tool parsers and no constraint fields:
    requests with `tools` or `extra` get a reading that says so.
    """

    def __init__(self, llm: LLM, name: str = "") -> None:
        self._llm = llm
        self.name = name or llm.info.model

    async def ask(self, request: ProbeRequest) -> Reading:
        """What the request gave; a request that the model refuses is a reading too."""
        return await asyncio.to_thread(self.ask_now, request)

    def ask_now(self, request: ProbeRequest) -> Reading:
        """As `ask`, for callers without an event loop."""
        if request.tools or request.extra:
            return Reading(False, error="status 400: a local model takes no tools and no extra")
        began = time.perf_counter()
        try:
            params = SamplingParams(
                temperature=request.temperature,
                top_p=1.0 if request.top_p is None else request.top_p,
                seed=request.seed,
                stop=request.stop,
                max_tokens=request.max_tokens,
                logprobs=request.logprobs,
            )
            if request.messages:
                completion = self._llm.chat(request.messages, params, progress=False)
            else:
                completion = self._llm.generate(request.prompt, params, progress=False)
        except LockstepError as error:
            status = 400 if isinstance(error, ValueError) else 500
            seconds = time.perf_counter() - began
            return Reading(False, error=f"status {status}: {error}"[:SHOWN], seconds=seconds)
        fingerprint = self._llm.info.fingerprint
        return reading_of(completion, self._llm.tokenizer, fingerprint, time.perf_counter() - began)


def reading_of(
    completion: Completion, tokenizer: Tokenizer, fingerprint: str, seconds: float
) -> Reading:
    """The first choice of a completion as an endpoint would have given it."""
    ids, entries = completion.token_ids, completion.logprobs
    return Reading(
        True,
        text=completion.text,
        tokens=tuple(map(tokenizer.token_text, ids)),
        logprobs=tuple(entry.logprob for entry in entries),
        top=tuple(_alternatives(entry, tokenizer) for entry in entries),
        finish=completion.finish_reason.value,
        usage=Usage(len(completion.prompt_token_ids), len(ids), completion.cached_tokens),
        fingerprint=fingerprint,
        seconds=seconds,
        token_ids=ids,
    )


def _alternatives(entry: TokenLogprob, tokenizer: Tokenizer) -> tuple[tuple[str, float], ...]:
    return tuple(
        (tokenizer.token_text(token), value) for token, value in entry.top if not math.isnan(value)
    )
