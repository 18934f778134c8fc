"""A model to ask: in this process, or behind HTTP."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

import httpx

from lockstep.types import LockstepError, SamplingParams
from lockstep.verify.endpoint import MALFORMED, Endpoint
from lockstep.verify.probe import ProbeRequest
from lockstep.verify.quality.tasks import Item
from lockstep.verify.reply import SHOWN, loads, number, refusal

if TYPE_CHECKING:
    from lockstep.llm import LLM

ALTERNATIVES = 64  # of a local model: what they leave out is a thousandth or so
HTTP_ALTERNATIVES = 20
AT_ONCE = 8


class SubjectError(LockstepError):
    """A model that does not answer: names it and what it said."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The tokens of a given text, each with what the model expected in its place.

    Attributes:
        tokens: texts or ids. logprobs: of each; None for a first one that nothing precedes.
        tops: alternatives at each position by token.
    """

    tokens: tuple[str | int, ...]
    logprobs: tuple[float | None, ...]
    tops: tuple[Mapping[str | int, float], ...]


@dataclass(frozen=True, slots=True)
class Writing:
    """How answers are written."""

    max_tokens: int
    temperature: float = 0.0
    seed: int = 0


class Subject(Protocol):
    """Whatever can be held against a base model.

    Raises (both methods): SubjectError, when it does not answer.
    """

    @property
    def name(self) -> str:
        """How reports call it."""

    async def score(self, texts: Sequence[tuple[Item, str]]) -> list[Scored]:
        """Each text, scored behind its item's prompt; an item without prompt is no context."""

    async def write(self, items: Sequence[Item], how: Writing) -> list[str]:
        """The answer to each item."""


EMPTY = Item()


class LocalSubject:
    """A model in this process; what is asked together runs together."""

    def __init__(self, llm: LLM, name: str = "") -> None:
        self.llm = llm
        self.name = name or llm.info.model

    async def score(self, texts: Sequence[tuple[Item, str]]) -> list[Scored]:
        """As `Subject.score`."""
        return await asyncio.to_thread(self._score, texts)

    def _score(self, texts: Sequence[tuple[Item, str]]) -> list[Scored]:
        found: list[Any] = [None] * len(texts)
        bare = [index for index, (item, _) in enumerate(texts) if item == EMPTY]
        behind = [index for index, (item, _) in enumerate(texts) if item != EMPTY]
        try:
            if bare:
                given = [texts[index][1] for index in bare]
                scores: Any = self.llm.score(given, alternatives=ALTERNATIVES, progress=False)
                for index, score in zip(bare, scores, strict=True):
                    found[index] = _of_score(score)
            if behind:
                contexts: Any = [
                    [{"role": "user", "content": item.message}] if item.message else item.prompt
                    for item, _ in (texts[index] for index in behind)
                ]
                given = [texts[index][1] for index in behind]
                scores = self.llm.score(
                    given, context=contexts, alternatives=ALTERNATIVES, progress=False
                )
                for index, score in zip(behind, scores, strict=True):
                    found[index] = _of_score(score)
        except LockstepError as error:
            raise SubjectError(f"{self.name}: {error}") from None
        return found

    async def write(self, items: Sequence[Item], how: Writing) -> list[str]:
        """As `Subject.write`."""
        return await asyncio.to_thread(self._write, items, how)

    def _write(self, items: Sequence[Item], how: Writing) -> list[str]:
        params = [
            SamplingParams(
                max_tokens=how.max_tokens, temperature=how.temperature, seed=how.seed + index
            )
            for index in range(len(items))
        ]
        texts = [""] * len(items)
        chats = [index for index, item in enumerate(items) if item.message]
        plain = [index for index, item in enumerate(items) if not item.message]
        try:
            if plain:
                found = self.llm.generate(
                    [items[i].prompt for i in plain], [params[i] for i in plain], progress=False
                )
                for index, completion in zip(plain, found, strict=True):
                    texts[index] = completion.text
            if chats:
                conversations = [[{"role": "user", "content": items[i].message}] for i in chats]
                found = self.llm.chat(conversations, [params[i] for i in chats], progress=False)
                for index, completion in zip(chats, found, strict=True):
                    texts[index] = completion.text
        except LockstepError as error:
            raise SubjectError(f"{self.name}: {error}") from None
        return texts


def _of_score(score: Any) -> Scored:
    return Scored(
        score.token_ids,
        score.logprobs,
        tuple({} if entry is None else dict(entry.top) for entry in score.entries),
    )


class HTTPSubject:
    """A server that speaks OpenAI's HTTP and scores prompts on `/completions` (`echo`).

    Use as `async with HTTPSubject(url) as subject`. Texts are scored behind prompts only, not
    behind messages: a server's template cannot be seen.

    Attributes:
        endpoint: by which it is asked.
    """

    def __init__(
        self,
        url: str,
        model: str = "",
        api_key: str = "",
        timeout: float = 600.0,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.endpoint = Endpoint(
            url, model, api_key, timeout, connections=AT_ONCE, transport=transport
        )
        self._slots = asyncio.Semaphore(AT_ONCE)

    @property
    def name(self) -> str:
        return self.endpoint.name

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.endpoint.close()

    async def score(self, texts: Sequence[tuple[Item, str]]) -> list[Scored]:
        """As `Subject.score`."""
        return list(await asyncio.gather(*(self._one(item, text) for item, text in texts)))

    async def _one(self, item: Item, text: str) -> Scored:
        if item.message:
            raise SubjectError(
                f"{self.name}: options behind a message cannot be scored over HTTP; use prompts"
            )
        body = {
            "model": await self.endpoint.model(),
            "prompt": item.prompt + text,
            "max_tokens": 1,
            "temperature": 0.0,
            "echo": True,
            "logprobs": HTTP_ALTERNATIVES,
        }
        async with self._slots:
            try:
                status, content = await self.endpoint.post("/completions", body)
                if status != httpx.codes.OK:
                    raise ValueError(refusal(status, content, 0.0).error)
                return _of_echo(loads(content), len(item.prompt), len(item.prompt + text))
            except (TimeoutError, *MALFORMED) as error:
                said = str(error) or type(error).__name__
                raise SubjectError(f"{self.name} does not score prompts: {said[:SHOWN]}") from None

    async def write(self, items: Sequence[Item], how: Writing) -> list[str]:
        """As `Subject.write`."""
        readings = await asyncio.gather(
            *(
                self.endpoint.ask(
                    ProbeRequest(
                        messages=(
                            ({"role": "user", "content": item.message},) if item.message else ()
                        ),
                        prompt=item.prompt,
                        max_tokens=how.max_tokens,
                        temperature=how.temperature,
                        seed=how.seed + index,
                    )
                )
                for index, item in enumerate(items)
            )
        )
        for reading in readings:
            if not reading.ok:
                raise SubjectError(f"{self.name}: {reading.error}")
        return [reading.text for reading in readings]


def _of_echo(body: Any, start: int, end: int) -> Scored:
    """The tokens that lie in [start, end) of the echoed text."""
    reported = body["choices"][0]["logprobs"]
    tops = reported["top_logprobs"] or [{}] * len(reported["tokens"])
    rows = zip(
        reported["tokens"], reported["token_logprobs"], tops, reported["text_offset"], strict=True
    )
    inside = [
        (
            str(token),
            None if value is None else number(value),
            {str(other): number(one) for other, one in (top or {}).items()},
        )
        for token, value, top, offset in rows
        if start <= offset < end
    ]
    if not inside or any(p is not None and not math.isfinite(p) for _, p, _ in inside):
        raise ValueError("no finite logprobs of the prompt")
    tokens, logprobs, alternatives = zip(*inside, strict=True)
    return Scored(tokens, logprobs, alternatives)
