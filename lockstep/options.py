"""Options of a question as token sequences, and from their log-probabilities to the winner.

A leaf: doors that ask and the engine, which opens a gate by itself, read alike. Sequences with
a common beginning share its positions, so 255 options of three digits need some thirty rows of
logits and not 765.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.types import SamplingParams, TokenLogprob

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Probe:
    """One prompt's end that shows what may follow.

    Attributes:
        path: ids to append to the prompt. The row before each of them is read, and the row
            behind the last.
        wanted: ids whose logprob is read at every one of these rows.
    """

    path: Path
    wanted: tuple[int, ...]


def probe_params(path: Path, wanted: tuple[int, ...]) -> SamplingParams:
    """How a request reads a probe: the wanted logprobs at every row of the path and behind it.
    The id that is drawn for that is of no account."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        seed=0,
        prompt_logprobs=0 if path else None,
        logprob_token_ids=wanted,
    )


def shortest(sequences: Sequence[Path]) -> list[Path]:
    """The first ids alone where these tell all sequences apart, else the whole sequences."""
    firsts = {path[0] for path in sequences}
    return [path[:1] for path in sequences] if len(firsts) == len(sequences) else list(sequences)


def hidden_by(sequences: Sequence[Path]) -> tuple[int, int] | None:
    """Indices of a sequence and of another (or an equal one) that begins with it, if any."""
    owners: dict[Path, int] = {}
    for index, path in enumerate(sequences):
        if path in owners:
            return owners[path], index
        owners[path] = index
    for index, path in enumerate(sequences):
        for length in range(1, len(path)):
            if path[:length] in owners:
                return owners[path[:length]], index
    return None


def probes(sequences: Sequence[Path]) -> list[Probe]:
    """As few prompts as show the logprob of every id of every sequence after those before it."""
    children: dict[Path, dict[int, None]] = {}
    for path in sequences:
        for length in range(len(path)):
            children.setdefault(path[:length], {})[path[length]] = None
    inner = {path[:length] for path in children for length in range(len(path))}
    found = []
    for deepest in children:
        if deepest not in inner:
            rows = (children[deepest[:length]] for length in range(len(deepest) + 1))
            found.append(Probe(deepest, tuple(dict.fromkeys(i for row in rows for i in row))))
    return found


def read(
    sequences: Sequence[Path],
    asked: Sequence[Probe],
    rows: Sequence[Sequence[TokenLogprob]],
) -> tuple[float, ...]:
    """Logprob of each sequence: of its ids, added from the first to the last.

    Args:
        rows: for each probe the entries of the ids of its path and of the one drawn behind
            them; `given` holds the wanted ids.
    """
    known: dict[Path, Mapping[int, float]] = {}
    for probe, entries in zip(asked, rows, strict=True):
        for length, entry in enumerate(entries):
            node = probe.path[:length]
            if node not in known:
                known[node] = dict(zip(probe.wanted, entry.given, strict=True))
    return tuple(
        sum((known[path[:length]][path[length]] for length in range(len(path))), 0.0)
        for path in sequences
    )


def log_softmax(outputs: Sequence[float]) -> tuple[float, ...]:
    """Natural-log probabilities of the options among themselves, from a head's outputs (logits).

    The sum is exact, so an output's value does not depend on where it stands.
    """
    most = max(outputs)
    total = math.log(math.fsum(math.exp(value - most) for value in outputs))
    return tuple(value - most - total for value in outputs)


def normalise(logprobs: Sequence[float], temperature: float = 1.0) -> tuple[float, ...]:
    """Probabilities that add up to 1; equal ones where every logprob is -inf.

    At temperature 0 the most probable has all of it, the first among equals.
    """
    most = max(logprobs)
    if most == -math.inf:
        return (1 / len(logprobs),) * len(logprobs)
    if temperature == 0.0:
        best = logprobs.index(most)
        return tuple(float(index == best) for index in range(len(logprobs)))
    weights = [math.exp((value - most) / temperature) for value in logprobs]
    total = math.fsum(weights)
    return tuple(weight / total for weight in weights)


def choose(probabilities: Sequence[float], thresholds: Sequence[float | None]) -> int:
    """Index of the winner: the first option in declared order whose probability reaches its
    threshold, else the most probable one; of equal ones the first."""
    for index, (probability, threshold) in enumerate(zip(probabilities, thresholds, strict=True)):
        if threshold is not None and probability >= threshold:
            return index
    return probabilities.index(max(probabilities))


def total_mass(logprobs: Sequence[float]) -> float:
    """Probability of all options together; the sum is exact, so their order is of no account."""
    return min(1.0, math.fsum(map(math.exp, logprobs)))
