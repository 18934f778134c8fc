"""Sampling and logprobs: edge values, order of operations, independence of rows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.kernels.cpu import make_backend
from lockstep.runner.penalties import TokenCounts
from lockstep.runner.plan import SampleSpec
from lockstep.runner.sampler import Sampler, truncate
from lockstep.types import SamplingParams

VOCAB = 1500  # more than one block of the vocabulary tree
BACKEND = make_backend("native", 1)
HISTORY = [3, 5, 5, 9, 1, 7, 7, 7, 2]
PROMPT = 5


def spec(position: int = 4, history: list[int] | None = None, **params: Any) -> SampleSpec:
    stop = params.pop("stop", ())
    bad = params.pop("bad", ())
    seed = params.pop("seed", 0)
    choice = params.pop("choice", 0)
    chosen = SamplingParams(**{"max_tokens": 99, **params})
    return SampleSpec(chosen, seed, choice, position, history or HISTORY, PROMPT, stop, bad)


def random_logits(rows: int, seed: int = 0, scale: float = 4.0) -> Tensor:
    return scale * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def draw(logits: Tensor, *specs: SampleSpec) -> list[Any]:
    sampler = Sampler(BACKEND, VOCAB)
    return sampler.draw(logits.clone(), specs, range(len(specs)))


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, [700, 40, 1200]] = 5.0
    assert [d.token for d in draw(logits, spec(temperature=0.0), spec(temperature=0.0))] == [40, 0]


@pytest.mark.parametrize(
    "edge", [{"top_p": 0.0}, {"top_k": 1}, {"min_p": 1.0}, {"temperature": 1e-4}]
)
def test_edges_that_leave_only_the_best(edge: dict[str, float]) -> None:
    """A27, A29: top_p 0 and min_p 1 keep the best; a tiny temperature does not overflow."""
    logits = random_logits(20)
    best = logits.argmax(1).tolist()
    specs = [spec(seed=s, **edge) for s in range(20)]
    assert [d.token for d in draw(logits, *specs)] == best


def test_top_k_off_is_zero_and_minus_one() -> None:
    logits = random_logits(30, scale=0.1)
    off = [draw(logits, *[spec(seed=s, top_k=k) for s in range(30)]) for k in (0, -1)]
    assert off[0] == off[1]
    assert len({d.token for d in off[0]}) > 20


def test_seed_choice_and_position_decide_the_draw_and_nothing_else() -> None:
    """A30, C11: neither slot nor company enters; another choice or position differs."""
    logits = random_logits(1, scale=0.5)
    alone = draw(logits, spec(seed=7))[0].token
    crowd = draw(logits.expand(9, -1), *[spec(seed=s) for s in (1, 2, 7, 3, 7, 4, 5, 6, 7)])
    assert [d.token for d in crowd][2] == alone
    assert [d.token for d in crowd][4] == [d.token for d in crowd][8] == alone
    others = [spec(seed=7, choice=1), spec(seed=7, choice=2), spec(5, seed=7), spec(seed=-7)]
    assert len({alone, *[d.token for d in draw(logits.expand(4, -1), *others)]}) == 5


def test_penalties_follow_their_definition() -> None:
    logits = random_logits(1)
    params = {"repetition_penalty": 1.7, "frequency_penalty": 0.6, "presence_penalty": -0.4}
    found = draw(
        logits,
        spec(
            temperature=0.0,
            logprobs=128,
            logprobs_mode="processed",
            logprob_token_ids=tuple(range(10)),
            **params,
        ),
    )[0].logprob
    expected = logits[0].double().clone()
    for token in set(HISTORY):
        value = expected[token]
        expected[token] = value / 1.7 if value > 0 else value * 1.7
    for token in set(HISTORY[PROMPT:]):
        expected[token] -= 0.6 * HISTORY[PROMPT:].count(token) - 0.4
    torch.testing.assert_close(
        torch.tensor(found.given), expected.log_softmax(0)[:10].float(), atol=1e-5, rtol=0
    )


def test_presence_and_frequency_leave_the_prompt_alone() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 7] = 2.0, 2.5  # 3 is in the prompt only, 7 in the output
    assert draw(logits, spec(temperature=0.0, presence_penalty=1.0))[0].token == 3
    assert draw(logits, spec(temperature=0.0, repetition_penalty=1.5))[0].token == 7


def test_logit_bias_bans_and_forces() -> None:
    """A24; ids beyond the vocabulary (A23) are the engine's to refuse and touch no other row."""
    logits = random_logits(3)
    best = int(logits[0].argmax())
    specs = [
        spec(temperature=0.0, logit_bias={best: -100}),
        spec(logit_bias={77: 100}, seed=1),
        spec(temperature=0.0, logit_bias={VOCAB + 5: 100}),
    ]
    found = [d.token for d in draw(logits, *specs)]
    assert found[0] != best
    assert found[1:] == [77, int(logits[2].argmax())]


def test_bad_words_and_early_stops_are_never_drawn() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, :4] = torch.tensor([9.0, 8.0, 7.0, 6.0])
    greedy: dict[str, Any] = {"temperature": 0.0}
    assert draw(logits, spec(bad=((0,),), **greedy))[0].token == 1
    assert draw(logits, spec(bad=((7, 2, 0),), **greedy))[0].token == 1
    assert draw(logits, spec(bad=((7, 3, 0), (2, 7, 0)), **greedy))[0].token == 0
    long = tuple(range(50))
    assert draw(logits, spec(bad=(long,), **greedy))[0].token == 0
    early = spec(4, stop=(0, 1), min_tokens=5, **greedy)
    assert draw(logits, early)[0].token == 2
    assert draw(logits, replace(early, position=5))[0].token == 0


def test_logprobs_are_exact_and_ranked_with_ties_by_id() -> None:
    logits = random_logits(4)
    logits[1, [1400, 20, 900]] = 60.0
    logits[2] = 0.0
    wants = SamplingParams(logprobs=3, logprob_token_ids=(900, 0, VOCAB + 1), temperature=0.0)
    sampler = Sampler(BACKEND, VOCAB)
    tokens = [5, 1400, 1499, int(logits[3].argmax())]
    scores = sampler.score(logits, tokens, [wants] * 4)
    reference = logits.double().log_softmax(1)
    for row, score in enumerate(scores):
        assert score.logprob == pytest.approx(float(reference[row, tokens[row]]), abs=1e-5)
        order = sorted(range(VOCAB), key=lambda i, row=row: (-float(logits[row, i]), i))
        assert [token for token, _ in score.top] == order[:3]
        assert score.rank == order.index(tokens[row]) + 1
        assert score.given[:2] == pytest.approx(reference[row, [900, 0]].tolist(), abs=1e-5)
        assert score.given[2] == -math.inf
    assert scores[1].rank == 3
    assert [token for token, _ in scores[2].top] == [0, 1, 2]


def test_raw_and_processed_logprobs() -> None:
    """A15: raw values ignore temperature and truncation, processed ones follow them."""
    logits = random_logits(1, scale=0.3)
    raw = [draw(logits, spec(seed=3, logprobs=5, temperature=t))[0].logprob for t in (0.2, 1.0)]
    assert raw[0].top == raw[1].top
    changes: dict[str, Any] = {"temperature": 0.5, "top_k": 4, "min_p": 0.2}
    processed = draw(logits, spec(seed=3, logprobs=9, logprobs_mode="processed", **changes))[0]
    total = sum(math.exp(value) for _, value in processed.logprob.top)
    assert total == pytest.approx(1.0, abs=1e-5)
    assert len(processed.logprob.top) <= 4
    assert processed.token in dict(processed.logprob.top)


@pytest.mark.parametrize(
    "adjusted",
    [
        {"repetition_penalty": 1.7},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.5},
        {"logit_bias": {40: 20.0, 41: -100.0}},
        {"bad": ((40,), (2, 41))},
        {"stop": (40, 41), "min_tokens": 20},
    ],
)
def test_a15_raw_logprobs_know_no_penalty_bias_or_ban(adjusted: dict[str, Any]) -> None:
    logits = random_logits(1, scale=0.3).repeat(2, 1)
    logits[:, 40], logits[:, 41], logits[:, 7] = 6.0, 5.0, 4.0
    wanted: dict[str, Any] = {"logprobs": 128, "logprob_token_ids": (7, 40, 41), "seed": 3}
    plain, raw = draw(logits, spec(**wanted), spec(**wanted, **adjusted))
    assert raw.logprob.top == plain.logprob.top
    assert raw.logprob.given == plain.logprob.given
    mode = {"logprobs_mode": "processed"}
    plain, processed = draw(logits, spec(**wanted, **mode), spec(**wanted, **mode, **adjusted))
    assert processed.logprob.given != plain.logprob.given


def test_rows_that_are_not_numbers_harm_nobody() -> None:
    logits = random_logits(4)
    logits[1] = math.nan
    logits[2, 7] = math.inf
    logits[3] = -math.inf
    for params in ({"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9}):
        specs = [spec(seed=i, logprobs=2, presence_penalty=0.1, **params) for i in range(4)]
        found = draw(logits, *specs)
        assert all(0 <= d.token < VOCAB for d in found)
        assert found[0] == draw(logits[:1], specs[0])[0]


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-4, 0.3, 1.0, 50.0]),
        "top_k": st.sampled_from([-1, 0, 1, 5, 1000, 5000]),
        "top_p": st.sampled_from([0.0, 0.3, 0.95, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1, 1.0]),
        "presence_penalty": st.sampled_from([0.0, -2.0, 0.7]),
        "frequency_penalty": st.sampled_from([0.0, 2.0]),
        "repetition_penalty": st.sampled_from([1.0, 0.5, 1.3]),
        "logit_bias": st.sampled_from([{}, {3: 2.5, 900: -100.0}]),
        "logprobs": st.sampled_from([None, 0, 3]),
        "logprobs_mode": st.sampled_from(["raw", "processed"]),
        "logprob_token_ids": st.sampled_from([(), (4, 1499)]),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "bad": st.sampled_from([(), ((2, 8), (4,))]),
    }
)


@settings(max_examples=40, deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_a_row_does_not_see_the_others(rows: list[dict[str, Any]], random: Any) -> None:
    logits = random_logits(len(rows), seed=len(rows))
    specs = [spec(**row) for row in rows]
    alone = [draw(logits[i : i + 1], s)[0] for i, s in enumerate(specs)]
    assert draw(logits, *specs) == alone
    order = list(range(len(rows)))
    random.shuffle(order)
    assert draw(logits[order], *[specs[i] for i in order]) == [alone[i] for i in order]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=200), st.integers(1, 200), st.booleans())
def test_counts_kept_step_by_step_equal_a_recount(
    history: list[int], cut: int, with_prompt: bool
) -> None:
    prompt = max(1, len(history) // 3)
    seen = history[:prompt]
    grown = TokenCounts(seen, with_prompt)
    for end in range(prompt, len(history) + 1, min(cut, 5)):
        seen.extend(history[len(seen) : end])
        grown.update(prompt)
    seen.extend(history[len(seen) :])
    grown.update(prompt)
    fresh = TokenCounts(history, with_prompt)
    fresh.update(prompt)
    table = dict(zip(grown.ids.tolist(), grown.counts.tolist(), strict=True))
    assert table == dict(zip(fresh.ids.tolist(), fresh.counts.tolist(), strict=True))
    assert all(history[prompt:].count(i) == n for i, n in table.items())


def test_a_number_used_again_by_another_sequence_starts_its_counts_anew() -> None:
    logits = random_logits(1)
    sampler = Sampler(BACKEND, VOCAB)
    one = spec(logprobs=0, repetition_penalty=1.5, logprobs_mode="processed")
    other = replace(one, history=[*one.history[::-1], 7])
    fresh = Sampler(BACKEND, VOCAB).draw(logits.clone(), [other], [1])
    sampler.draw(logits.clone(), [one], [1])
    assert sampler.draw(logits.clone(), [other], [1]) == fresh


def test_a_forgotten_sequence_is_counted_again() -> None:
    logits = random_logits(1)
    sampler = Sampler(BACKEND, VOCAB)
    one = spec(temperature=0.0, logprobs=0, frequency_penalty=1.0, logprobs_mode="processed")
    first = sampler.draw(logits.clone(), [one], [1])
    for other in range(2, 1100):
        sampler.draw(logits.clone(), [one], [other])
    assert sampler.draw(logits.clone(), [one], [1]) == first


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([0, 1, 3, 40, 300, 5000]),
    st.sampled_from([0.0, 0.2, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.05, 1.0]),
    st.sampled_from([0.3, 1.0, 8.0]),
)
def test_truncation_equals_its_definition(
    seed: int, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    """Against a plain sort of the whole row, on logits with many ties."""
    row = random_logits(1, seed).mul(4).round().div(4)[0]
    scaled = (row.double() - row.double().max()) / temperature
    order = sorted(range(VOCAB), key=lambda i: (-float(scaled[i]), i))[: top_k or VOCAB]
    chances = scaled[order].exp() / scaled[order].exp().sum()
    reached = int((chances.cumsum(0) < top_p).sum()) + 1 if top_p < 1 else len(order)
    expected = {
        i for i, p in zip(order[:reached], chances, strict=False) if p >= min_p * chances[0]
    }
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    truncate(row, params, order[0])
    found = set(torch.isfinite(row).nonzero()[:, 0].tolist())
    # Sums of float64 in another order may put one id on either side of the border.
    assert len(found ^ expected) <= (1 if top_p < 1 else 0)
