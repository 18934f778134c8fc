"""What is measured in the answers of a round, each number as a distance from a reference.

Every statistic grows with the distance, so that only large values speak for a change. A statistic
that a round cannot give (no readable answer, no logprobs reported) is left out of it: what
what could not be read says nothing about a change. So is one of which a single answer is missing:
the sum or the mean of the others is another statistic, which the baseline's rounds do not have.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from lockstep.verify.drift.probes import Kind, Probe
from lockstep.verify.probe import Reading
from lockstep.verify.scoring import is_json_object

MOST = 20.0  # nats; larger differences of a logprob count as this
ROUNDING = 1e-9  # nats; what printing a logprob may move it by
PROBE = "probe/"

LARGEST, MEAN, ANSWERS = "logprobs/largest", "logprobs/mean", "answers"
TOOLS, OBJECTS, ORDER = "tool-calls", "json", "top-token"
LENGTH, REFUSAL, REPETITION = "length", "refusal", "repetition"
STREAMS = {
    LARGEST: "largest distance of a first token's logprobs",
    MEAN: "mean distance of first tokens' logprobs",
    ANSWERS: "answers that differ from the reference",
    TOOLS: "function calls that are missing or do not parse",
    OBJECTS: "answers that are no JSON object though one was asked for",
    ORDER: "positions whose token is not the most probable one reported",
    LENGTH: "mean log ratio of answer lengths",
    REFUSAL: "difference of the number of refusals",
    REPETITION: "mean difference of repetition",
}
_GATHER: dict[str, Callable[[Sequence[float]], float]] = {  # of a round's values; else the sum
    LARGEST: max,
    MEAN: fmean,
    LENGTH: fmean,
    REPETITION: fmean,
}
_KINDS: dict[Kind, tuple[str, ...]] = {  # to which an answer adds, beside its own distance
    Kind.TOKEN: (ORDER,),
    Kind.TOOL: (TOOLS,),
    Kind.JSON: (OBJECTS,),
    Kind.TEXT: (ORDER, LENGTH, REFUSAL, REPETITION),
}
_REFUSES = re.compile(
    r"\b(i'?m sorry|i am sorry|i can(no|')t (help|assist|provide|do)|i won'?t|"
    r"as an ai|(unable|not able) to (help|assist|provide))\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Reference:
    """What a probe gave on a good day.

    Attributes:
        logprobs: mean logprob of each alternative at the first position; empty where none
            were reported.
        answer: the most frequent answer, calls included.
        length: median characters of it. refusals: share of answers that refuse.
        repetition: mean of `repetition_of`.
    """

    logprobs: Mapping[str, float]
    answer: str
    length: float
    refusals: float
    repetition: float

    @classmethod
    def of(cls, readings: Sequence[Reading]) -> Reference:
        """The reference of a probe's readable answers, at least one."""
        values: dict[str, list[float]] = {}
        for reading in readings:
            for token, value in first_logprobs(reading).items():
                values.setdefault(token, []).append(value)
        answers = [answer_of(reading) for reading in readings]
        return cls(
            logprobs={token: fmean(found) for token, found in values.items()},
            answer=Counter(answers).most_common(1)[0][0],
            length=median(map(len, answers)),
            refusals=fmean(refuses(reading.text) for reading in readings),
            repetition=fmean(repetition_of(reading.text) for reading in readings),
        )

    def to_json(self) -> dict[str, Any]:
        """For the baseline file."""
        return {
            "logprobs": dict(self.logprobs),
            "answer": self.answer,
            "length": self.length,
            "refusals": self.refusals,
            "repetition": self.repetition,
        }


def first_logprobs(reading: Reading) -> dict[str, float]:
    """The first position's alternatives, the chosen token among them."""
    found = dict(reading.top[0]) if reading.top else {}
    if reading.tokens and reading.logprobs:
        found.setdefault(reading.tokens[0], reading.logprobs[0])
    return found


def logprob_distance(found: Mapping[str, float], expected: Mapping[str, float]) -> float:
    """Mean absolute difference over the tokens that either names.

    A token that one side does not report counts there as its least reported one: that is the
    most that it can have had.
    """
    floors = [min(side.values()) for side in (found, expected)]
    differences = [
        _gap(found.get(token, floors[0]), expected.get(token, floors[1]))
        for token in {**found, **expected}
    ]
    distance = fmean(differences)
    return 0.0 if distance <= ROUNDING else distance


def _gap(one: float, other: float) -> float:
    # Tokens that are ruled out may be reported with minus infinity, by both sides.
    return 0.0 if one == other else min(MOST, abs(one - other))


def answer_of(reading: Reading) -> str:
    """The whole answer as one text, calls included."""
    calls = [f"\n{call.name} {call.arguments}" for call in reading.tool_calls]
    return "".join([reading.text, *calls])


def differing(text: str, expected: str) -> float:
    """Which share of the longer text stands behind the first difference; 0 for equal texts."""
    if text == expected:
        return 0.0
    pairs = zip(text, expected, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(text), len(expected)))
    return 1.0 - same / max(len(text), len(expected))


def refuses(text: str) -> bool:
    """Whether an answer looks like a refusal; counts, not single answers, are compared."""
    return _REFUSES.search(text.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")) is not None


def repetition_of(text: str) -> float:
    """Share of four-word runs that occurred before in the text; 0 for short ones."""
    words = text.split()
    runs = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return 1.0 - len(set(runs)) / len(runs) if runs else 0.0


def misordered(reading: Reading) -> int | None:
    """Positions of a greedy answer whose token is not the most probable of those reported.

    Whatever noise moves the logits, greedy decoding takes the largest of what it has; equal
    values are no violation. None where no alternatives are reported.
    """
    positions = zip(reading.logprobs, reading.top, strict=False)
    best = [(value, max(p for _, p in top)) for value, top in positions if top]
    return sum(value < most - ROUNDING for value, most in best) if best else None


def calls_are_valid(reading: Reading, probe: Probe) -> bool:
    """Whether there are calls, all of declared functions and with arguments that parse."""
    declared = {tool["function"]["name"] for tool in probe.request.tools}
    calls = reading.tool_calls
    return bool(calls) and all(call.parses and call.name in declared for call in calls)


def distance(reading: Reading, probe: Probe, reference: Reference) -> float | None:
    """How far an answer is from the probe's reference; 0 only if nothing differs."""
    if probe.kind is not Kind.TOKEN or not reference.logprobs:
        return differing(answer_of(reading), reference.answer)
    found = first_logprobs(reading)
    return logprob_distance(found, reference.logprobs) if found else None


def statistics_of(
    probes: Sequence[Probe], readings: Mapping[str, Reading], references: Mapping[str, Reference]
) -> dict[str, float]:
    """The statistics of a round that it can give.

    Args:
        readings: by probe, the readable ones only.
    """
    found: dict[str, float] = {}
    gathered: dict[str, list[float]] = {name: [] for name in STREAMS}
    missing: set[str] = set()
    for probe in probes:
        if probe.name not in references:
            continue
        reference = references[probe.name]
        kind = LARGEST if probe.kind is Kind.TOKEN and reference.logprobs else ANSWERS
        reading = readings.get(probe.name)
        if reading is None:
            missing |= {kind, *_KINDS[probe.kind]}
            continue
        own = distance(reading, probe, reference)
        if own is None:
            missing.add(kind)
        else:
            found[PROBE + probe.name] = own
            gathered[kind].append(own if kind is LARGEST else float(own > 0))
        wrong = misordered(reading)
        if wrong is not None:
            gathered[ORDER].append(wrong)
        _gather(gathered, probe, reading, reference)
    gathered[MEAN] = gathered[LARGEST]
    if LARGEST in missing:
        missing.add(MEAN)
    for name, values in gathered.items():
        if values and name not in missing:
            found[name] = float(_GATHER.get(name, sum)(values))
    if REFUSAL in found:
        found[REFUSAL] = abs(found[REFUSAL])
    return found


def _gather(
    gathered: dict[str, list[float]], probe: Probe, reading: Reading, reference: Reference
) -> None:
    """What only some kinds of probes give."""
    match probe.kind:
        case Kind.TOOL:
            gathered[TOOLS].append(not calls_are_valid(reading, probe))
        case Kind.JSON:
            gathered[OBJECTS].append(not is_json_object(reading.text))
        case Kind.TEXT:
            length = len(answer_of(reading))
            gathered[LENGTH].append(abs(math.log((length + 1) / (reference.length + 1))))
            gathered[REFUSAL].append(refuses(reading.text) - reference.refusals)
            gathered[REPETITION].append(abs(repetition_of(reading.text) - reference.repetition))
