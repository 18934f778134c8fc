"""What a grammar allows, at the draw: exact -inf, on its own row only."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.kernels.cpu import make_backend
from lockstep.runner.bans import without
from lockstep.runner.penalties import LogitAdjuster
from lockstep.runner.plan import SampleSpec
from lockstep.runner.sampler import Sampler
from lockstep.types import SamplingParams

VOCAB = 1500
BACKEND = make_backend("native", 1)


class Allowed:
    """Ids as the engine hands them over."""

    def __init__(self, *ids: int) -> None:
        words = np.zeros(-(-VOCAB // 32), np.uint32)
        for i in ids:
            words[i >> 5] |= np.uint32(1 << (i & 31))
        self._words = words.view(np.int32)

    def words(self) -> np.ndarray:
        return self._words


def spec(*ids: int, **params: Any) -> SampleSpec:
    bad = params.pop("bad", ())
    stop = params.pop("stop", ())
    chosen = SamplingParams(**{"max_tokens": 99, **params})
    seed = params.get("seed", 0)
    return SampleSpec(chosen, seed, 0, 4, [3, 5, 9], 2, stop, bad, Allowed(*ids) if ids else None)


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return 4 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def draw(rows: torch.Tensor, *specs: SampleSpec) -> list[Any]:
    return Sampler(BACKEND, VOCAB).draw(rows.clone(), specs, range(len(specs)))


@settings(max_examples=30)
@given(
    ids=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=60, unique=True),
    params=st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.sampled_from([0.0, 0.3, 1.0, 5.0]),
            "top_k": st.sampled_from([0, 1, 5, 1000]),
            "top_p": st.sampled_from([0.0, 0.5, 1.0]),
            "min_p": st.sampled_from([0.0, 0.2, 1.0]),
            "repetition_penalty": st.sampled_from([1.0, 1.5]),
            "seed": st.integers(0, 9),
        },
    ),
)
def test_only_allowed_ids_are_drawn(ids: list[int], params: dict[str, Any]) -> None:
    rows = logits(6)
    drawn = draw(rows, *[spec(*ids, **{**params, "seed": seed}) for seed in range(6)])
    assert {d.token for d in drawn} <= set(ids)
    if params.get("temperature") == 0.0 and params.get("repetition_penalty", 1.0) == 1.0:
        assert [d.token for d in drawn] == [max(sorted(ids), key=lambda i: row[i]) for row in rows]


def test_a_bias_does_not_bring_back_a_masked_id_and_a_ban_narrows() -> None:
    rows = logits(1)
    assert draw(rows, spec(7, 8, logit_bias={9: 100.0, 8: 50.0}))[0].token == 8
    assert draw(rows, spec(7, 8, bad=((8,),)))[0].token == 7
    assert draw(rows, spec(7, 8, stop=(7,), min_tokens=9))[0].token == 8


def test_a_row_without_any_id_is_stuck_and_the_others_are_drawn() -> None:
    rows = logits(3)
    plain = draw(rows[[0, 2]], spec(seed=1), spec(5, 6, seed=2, logprobs=1))
    crowd = draw(
        rows,
        spec(seed=1),
        spec(7, bad=((7,),), logprobs=1, logprobs_mode="processed"),
        spec(5, 6, seed=2, logprobs=1),
    )
    assert crowd[1].token is None
    assert crowd[1].logprob is None
    assert [crowd[0], crowd[2]] == plain


def test_raw_logprobs_are_those_of_the_model_and_processed_ones_of_the_mask() -> None:
    rows = logits(1)
    ids = (3, 40, 77, 1400)
    free = draw(rows, spec(logprobs=3, seed=4))[0].logprob
    raw = draw(rows, spec(*ids, logprobs=3, seed=4))[0]
    assert raw.logprob.top == free.top
    assert raw.logprob.logprob == float(rows[0].log_softmax(0)[raw.token]) or math.isclose(
        raw.logprob.logprob, float(rows[0].double().log_softmax(0)[raw.token]), rel_tol=1e-5
    )
    processed = draw(rows, spec(*ids, logprobs=20, seed=4, logprobs_mode="processed"))[0].logprob
    assert {token for token, _ in processed.top} == set(ids)
    assert math.isclose(sum(math.exp(value) for _, value in processed.top), 1.0, rel_tol=1e-5)
    greedy = draw(rows, spec(*ids, temperature=0.0, logprobs=20, logprobs_mode="processed"))[
        0
    ].logprob
    assert {token for token, _ in greedy.top} == set(ids)
    assert greedy.rank == 1


def test_masks_of_many_rows_touch_no_other_row() -> None:
    """More rows than are spread out at a time, with free rows between them."""
    rows = logits(80)
    specs = [spec(*range(i, VOCAB, 97)) if i % 3 else spec() for i in range(80)]
    changed = rows.clone()
    assert LogitAdjuster(VOCAB).apply(changed, specs, range(80)) == set()
    for i in range(80):
        expected = rows[i].clone()
        if i % 3:
            keep = torch.zeros(VOCAB, dtype=torch.bool)
            keep[list(range(i, VOCAB, 97))] = True
            expected[~keep] = -math.inf
        assert torch.equal(changed[i], expected)


def test_a_row_does_not_see_the_others() -> None:
    rows = logits(9)
    specs = [
        replace(spec(*range(i, VOCAB, 31 + i), logprobs=2, top_p=0.9), seed=i) for i in range(9)
    ]
    specs[4] = spec(seed=3, logprobs=2)
    alone = [draw(rows[i : i + 1], one)[0] for i, one in enumerate(specs)]
    assert draw(rows, *specs) == alone
    assert draw(rows.flip(0), *specs[::-1])[::-1] == alone


@pytest.mark.parametrize("ids", [[], [0], [31, 32, 1499]])
def test_without_clears_bits_in_a_copy(ids: list[int]) -> None:
    words = Allowed(*range(0, VOCAB, 1)).words()
    before = words.copy()
    found = np.unpackbits(without(words, ids).view(np.uint8), bitorder="little")
    assert [i for i in range(VOCAB) if not found[i]] == ids
    assert (words == before).all()
