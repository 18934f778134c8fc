"""The file of a good day: what every probe gave, and how far that varied from round to round."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.types import LockstepError
from lockstep.verify.drift.measure import PROBE, Reference, statistics_of
from lockstep.verify.drift.probes import Probe, probes_digest
from lockstep.verify.probe import Reading

FORMAT = "lockstep-baseline-1"
REFERENCE_ROUNDS = 4  # of which the references are made; the others say how much is noise
FEWEST_ROUNDS = 12
ROUNDS = 64


class BaselineError(LockstepError):
    """A baseline that cannot be made, or a file that is none."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What a probe gave, and the replica that answered ("" where that cannot be seen)."""

    reading: Reading
    replica: str = ""


Round = Mapping[str, Answered]


@dataclass(frozen=True, slots=True)
class Baseline:
    """A good day.

    Attributes:
        probes: digest of the set that was asked.
        source: what was asked. created: when, as ISO 8601.
        references: by probe. statistics: by stream, one value a round.
        unreadable: answers of each round that could not be read.
        fingerprints, replicas: those seen.
    """

    probes: str
    source: str
    created: str
    references: Mapping[str, Reference]
    statistics: Mapping[str, Sequence[float]]
    unreadable: Sequence[int]
    fingerprints: Sequence[str]
    replicas: Sequence[str]

    @property
    def steady(self) -> bool:
        """Whether no answer of any round differed from its reference."""
        probes = [values for name, values in self.statistics.items() if name.startswith(PROBE)]
        return bool(probes) and not any(map(any, probes))

    @classmethod
    def of(
        cls, probes: tuple[Probe, ...], rounds: Sequence[Round], source: str, created: str
    ) -> Baseline:
        """From the rounds of a good day.

        Raises:
            BaselineError: too few rounds, or a probe that could never be read.
        """
        if len(rounds) < FEWEST_ROUNDS:
            raise BaselineError(f"rounds must be at least {FEWEST_ROUNDS}, got {len(rounds)}")
        first, later = rounds[:REFERENCE_ROUNDS], rounds[REFERENCE_ROUNDS:]
        references = {}
        for probe in probes:
            readable = [each[probe.name].reading for each in first if each[probe.name].reading.ok]
            if readable:
                references[probe.name] = Reference.of(readable)
        if not references:
            error = next(iter(rounds[0].values())).reading.error
            raise BaselineError(f"{source}: no probe could be read; the first one gave: {error}")
        statistics: dict[str, list[float]] = {}
        for each in later:
            for name, value in statistics_of(probes, readable_of(each), references).items():
                statistics.setdefault(name, []).append(value)
        answers = [one for each in rounds for one in each.values()]
        return cls(
            probes=probes_digest(probes),
            source=source,
            created=created,
            references=references,
            # A stream that most rounds could not give is none.
            statistics={n: v for n, v in statistics.items() if 2 * len(v) >= len(later)},
            unreadable=[len(each) - len(readable_of(each)) for each in later],
            fingerprints=sorted({one.reading.fingerprint for one in answers} - {""}),
            replicas=sorted({one.replica for one in answers} - {""}),
        )

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        write_json(
            path,
            {
                "format": FORMAT,
                "probes": self.probes,
                "source": self.source,
                "created": self.created,
                "fingerprints": list(self.fingerprints),
                "replicas": list(self.replicas),
                "unreadable": list(self.unreadable),
                "statistics": {name: list(v) for name, v in self.statistics.items()},
                "references": {name: one.to_json() for name, one in self.references.items()},
            },
        )

    @classmethod
    def load(cls, path: Path, probes: tuple[Probe, ...]) -> Baseline:
        """Read the file.

        Raises:
            BaselineError: no baseline, or one of other probes.
        """
        body = read_json(path, FORMAT)
        if body.get("probes") != probes_digest(probes):
            raise BaselineError(f"{path} was made with other probes: make a new baseline")
        try:
            return cls(
                probes=str(body["probes"]),
                source=str(body["source"]),
                created=str(body["created"]),
                references={name: Reference(**one) for name, one in body["references"].items()},
                statistics={n: [float(x) for x in v] for n, v in body["statistics"].items()},
                unreadable=[int(count) for count in body["unreadable"]],
                fingerprints=[str(one) for one in body["fingerprints"]],
                replicas=[str(one) for one in body["replicas"]],
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise BaselineError(f"{path} is damaged: {error!r}") from None


async def take_baseline(
    rounds: AsyncIterator[Round],
    probes: tuple[Probe, ...],
    count: int,
    source: str,
    created: str,
    progress: Callable[[int], None] = lambda done: None,
) -> Baseline:
    """Ask `count` rounds and make a baseline of them."""
    taken: list[Round] = []
    async for each in rounds:
        taken.append(each)
        progress(len(taken))
        if len(taken) == count:
            break
    return Baseline.of(probes, taken, source, created)


def readable_of(each: Round) -> dict[str, Reading]:
    """The answers of a round that could be read, by probe."""
    return {name: one.reading for name, one in each.items() if one.reading.ok}


def write_json(path: Path, body: Any) -> None:
    """Replace a file by this value; a reader sees the old one or the new one."""
    other = path.with_name(f".{path.name}.{os.getpid()}")
    other.write_text(json.dumps(body, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    other.replace(path)


def read_json(path: Path, form: str) -> dict[str, Any]:
    """The object in a file of this format.

    Raises:
        BaselineError: something else is in it.
    """
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BaselineError(f"{path} is no JSON: {error}") from None
    if not isinstance(body, dict) or body.get("format") != form:
        raise BaselineError(f"{path} is no file of the format {form}")
    return body
