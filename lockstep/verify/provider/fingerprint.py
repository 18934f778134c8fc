"""Do two endpoints draw the next token from the same distribution?

Test: every prompt is asked several times of either side, in turns. Null hypothesis: at each prompt
the answers of A and of B come from one distribution, so that which of them were A's tells nothing.
Labels are permuted within each prompt; the p-value of the energy statistic (mean distance across
sides less the mean of those within) is exact for any number of answers and any noise. Sources:
Gao, Liang and Guestrin, "Model equality testing: which model is this API serving?", 2024, for the
test of samples; Szekely and Rizzo, "Energy statistics", 2013, for the statistic.

A p-value says whether there is a difference, not whether it matters: another order of additions
is a difference. So the size is bounded too, and the verdict is about the size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.verify.drift.measure import answer_of, first_logprobs, logprob_distance
from lockstep.verify.drift.probes import Kind, Probe, default_probes
from lockstep.verify.endpoint import ProbeRequest, Reading, Source
from lockstep.verify.provider.findings import Finding
from lockstep.verify.report import Section
from lockstep.verify.verdict import Verdict

Floats = NDArray[np.float64]

REPEATS = 5
FEWEST = 10  # prompts that both sides must answer every time
SAMPLES = 12  # a prompt, where no logprobs are reported
PERMUTATIONS = 2000
RESAMPLES = 2000
TOLERANCE = 0.1  # nats: what other arithmetic on the same weights may come to


@dataclass(frozen=True, slots=True)
class Comparison:
    """Distances at every prompt.

    Attributes:
        prompts: names. excess: for each, the mean distance across sides less that within.
        within: mean distance within the sides.
        p_value: see above.
        low, high: 95% bootstrap interval over prompts of the mean excess.
        same_top: share of prompts at which both sides' most frequent answer is the same.
        logprobs: whether distances are of logprobs, in nats; else shares of differing samples.
    """

    prompts: tuple[str, ...]
    excess: tuple[float, ...]
    within: tuple[float, ...]
    p_value: float
    low: float
    high: float
    same_top: float
    logprobs: bool

    @property
    def mean(self) -> float:
        """The mean excess."""
        return float(np.mean(self.excess))


def token_probes() -> tuple[Probe, ...]:
    """The prompts that are asked."""
    return tuple(probe for probe in default_probes() if probe.kind is Kind.TOKEN)


async def in_turns(
    a: Source, b: Source, requests: Sequence[ProbeRequest]
) -> tuple[list[Reading], list[Reading]]:
    """Each request asked of both sides at one time, one after another."""
    found: tuple[list[Reading], list[Reading]] = ([], [])
    for request in requests:
        pair = await asyncio.gather(a.ask(request), b.ask(request))
        for side, reading in zip(found, pair, strict=True):
            side.append(reading)
    return found


async def compare_distributions(
    a: Source, b: Source, *, repeats: int = REPEATS, seed: int = 0
) -> Comparison | str:
    """Ask both sides; says why where there is nothing to compare."""
    probes = token_probes()
    first = await in_turns(a, b, [probes[0].request])
    for name, (reading,) in zip("AB", first, strict=True):
        if not reading.ok:
            return f"{name} cannot be read: {reading.error}"
    logprobs = all(first_logprobs(reading) for (reading,) in first)
    matrices, sides = [], []
    for probe in probes:
        if logprobs:
            requests = [probe.request] * repeats
        else:
            text = str(probe.request.messages[0]["content"])
            requests = [_sampled(text, seed + index) for index in range(SAMPLES)]
        answers = await in_turns(a, b, requests)
        if not all(reading.ok for side in answers for reading in side):
            continue
        sides.append((probe.name, answers))
        matrices.append(_distances([*answers[0], *answers[1]], logprobs=logprobs))
    if len(matrices) < min(FEWEST, len(probes)):
        return f"{len(matrices)} of {len(probes)} prompts were answered by both sides every time"
    return _compare(matrices, sides, logprobs=logprobs, seed=seed)


def _sampled(text: str, seed: int) -> ProbeRequest:
    message = {"role": "user", "content": text}
    return ProbeRequest(messages=(message,), max_tokens=1, temperature=1.0, seed=seed)


def _distances(readings: Sequence[Reading], *, logprobs: bool) -> Floats:
    """float64 [n, n]."""
    size = len(readings)
    found = np.zeros((size, size))
    for i in range(size):
        for j in range(i):
            if logprobs:
                value = logprob_distance(first_logprobs(readings[i]), first_logprobs(readings[j]))
            else:
                value = float(answer_of(readings[i]) != answer_of(readings[j]))
            found[i, j] = found[j, i] = value
    return found


def energy(distances: Floats, mine: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Mean distance across sides less that within, and that within.

    Args:
        distances: float64 [n, n]. mine: labels, bool [..., n], half of them true.

    Returns:
        Two float64 [...].
    """
    half = mine.shape[-1] // 2
    left, right = mine.astype(float), 1.0 - mine
    across = np.einsum("...i,ij,...j->...", left, distances, right) / half**2
    pairs = half * (half - 1)
    within = (
        np.einsum("...i,ij,...j->...", left, distances, left)
        + np.einsum("...i,ij,...j->...", right, distances, right)
    ) / (2 * pairs)
    return across - within, within


def _compare(
    matrices: Sequence[Floats],
    sides: Sequence[tuple[str, tuple[list[Reading], list[Reading]]]],
    *,
    logprobs: bool,
    seed: int,
) -> Comparison:
    source = np.random.default_rng(seed)
    size = len(matrices[0])
    labels = np.arange(size) < size // 2
    excess, within = zip(*(energy(matrix, labels) for matrix in matrices), strict=True)
    observed = float(np.mean(excess))
    permuted = np.zeros(PERMUTATIONS)
    for matrix in matrices:
        order = np.argsort(source.random((PERMUTATIONS, size)), axis=1)
        permuted += energy(matrix, labels[order])[0] / len(matrices)
    # Equal up to rounding counts as equal: sums in another order are no evidence.
    p_value = (1 + int((permuted >= observed - 1e-12).sum())) / (PERMUTATIONS + 1)
    drawn = source.integers(len(excess), size=(RESAMPLES, len(excess)))
    means = np.array(excess)[drawn].mean(axis=1)
    tops = [_top(answers[0]) == _top(answers[1]) for _, answers in sides]
    return Comparison(
        prompts=tuple(name for name, _ in sides),
        excess=tuple(map(float, excess)),
        within=tuple(map(float, within)),
        p_value=p_value,
        low=float(np.quantile(means, 0.025)),
        high=float(np.quantile(means, 0.975)),
        same_top=float(np.mean(tops)),
        logprobs=logprobs,
    )


def _top(readings: Sequence[Reading]) -> str:
    texts = [answer_of(reading) for reading in readings]
    return max(sorted(set(texts)), key=texts.count)


def judge(found: Comparison | str, alpha: float, tolerance: float = TOLERANCE) -> Finding:
    """The verdict, about the size where logprobs are reported."""
    name = "next-token distributions"
    if isinstance(found, str):
        return Finding(name, Verdict.UNDECIDABLE, found, Section(name, [found]))
    unit = "nats" if found.logprobs else "of samples"
    size = f"{found.mean:.3g} {unit} beyond noise (95%: {found.low:.3g} to {found.high:.3g})"
    differs = found.p_value <= alpha
    if not differs:
        verdict, reason = Verdict.PASS, f"no difference found (p = {found.p_value:.3g}); {size}"
    elif found.logprobs and found.high <= tolerance:
        verdict = Verdict.PASS
        reason = f"a difference as of other arithmetic on the same weights: {size}"
    elif not found.logprobs or found.low > tolerance:
        verdict, reason = Verdict.FAIL, f"they differ (p = {found.p_value:.3g}): {size}"
    else:
        verdict = Verdict.UNDECIDABLE
        reason = f"they differ, but the tolerance of {tolerance:g} lies in the interval: {size}"
    rows = [
        [prompt, f"{across:.4g}", f"{own:.4g}"]
        for prompt, across, own in zip(found.prompts, found.excess, found.within, strict=True)
    ]
    text = [
        reason,
        f"The most frequent answer is the same at {found.same_top:.0%} of {len(rows)} prompts.",
        "Null hypothesis of the p-value: at each prompt both sides answer from one distribution. "
        "Labels were permuted within prompts, so noise of either side is accounted for.",
    ]
    head = ["prompt", f"across, beyond noise ({unit})", "within"]
    figures = {
        "p_value": found.p_value,
        "excess": found.mean,
        "interval": [found.low, found.high],
        "same_top": found.same_top,
        "prompts": len(rows),
        "logprobs": found.logprobs,
    }
    return Finding(name, verdict, reason, Section(name, text, head, rows), figures)
