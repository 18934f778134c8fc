"""One point of a self-test: whether two runs have equal bits, and if not, how they differ."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.verify.schedules import Answers


@dataclass(frozen=True, slots=True)
class Outcome:
    """One point of the contract.

    Attributes:
        passed: None when it could not be examined here.
        detail: what was compared, or how it differs.
    """

    point: str
    passed: bool | None
    detail: str


def compared(point: str, expected: Answers, found: Answers, more: str = "") -> Outcome:
    """Whether two runs have equal bits, and if not, how they differ."""
    differ = sorted(key for key in expected if found.get(key) != expected[key])
    values = sum(len(bits) // 8 for _, _, bits in expected.values())
    if not differ:
        return Outcome(
            point, True, f"{len(expected)} answers, {values} numbers equal to the bit{more}"
        )
    same = [key for key in differ if key in found and found[key][:2] == expected[key][:2]]
    gaps = [gap for key in same for gap in _gaps(expected[key][2], found[key][2])]
    largest = f"; where tokens agree, numbers differ by up to {max(gaps):.2g}" if gaps else ""
    return Outcome(
        point,
        False,
        f"{len(differ)} of {len(expected)} answers differ ({', '.join(differ)}), "
        f"{len(differ) - len(same)} of them in a token or a rank{largest}{more}",
    )


def _gaps(one: bytes, other: bytes) -> Iterator[float]:
    pair = (struct.iter_unpack("<d", bits) for bits in (one, other))
    return (abs(a - b) for (a,), (b,) in zip(*pair, strict=True) if a != b)
