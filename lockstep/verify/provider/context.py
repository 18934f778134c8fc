"""How much of a long prompt is read: a fact at its far end, and what the answer owes to it.

A small model may have read the fact and not found it. So what is tested is whether the fact has
any effect: two prompts that differ in nothing but one word at their beginning are asked, and the
distributions of the next token compared. Where the beginning is cut off the prompts are equal, and
so are the answers, up to noise. Null hypothesis at a length: the distance between the two
prompts' answers and that between two answers to one of them are exchangeable; with `FACTS` pairs
of words, all of which the first must win, it is rejected wrongly with a chance of 2^-FACTS.
An answer that names the word has read it, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from lockstep.verify.drift.measure import first_logprobs, logprob_distance
from lockstep.verify.endpoint import ProbeRequest, Reading, Source
from lockstep.verify.provider.findings import Finding, passing
from lockstep.verify.report import Section
from lockstep.verify.verdict import Verdict

FACTS = (
    ("maple", "tulip"),
    ("copper", "velvet"),
    ("falcon", "otter"),
    ("amber", "ivory"),
    ("lemon", "walnut"),
)
CLEAR = 2.0  # times the noise: a smaller effect is none
SHORTEST, LONGEST = 64, 4096  # words
_FILLER = (
    "The ferry left at nine and the harbour was quiet.",
    "Somebody had painted the bench green again.",
    "A letter lay on the table, and nobody opened it.",
    "The baker counted the loaves twice before noon.",
    "It rained a little, then the street was dry.",
)


class Seen(StrEnum):
    """What became of the fact at a length."""

    SEEN = "seen"  # it has an effect
    CUT = "cut off"  # it has none
    REFUSED = "refused"  # an error says that the prompt is too long, or says nothing better
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True)
class Length:
    """One side at one length.

    Attributes:
        words: of filler. tokens: of the prompt as reported, 0 if not.
        recalled: answers that name the word, of `2 * len(FACTS)`.
        error: of the first answer that could not be read.
    """

    words: int
    tokens: int
    seen: Seen
    recalled: int
    error: str


def lengths(longest: int) -> Iterator[int]:
    """Words of filler: doubling, up to `longest`, which is the last one."""
    words = min(SHORTEST, longest)
    while words < longest:
        yield words
        words *= 2
    yield longest


def prompt(word: str, words: int) -> str:
    """A text that begins with the fact and ends with the question."""
    filler: list[str] = []
    index = 0
    while len(filler) < words:
        filler += _FILLER[index % len(_FILLER)].split()
        index += 1
    middle = " ".join(filler[:words])
    return f"The code word is {word}. Remember it.\n\n{middle}\n\nWhat was the code word?"


async def look(source: Source, words: int) -> Length:
    """One length of one side."""
    effects, noises, recalled, tokens = [], [], 0, 0
    for pair in FACTS:
        first, other, again = [
            await source.ask(_request(prompt(word, words))) for word in (*pair, pair[0])
        ]
        for reading in (first, other, again):
            if not reading.ok:
                seen = Seen.UNCLEAR if passing(reading) else Seen.REFUSED
                return Length(words, 0, seen, 0, reading.error)
        tokens = first.usage.prompt_tokens if first.usage is not None else 0
        recalled += sum(
            word in reading.text.lower() for word, reading in zip(pair, (first, other), strict=True)
        )
        effects.append(_distance(first, other))
        noises.append(_distance(first, again))
    if recalled or all(e > n for e, n in zip(effects, noises, strict=True)):
        seen = Seen.SEEN
    elif sum(effects) <= CLEAR * sum(noises):
        seen = Seen.CUT
    else:
        seen = Seen.UNCLEAR
    return Length(words, tokens, seen, recalled, "")


def _request(text: str) -> ProbeRequest:
    message = {"role": "user", "content": text}
    return ProbeRequest(messages=(message,), max_tokens=8, logprobs=20, seed=0)


def _distance(one: Reading, other: Reading) -> float:
    """Between the first tokens' distributions, or between the texts where there are none."""
    left, right = first_logprobs(one), first_logprobs(other)
    if left and right:
        return logprob_distance(left, right)
    return float(one.text != other.text)


async def compare_contexts(
    a: Source, b: Source, longest: int = LONGEST
) -> tuple[list[Length], list[Length]]:
    """Both sides at every length, until neither reads the beginning any more."""
    found: tuple[list[Length], list[Length]] = ([], [])
    for words in lengths(longest):
        pair = await asyncio.gather(look(a, words), look(b, words))
        for side, length in zip(found, pair, strict=True):
            side.append(length)
        if all(length.seen in (Seen.CUT, Seen.REFUSED) for length in pair):
            break
    return found


def judge(found: tuple[Sequence[Length], Sequence[Length]]) -> Finding:
    """Fail where one side cuts off or refuses what the other one reads."""
    name = "context length"
    a, b = found
    worse = [
        (side, own)
        for mine, other in zip(a, b, strict=True)
        for side, own, theirs in (("A", mine, other), ("B", other, mine))
        if own.seen in (Seen.CUT, Seen.REFUSED) and theirs.seen is Seen.SEEN
    ]
    cut = [
        f"{side} drops the beginning of {length.words} words in silence"
        for side, sides in (("A", a), ("B", b))
        for length in sides
        if length.seen is Seen.CUT
    ]
    longest = a[-1].words
    if worse:
        side, length = worse[0]
        verdict = Verdict.FAIL
        reason = f"{side}: {length.seen} at {length.words} words, which the other side reads"
    elif cut:
        verdict, reason = Verdict.FAIL, cut[0]
    elif any(one.seen is Seen.UNCLEAR for one in (*a, *b)):
        verdict, reason = Verdict.UNDECIDABLE, "the fact's effect drowns in noise at some lengths"
        errors = [one.error for one in (*a, *b) if one.seen is Seen.UNCLEAR and one.error]
        if errors:
            reason = f"some lengths could not be read: {errors[0]}"
    elif a[0].seen is not Seen.SEEN:
        verdict, reason = Verdict.UNDECIDABLE, f"no length could be read: {a[0].error}"
    else:
        both = [one.words for one, other in zip(a, b, strict=True) if one.seen is Seen.SEEN]
        verdict = Verdict.PASS
        reason = f"both read a fact before {max(both)} words, of {longest} asked"
    rows = [
        [mine.words, *(cell for one in (mine, other) for cell in _cells(one))]
        for mine, other in zip(a, b, strict=True)
    ]
    text = [
        reason,
        "A fact stands at the beginning, filler follows, a question ends the prompt. Seen: another "
        "fact changes the answer. Cut off: the answer is the same whatever the fact was. Recalled "
        "counts answers that name it, which small models may fail to do though they read it.",
    ]
    head = ["words", "A", "tokens", "recalled", "B", "tokens", "recalled"]
    figures = {
        side: [{"words": one.words, "seen": one.seen.value, "tokens": one.tokens} for one in own]
        for side, own in (("a", a), ("b", b))
    }
    return Finding(name, verdict, reason, Section(name, text, head, rows), figures)


def _cells(length: Length) -> list[object]:
    shown = length.seen.value
    if length.error:
        shown += f": {length.error[:60]}"
    return [shown, length.tokens or "", f"{length.recalled} of {2 * len(FACTS)}"]
