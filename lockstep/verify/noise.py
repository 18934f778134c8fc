"""How far a deployment differs from itself: the floor below which no difference means anything.

One set of greedy requests is asked under several conditions: alone and all at once, with the
prompt unknown to the server's prefix cache and known to it, and beside long prefills that other
clients send. Every answer is held against the same request asked alone. A server whose answers
depend on their company shows it here; one that keeps Lockstep's promise shows exactly nothing.

The prompts begin with a text that is new in every run, so that the first asking of each is cold
whatever was asked before the run. Half of the requests meet the server first alone and half
first in a crowd, so that both are seen cold.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.types import RequestError
from lockstep.verify.canonical import digest
from lockstep.verify.difference import Parting, gaps, parting
from lockstep.verify.endpoint import ProbeRequest, Reading, Source
from lockstep.verify.rule import Item

QUESTIONS = (
    "Why is the sky blue?",
    "Write a short poem about a lighthouse.",
    "List three uses of a paper clip.",
    "What is 17 times 23? Show your steps.",
    "Explain photosynthesis to a child.",
    "Write a Python function that reverses a list.",
    "Name the planets in order from the Sun.",
    "Give one argument for and one against working from home.",
    "Translate 'good morning, my friend' into French.",
    "What causes the tides?",
    "Summarise the story of Cinderella in two sentences.",
    "Is a tomato a fruit or a vegetable? Answer, then explain.",
    "Describe the taste of coffee to someone who has never had it.",
    "Which is heavier, a kilogram of iron or a kilogram of feathers?",
    "Write the first line of a detective novel.",
    "How do I boil an egg?",
    "What is the difference between weather and climate?",
    "Give me a JSON object with the keys name and age.",
    "Why do cats purr?",
    "Suggest a name for a bakery and say why.",
    "What happens when ice melts?",
    "Write a polite refusal of an invitation.",
    "How many letters are in the word 'strawberry'?",
    "What did the Romans use aqueducts for?",
)
WORDS = (
    "river",
    "stone",
    "under",
    "bright",
    "seven",
    "often",
    "letter",
    "garden",
    "window",
    "salt",
)
REFUSED_PAUSE = 0.2  # seconds before the next long prompt when one was refused


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked and how; its hash goes on record before the first request.

    Attributes:
        items: greedy requests, or such with a seed.
        repeats: how often each condition is run.
        concurrency: requests at once in a crowd.
        prefills: clients that send one long prompt after another beside the crowd.
        prefill_words: words of each of these prompts; about as many tokens.
        seed: of orders, and of the words of long prompts.
        fresh: whether the items' prompts begin with a text that no server has seen.

    Raises:
        RequestError: fewer than two requests, or one that draws without a seed: it differs from
            itself by design.
    """

    items: tuple[Item, ...]
    repeats: int = 3
    concurrency: int = 16
    prefills: int = 2
    prefill_words: int = 800
    seed: int = 0
    fresh: bool = True

    def __post_init__(self) -> None:
        if len(self.items) < 2:
            raise RequestError("noise needs two requests at least", field="requests")
        for item in self.items:
            if item.request.temperature > 0 and item.request.seed is None:
                raise RequestError(
                    f"request {item.id} draws at temperature {item.request.temperature:g} without "
                    "a seed: it differs from itself by design",
                    field="seed",
                )

    @property
    def hash(self) -> str:
        """SHA-256 of everything above, in hexadecimal."""
        return digest(
            {
                "requests": [[item.id, item.request.canonical()] for item in self.items],
                "repeats": self.repeats,
                "concurrency": self.concurrency,
                "prefills": self.prefills,
                "prefill_words": self.prefill_words,
                "seed": self.seed,
            }
        )


def questions(
    nonce: str, *, count: int = len(QUESTIONS), max_tokens: int = 48, chat: bool = True
) -> tuple[Item, ...]:
    """The built-in requests, each made new by a text in front of it; behind the last the first."""
    found = []
    for index in range(count):
        text = f"[{nonce}-{index}] {QUESTIONS[index % len(QUESTIONS)]}"
        prompt: dict[str, Any] = (
            {"messages": ({"role": "user", "content": text},)} if chat else {"prompt": text}
        )
        request = ProbeRequest(**prompt, max_tokens=max_tokens, logprobs=1)
        found.append(Item(str(index + 1), request))
    return tuple(found)


@dataclass(slots=True)
class Condition:
    """What one condition showed; lists are by request, in the plan's order.

    Attributes:
        name: for people.
        answers: readings that could be compared with the request alone.
        partings: the earliest place where a request's answer parted; None where none did.
        moved: the largest difference of a logprob, nats; None where none was reported.
        asked: requests that were asked under it.
        failures: how often each error came.
        cached: prompt tokens that the server says it took from its cache; None if it says nothing.
        prefills: answered and refused long prompts beside it.
    """

    name: str
    partings: list[Parting | None]
    moved: list[float | None]
    asked: set[int] = field(default_factory=set)
    answers: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    cached: int | None = None
    prefills: tuple[int, int] = (0, 0)

    @property
    def differ(self) -> list[int]:
        """Places of the requests that answered otherwise than alone."""
        return [place for place, seen in enumerate(self.partings) if seen is not None]

    @property
    def shifted(self) -> list[int]:
        """Places of the requests with a logprob that moved, whether or not the text did."""
        return [place for place, value in enumerate(self.moved) if value]

    def add(self, place: int, alone: Reading, found: Reading) -> None:
        """Hold one answer against the request alone."""
        self.asked.add(place)
        if not found.ok:
            self.failures[found.error] += 1
            return
        if not alone.ok:
            return
        self.answers += 1
        if found.usage is not None and found.usage.cached_tokens is not None:
            self.cached = (self.cached or 0) + found.usage.cached_tokens
        seen, before = parting(alone, found), self.partings[place]
        if seen is not None and (before is None or seen.position < before.position):
            self.partings[place] = seen
        gap = gaps(alone, found)
        if gap is not None:
            self.moved[place] = max(gap.logprob, self.moved[place] or 0.0)


@dataclass(frozen=True, slots=True)
class Noise:
    """What a run found.

    Attributes:
        alone: the answers that all others are held against.
        conditions: in the order in which they were run.
    """

    plan: Plan
    alone: tuple[Reading, ...]
    conditions: tuple[Condition, ...]

    @property
    def differ(self) -> int:
        """Requests that differ from themselves alone, in a text or a logprob, in any condition."""
        return len({p for one in self.conditions for p in (*one.differ, *one.shifted)})

    @property
    def unread(self) -> int:
        """Answers that failed, those alone among them."""
        failed = sum(not reading.ok for reading in self.alone)
        return failed + sum(one.failures.total() for one in self.conditions)

    @property
    def verdict(self) -> str:
        """ "zero", "noisy", or "unreadable" where failures leave it open."""
        if self.differ:
            return "noisy"
        return "unreadable" if self.unread else "zero"


async def measure(
    plan: Plan, source: Source, progress: Callable[[int, int], None] = lambda done, of: None
) -> Noise:
    """Run every condition.

    Args:
        progress: called with how many answers there are of how many.
    """
    return await _Run(plan, source, progress).all()


async def without_unknown(plan: Plan, source: Source) -> Plan:
    """The plan without logprobs where the server refuses them; one or two requests."""
    first = replace(plan.items[0].request, max_tokens=1)
    bare = replace(first, logprobs=None)
    if first.logprobs is None or (await source.ask(first)).ok or not (await source.ask(bare)).ok:
        return plan
    items = (Item(i.id, replace(i.request, logprobs=None), i.expect) for i in plan.items)
    return replace(plan, items=tuple(items))


Way = Callable[[Sequence[int]], Awaitable[list[tuple[int, Reading]]]]


class _Run:
    def __init__(self, plan: Plan, source: Source, progress: Callable[[int, int], None]) -> None:
        self._plan = plan
        self._source = source
        self._progress = progress
        self._done = 0
        self._order = random.Random(plan.seed)
        self._alone: dict[int, Reading] = {}

    async def all(self) -> Noise:
        places = list(range(len(self._plan.items)))
        lonely, crowded = places[::2], places[1::2]
        for place in lonely:
            self._alone[place] = await self._ask(place)
        first = await self._together(crowded)
        for place in crowded:
            self._alone[place] = await self._ask(place)
        conditions = [
            self._condition("together, cold", first),
            await self._repeated("alone, warm", places, self._one_by_one),
            await self._repeated("together, warm", places, self._together),
        ]
        if self._plan.prefills:
            conditions.append(await self._beside_prefills(places))
        alone = tuple(self._alone[place] for place in places)
        return Noise(self._plan, alone, tuple(conditions))

    async def _repeated(self, name: str, places: Sequence[int], way: Way) -> Condition:
        found = self._condition(name, ())
        for _ in range(self._plan.repeats):
            for place, reading in await way(places):
                found.add(place, self._alone[place], reading)
        return found

    def _condition(self, name: str, answers: Sequence[tuple[int, Reading]]) -> Condition:
        count = len(self._plan.items)
        found = Condition(name, [None] * count, [None] * count)
        for place, reading in answers:
            found.add(place, self._alone[place], reading)
        return found

    async def _one_by_one(self, places: Sequence[int]) -> list[tuple[int, Reading]]:
        shuffled = self._order.sample(places, len(places))
        return [(place, await self._ask(place)) for place in shuffled]

    async def _together(self, places: Sequence[int]) -> list[tuple[int, Reading]]:
        slots = asyncio.Semaphore(self._plan.concurrency)

        async def one(place: int) -> tuple[int, Reading]:
            async with slots:
                return place, await self._ask(place)

        return await asyncio.gather(*map(one, self._order.sample(places, len(places))))

    async def _beside_prefills(self, places: Sequence[int]) -> Condition:
        answered = Counter[bool]()

        async def client(words: random.Random) -> None:
            while True:
                ok = (await self._source.ask(self._long(words))).ok
                answered[ok] += 1
                if not ok:
                    await asyncio.sleep(REFUSED_PAUSE)

        seeds = [self._order.random() for _ in range(self._plan.prefills)]
        clients = [asyncio.create_task(client(random.Random(seed))) for seed in seeds]
        try:
            name = "together, beside long prefills"
            found = await self._repeated(name, places, self._together)
        finally:
            for task in clients:
                task.cancel()
            ends = await asyncio.gather(*clients, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end
        found.prefills = (answered[True], answered[False])
        return found

    def _long(self, words: random.Random) -> ProbeRequest:
        text = " ".join(words.choices(WORDS, k=self._plan.prefill_words))
        if self._plan.items[0].request.messages:
            return ProbeRequest(messages=({"role": "user", "content": text},), max_tokens=1)
        return ProbeRequest(prompt=text, max_tokens=1)

    async def _ask(self, place: int) -> Reading:
        reading = await self._source.ask(self._plan.items[place].request)
        self._done += 1
        count, repeats = len(self._plan.items), self._plan.repeats
        crowds = 2 if self._plan.prefills == 0 else 3
        self._progress(self._done, count + count // 2 + count * repeats * crowds)
        return reading
