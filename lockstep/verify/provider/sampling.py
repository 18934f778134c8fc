"""Does an endpoint sample as it is asked to, and as its own logprobs say?

Tests of each side alone. The draws at temperature 1 of one first token are held against the
logprobs that the same side reports: null hypothesis, they are independent draws from that
distribution (all that is not among the alternatives is one class); the p-value of the likelihood
ratio (Wilks, 1938) comes from `SIMULATED` simulated samples, so it needs no large counts. A hidden
top-k, top-p, temperature or penalty shows there.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lockstep.verify.drift.measure import answer_of, first_logprobs
from lockstep.verify.endpoint import ProbeRequest, Reading, Source
from lockstep.verify.provider.findings import Finding
from lockstep.verify.report import Section
from lockstep.verify.verdict import Verdict

DRAWS = 200
AT_ONCE = 8
SIMULATED = 20_000
QUESTION = "Pick any letter of the alphabet at random. Answer with the letter only."
TALK = "Tell me about the sea in a few sentences."


@dataclass(frozen=True, slots=True)
class Rule:
    """One property: `kept` is None where it could not be seen."""

    name: str
    kept: bool | None
    detail: str


@dataclass(frozen=True, slots=True)
class Sampled:
    """What one side did.

    Attributes:
        p_value: of the draws against the reported logprobs; None where none are reported.
        table: (token, drawn, expected) of the most probable tokens.
    """

    rules: tuple[Rule, ...]
    p_value: float | None
    table: tuple[tuple[str, int, float], ...]


def _ask(text: str, max_tokens: int) -> ProbeRequest:
    return ProbeRequest(messages=({"role": "user", "content": text},), max_tokens=max_tokens)


async def sample(source: Source, draws: int = DRAWS) -> Sampled:
    """Ask everything of one side."""
    rules = await _rules(source)
    question = _ask(QUESTION, 1)
    reported = await source.ask(replace(question, logprobs=20))
    logprobs = first_logprobs(reported)
    drawn = await _all(
        source, [replace(question, temperature=1.0, seed=seed) for seed in range(draws)]
    )
    counts = Counter(answer_of(reading) for reading in drawn if reading.ok)
    if not logprobs or not counts:
        return Sampled(rules, None, ())
    p_value = goodness_of_fit(counts, logprobs)
    total = sum(counts.values())
    ranked = sorted(logprobs, key=lambda token: -logprobs[token])[:8]
    table = tuple(
        (token, _count(counts, token), total * float(np.exp(logprobs[token]))) for token in ranked
    )
    return Sampled(rules, p_value, table)


async def _all(source: Source, requests: Sequence[ProbeRequest]) -> list[Reading]:
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(request: ProbeRequest) -> Reading:
        async with slots:
            return await source.ask(request)

    return list(await asyncio.gather(*map(one, requests)))


def _count(counts: Mapping[str, int], token: str) -> int:
    """Draws of a token. Whole answers are trimmed by some servers."""
    return counts.get(token, 0) or counts.get(token.strip(), 0)


def goodness_of_fit(
    counts: Mapping[str, int], logprobs: Mapping[str, float], seed: int = 0
) -> float:
    """The p-value of draws against a distribution; what it does not name is one class.

    Tokens that read alike once blanks are trimmed are one class too: a server that trims
    answers cannot be told apart by them.
    """
    expected: dict[str, float] = {}
    for token, value in logprobs.items():
        expected[token.strip()] = expected.get(token.strip(), 0.0) + float(np.exp(value))
    observed = dict.fromkeys(expected, 0)
    rest = 0
    for text, count in counts.items():
        if text.strip() in observed:
            observed[text.strip()] += count
        else:
            rest += count
    shares = np.array([*expected.values(), max(1e-9, 1.0 - sum(expected.values()))])
    shares /= shares.sum()
    total = sum(counts.values())
    means = total * shares
    found = np.array([*observed.values(), rest])

    def statistic(draws: NDArray[np.int64]) -> NDArray[np.float64]:
        # Draws of 0 count for nothing, those of what has no probability for nearly everything.
        ratios = np.log(np.maximum(draws, 1) / np.maximum(means, 1e-300))
        return np.asarray((draws * ratios).sum(axis=-1))

    simulated = np.random.default_rng(seed).multinomial(total, shares, size=SIMULATED)
    larger = int((statistic(simulated) >= statistic(found) - 1e-9).sum())
    return (1 + larger) / (SIMULATED + 1)


async def _rules(source: Source) -> tuple[Rule, ...]:
    talk = _ask(TALK, 24)
    free = replace(talk, temperature=1.0)
    greedy, again, narrow, seeded, same, other, short, stopped = await _all(
        source,
        [
            talk,
            talk,
            replace(free, top_p=1e-6, seed=1),
            replace(free, seed=1),
            replace(free, seed=1),
            replace(free, seed=2),
            replace(talk, max_tokens=3),
            replace(talk, stop=(" ",)),
        ],
    )
    return (
        _equal("temperature 0 repeats", greedy, again),
        _equal("a tiny top_p is temperature 0", greedy, narrow),
        _equal("a seed repeats", seeded, same),
        _other("another seed is another answer", seeded, other),
        _length("max_tokens is kept", short, 3),
        _stop("stop is kept", stopped),
    )


def _equal(name: str, one: Reading, other: Reading) -> Rule:
    if not (one.ok and other.ok):
        return Rule(name, None, one.error or other.error)
    return Rule(name, one.text == other.text, "" if one.text == other.text else "answers differ")


def _other(name: str, one: Reading, other: Reading) -> Rule:
    rule = _equal(name, one, other)
    if rule.kept is None:
        return rule
    return Rule(name, not rule.kept, "the same answer" if rule.kept else "")


def _length(name: str, reading: Reading, most: int) -> Rule:
    if not reading.ok or reading.usage is None:
        return Rule(name, None, reading.error or "no usage reported")
    count = reading.usage.completion_tokens
    return Rule(name, count <= most, f"{count} tokens")


def _stop(name: str, reading: Reading) -> Rule:
    if not reading.ok:
        return Rule(name, None, reading.error)
    return Rule(name, " " not in reading.text, f"{reading.text[:30]!r}")


def judge(side: str, found: Sampled, alpha: float) -> Finding:
    """Fail where draws do not follow the logprobs, or a rule that binds every server is broken.

    That answers repeat is reported and not required: most servers do not promise it.
    """
    name = f"sampling of {side}"
    required = ("max_tokens is kept", "stop is kept")
    broken = [rule.name for rule in found.rules if rule.kept is False and rule.name in required]
    if found.p_value is not None and found.p_value <= alpha:
        verdict = Verdict.FAIL
        reason = f"draws do not follow the reported logprobs (p = {found.p_value:.2g})"
    elif broken:
        verdict, reason = Verdict.FAIL, f"not so: {', '.join(broken)}"
    elif found.p_value is None:
        verdict = Verdict.UNDECIDABLE
        reason = "no logprobs are reported to hold the draws against"
    else:
        verdict = Verdict.PASS
        reason = f"draws follow the reported logprobs (p = {found.p_value:.2g})"
    words = {True: "yes", False: "no", None: "not seen"}
    rows: list[list[object]] = [[rule.name, words[rule.kept], rule.detail] for rule in found.rules]
    rows += [
        [f"{token!r} drawn at temperature 1", drawn, f"{expected:.1f} expected"]
        for token, drawn, expected in found.table
    ]
    figures = {
        "p_value": found.p_value,
        "rules": {rule.name: rule.kept for rule in found.rules},
    }
    return Finding(name, verdict, reason, Section(name, [reason], (), rows), figures)
