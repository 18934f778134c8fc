"""One vector a text: the trunk's last hidden state, pooled, cut and normalised.

Normalised vectors are float32; their length is computed from an exact sum of squares, so
nothing here depends on the order of an addition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lockstep.requests import Prompt, RequestBuilder
from lockstep.runner.plan import POOLED_UNIT
from lockstep.types import Completion, Request, RequestError, SamplingParams

Vector = NDArray[np.float32]
PoolingKind = Literal["last", "mean"]


def embed_requests(
    builder: RequestBuilder,
    texts: Sequence[Prompt],
    pooling: PoolingKind,
    dimensions: int | None,
    *,
    field: str = "input",
    priority: int = 0,
) -> list[Request]:
    """One request for each text or list of token ids.

    Raises:
        RequestError: a text that cannot be served, naming it as `input[i]`, or dimensions
            that the model does not have.
    """
    if pooling not in ("last", "mean"):
        raise RequestError(f"pooling must be 'last' or 'mean', got {pooling!r}", field="pooling")
    size = builder.info.hidden_size
    if dimensions is not None and (
        isinstance(dimensions, bool)
        or not isinstance(dimensions, int)
        or not 1 <= dimensions <= size
    ):
        raise RequestError(
            f"dimensions must be in [1, {size}], got {dimensions!r}", field="dimensions"
        )
    params = SamplingParams(temperature=0.0, max_tokens=0, seed=0)
    return [
        builder.build(
            builder.encode(text, field=f"{field}[{index}]"),
            params,
            field=f"{field}[{index}]",
            pooling=pooling,
            priority=priority,
        )
        for index, text in enumerate(texts)
    ]


def embedding(completion: Completion, pooling: PoolingKind, dimensions: int | None) -> Vector:
    """The vector of a pooled request: float32 [dimensions], of length 1 (0 if it is all zeros)."""
    values: NDArray[np.float64]
    if pooling == "mean":
        parts = [np.frombuffer(part, np.int64) for part in completion.pooled]
        total = np.add.reduce(parts, axis=0)
        values = total * (POOLED_UNIT / len(completion.prompt_token_ids))
    else:
        (last,) = completion.pooled
        values = np.frombuffer(last, np.float32).astype(np.float64)
    values = values[:dimensions]
    length = math.sqrt(math.fsum((values * values).tolist()))
    return (values / length if length else values).astype(np.float32)
