"""Ids that a sequence may not draw next, on the host. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lockstep.runner.plan import SampleSpec


def forbidden(spec: SampleSpec) -> list[int]:
    """Ids that the row may not draw: bad words about to be completed, early stop ids."""
    found = []
    history = spec.history
    for word in spec.bad_ids:
        before = len(word) - 1
        if before == 0:
            found.append(word[0])
        elif 0 < before <= len(history) and tuple(history[len(history) - before :]) == word[:-1]:
            found.append(word[-1])
    if spec.position < spec.params.min_tokens:
        found += spec.stop_ids
    return found


def without(words: NDArray[np.int32], tokens: Sequence[int]) -> NDArray[np.int32]:
    """A mask without the bits of some ids; the mask itself when there are none."""
    if tokens:
        words = words.copy()
        at = np.asarray(tokens)
        bits = np.left_shift(np.uint32(1), (at & 31).astype(np.uint32))
        np.bitwise_and.at(words.view(np.uint32), at >> 5, ~bits)
    return words
