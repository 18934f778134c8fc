"""Decide, then write: exact candidates, labels of several tokens, rows that must not end a run."""

from __future__ import annotations

import math

import pytest

from lockstep import LLM, SamplingParams

TICKET = "My order never arrived and support does not reply. Should we escalate? Answer:"
EXAM = (
    "Which of these is a metal?\nA. Oak\nB. Iron\nC. Wool\nD. Salt\n"
    "Answer with one letter.\nAnswer:"
)


def test_k01_exact_logprobs_of_candidates_far_outside_the_top_in_one_pass(llm: LLM) -> None:
    candidates = [" Yes", " No", " Maybe", " Perhaps", " zebra"]
    ids = [llm.tokenizer.encode_inside(text) for text in candidates]
    assert all(len(path) == 1 for path in ids)
    wanted = tuple(path[0] for path in ids)
    llm.flush_cache()
    before = llm.stats()
    params = SamplingParams(temperature=0, max_tokens=1, logprob_token_ids=wanted, logprobs=20)
    completion = llm.generate(TICKET, params)
    after = llm.stats()
    assert after.computed_tokens - before.computed_tokens == len(completion.prompt_token_ids)
    assert after.steps - before.steps == 1
    (entry,) = completion.logprobs
    shown = {token for token, _ in entry.top}
    assert [token for token in wanted if token not in shown], "one lies outside the top"
    for text, logprob in zip(candidates, entry.given, strict=True):
        assert math.isfinite(logprob)
        assert llm.score(text, context=TICKET).logprobs == (logprob,)  # to the bit
    decision = llm.decide_prefix(TICKET, "", candidates)
    assert decision.mass == pytest.approx(math.fsum(math.exp(p) for p in entry.given))


def test_k02_four_letters_need_no_thousand_logprobs(llm: LLM) -> None:
    letters = [" A", " B", " C", " D"]
    llm.flush_cache()
    before = llm.stats()
    decision = llm.decide_prefix(EXAM, "", letters)
    after = llm.stats()
    assert after.steps - before.steps == 1
    assert [option.value for option in decision.question.options] == letters
    scores = [llm.score(letter, context=EXAM) for letter in letters]
    total = math.fsum(math.exp(score.total) for score in scores)
    for probability, score in zip(decision.probabilities, scores, strict=True):
        assert probability == pytest.approx(math.exp(score.total) / total, rel=1e-12)


def test_k02_labels_of_several_tokens_count_whole(llm: LLM) -> None:
    labels = [" to be escalated now", " to be closed", " to be escalated later"]
    llm.flush_cache()
    decision = llm.decide_prefix(TICKET, "", labels)
    totals = [llm.score(label, context=TICKET).total for label in labels]
    mass = math.fsum(map(math.exp, totals))
    assert decision.mass == pytest.approx(mass, rel=1e-12)
    for probability, score in zip(decision.probabilities, totals, strict=True):
        assert probability == pytest.approx(math.exp(score) / mass, rel=1e-12)


def test_k02_a_space_or_a_capital_makes_another_option(llm: LLM) -> None:
    variants = ["Yes", " Yes", "yes", " yes"]
    decision = llm.decide_prefix(TICKET, "", variants)
    assert [option.value for option in decision.question.options] == variants
    assert len(set(decision.probabilities)) == 4
    bare = TICKET.removesuffix(":")
    assert llm.decide_prefix(bare, ":", variants).probabilities == decision.probabilities
