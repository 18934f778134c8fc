"""Tests that may be looked at after every round for years, with one stated false-alarm rate.

The null hypothesis of a stream is exchangeability: its statistics of the baseline's rounds and
of all later rounds come in an order that tells nothing. Nothing is assumed about how the
statistic is distributed: ties, heavy tails and noise of any size are allowed.

- Ranks. Under the null the rank of a new statistic among all earlier ones is uniform and
  independent of the earlier ranks (Vovk, Gammerman and Shafer, "Algorithmic Learning in a
  Random World", 2005, theorem 8.2; ties are broken by a hash of the stream and the round). So the
  chance that it exceeds the baseline's (j+1)-th largest, when m later ones have done so among k,
  is exactly (1 + j + m) / (n + k + 1), whatever the distribution.
- Bets. Each component bets at these odds that a certain share of rounds exceeds a certain
  threshold. Its wealth is a martingale that begins at 1; so is the mixture over components and
  over the round in which the change began (prior weights that sum to 1, so that months of quiet
  do not eat the wealth that a change needs; Shin, Ramdas and Rinaldo, "E-detectors", 2023).
  Ville's inequality: the chance that it ever reaches 1/a is at most a.
- Many streams. Stream s with weight w_s alarms at 1/(a w_s), the weights sum to at most 1: the
  chance that a clean deployment ever causes any alarm is at most a, however the streams depend
  on one another. Which streams changed is then told by e-BH (Wang and Ramdas, "False discovery
  rate control with e-values", 2022): of those named, a share of at most a is expected to be
  named wrongly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SHARES = (0.01, 0.05, 0.25, 0.9)  # of rounds that exceed a threshold, as the bets suppose
FRACTIONS = (0.0, 0.05, 0.15, 0.3, 0.5)  # of the baseline's rounds above the thresholds
COMPONENTS = len(SHARES) * len(FRACTIONS)
_SHARES = np.array(SHARES)


def threshold_ranks(rounds: int) -> tuple[int, ...]:
    """How many of the baseline's rounds lie above each threshold, one a fraction."""
    return tuple(int(fraction * rounds) for fraction in FRACTIONS)


def odds(ranks: Floats, exceeded: Floats, baseline: int, rounds: int) -> Floats:
    """The chance that the next statistic exceeds each threshold, under the null.

    Args:
        ranks: see `threshold_ranks`. exceeded: later rounds above each, float64 [..., F].
        baseline: rounds of it. rounds: later ones so far.
    """
    return np.asarray((1.0 + ranks + exceeded) / (baseline + rounds + 1.0))


def log_bets(hits: NDArray[np.bool_], chances: Floats) -> Floats:
    """Log of what each component gains in a round, float64 [..., COMPONENTS].

    Args:
        hits: whether each threshold was exceeded, bool [..., F].
        chances: see `odds`, broadcast against `hits`.
    """
    gains = np.where(hits, 1.0 / chances, 0.0)[..., None]
    bets = np.log((1.0 - _SHARES) + _SHARES * gains)
    return np.asarray(bets.reshape(*bets.shape[:-2], COMPONENTS))


def reserve(rounds: int) -> float:
    """Prior weight of a change that begins after that many rounds; 1 at 0, falls to 0.

    It falls like 1/log, so that a change costs only the logarithm of the time before it.
    """
    return 1.0 / float(np.log2(2.0 + rounds))


def advance(log_sums: Floats, rounds: int, log_factors: Floats) -> Floats:
    """One round's bets.

    Args:
        log_sums: float64 [..., components], wealth of the starts so far; -inf at first.
        rounds: how many rounds came before this one.
        log_factors: float64 [..., components], see `log_bets`.

    Returns:
        The next `log_sums`.
    """
    start = np.log(reserve(rounds) - reserve(rounds + 1))
    return np.asarray(np.logaddexp(log_sums, start) + log_factors)


def log_wealth(log_sums: Floats, rounds: int) -> Floats:
    """Log of the e-value after that many rounds, float64 [...]; 0 at the beginning."""
    mean = np.logaddexp.reduce(log_sums, axis=-1) - np.log(log_sums.shape[-1])
    return np.asarray(np.logaddexp(mean, np.log(reserve(rounds))))


def tie_breaker(stream: str, index: int) -> float:
    """A number in [0, 1) that stands for chance and is the same on every run."""
    raw = hashlib.sha256(f"{stream}\0{index}".encode()).digest()
    return int.from_bytes(raw[:6], "big") / float(1 << 48)


class Wealth:
    """An e-process. Mutable; owned by whoever bets.

    Args:
        log_sums: of one that goes on; empty begins one.
        components: how many bets are mixed.

    Attributes:
        rounds: bets so far.
        peak: largest log wealth so far.
    """

    def __init__(
        self,
        log_sums: Sequence[float] = (),
        rounds: int = 0,
        peak: float = 0.0,
        *,
        components: int = COMPONENTS,
    ) -> None:
        self.rounds = rounds
        self.peak = peak
        self._log_sums = np.full(components, -np.inf)
        if log_sums:
            self._log_sums[:] = log_sums

    @property
    def log_sums(self) -> list[float]:
        """What `__init__` takes back; empty before the first bet."""
        values: list[float] = self._log_sums.tolist()
        return values if self.rounds else []

    @property
    def log_value(self) -> float:
        """Log of the e-value."""
        return float(log_wealth(self._log_sums, self.rounds))

    def bet(self, log_factors: Sequence[Floats]) -> None:
        """Take one round: the gains of one bet, or of several that may depend on one another.

        Several count by their mean, which is a bet as well.

        Args:
            log_factors: float64 [components] each.
        """
        mean = np.logaddexp.reduce(np.stack(log_factors), axis=0) - np.log(len(log_factors))
        self._log_sums = advance(self._log_sums, self.rounds, mean)
        self.rounds += 1
        self.peak = max(self.peak, self.log_value)


class Stream:
    """One statistic, round after round, held against its baseline. Mutable.

    Args:
        name: no two streams of a monitor share one: ties are broken by it.
        baseline: the statistic in the baseline's rounds, at least two.
        exceeded, wealth: of a stream that goes on.
    """

    def __init__(
        self,
        name: str,
        baseline: Sequence[float],
        exceeded: Sequence[int] = (),
        wealth: Wealth | None = None,
    ) -> None:
        self.name = name
        self.wealth = wealth or Wealth()
        keyed = [(value, tie_breaker(name, -1 - i)) for i, value in enumerate(baseline)]
        keyed.sort(reverse=True)
        self._ranks = np.array(threshold_ranks(len(baseline)), dtype=np.float64)
        self._thresholds = [keyed[int(rank)] for rank in self._ranks]
        self._baseline = len(baseline)
        self._exceeded = np.array(exceeded or [0] * len(FRACTIONS), dtype=np.float64)

    @property
    def exceeded(self) -> list[int]:
        """How many later rounds lay above each threshold."""
        return [int(count) for count in self._exceeded]

    def log_factors(self, value: float) -> Floats:
        """What the components would gain by a value of the coming round; changes nothing."""
        chances = odds(self._ranks, self._exceeded, self._baseline, self.wealth.rounds)
        return log_bets(self._hits(value), chances)

    def observe(self, value: float) -> None:
        """Take a round's value."""
        factors = self.log_factors(value)
        self._exceeded += self._hits(value)
        self.wealth.bet([factors])

    def _hits(self, value: float) -> NDArray[np.bool_]:
        key = (value, tie_breaker(self.name, self.wealth.rounds))
        return np.array([key > threshold for threshold in self._thresholds])


def discoveries(log_values: Sequence[float], weights: Sequence[float], alpha: float) -> list[int]:
    """Indices of the streams that changed, by weighted e-BH at level `alpha`.

    Args:
        log_values: log wealth of each stream.
        weights: of each, positive; together at most 1.
    """
    scaled = np.array(log_values, dtype=np.float64) + np.log(np.array(weights, dtype=np.float64))
    order = np.argsort(-scaled, kind="stable")
    passed = [
        rank
        for rank, index in enumerate(order, 1)
        if scaled[index] >= -np.log(alpha) - np.log(rank)
    ]
    return sorted(int(index) for index in order[: max(passed, default=0)])
