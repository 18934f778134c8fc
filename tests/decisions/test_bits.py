"""On real weights: a decision has the same bits alone and in a crowd, cold and cached."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from lockstep import LLM, SamplingParams
from lockstep.decisions import Choice, Decision, Predicate, Question, Score, inquire

TEXT = (
    "I was charged twice for my order last week and nobody answers my emails. "
    "Please refund me right now, this is outrageous! " * 3
)
QUESTIONS: list[Question] = [
    Predicate("The message is about billing."),
    Choice("What is the tone?", {"calm": "polite", "angry": "upset", "excited": "eager"}),
    Score("How urgent is it?", ["can wait", "this week", "today"]),
    Choice("Which topic?", [f"topic {i}" for i in range(30)]),
    Choice("Which one?", ["true", True, False]),
]


def bits(decision: Decision) -> tuple[object, ...]:
    return decision.chosen, decision.probabilities, decision.mass


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2", max_context=1024, cache_bytes=64 << 20, progress=False) as made:
        yield made


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[tuple[object, ...]]:
    """Each question asked by itself on an empty cache."""
    found = []
    for question in QUESTIONS:
        llm.flush_cache()
        found.append(bits(llm.decide(TEXT, question)))
    return found


def test_no_question_sees_the_others(llm: LLM, alone: list[tuple[object, ...]]) -> None:
    llm.flush_cache()
    assert [bits(decision) for decision in llm.decide(TEXT, QUESTIONS)] == alone
    assert [bits(decision) for decision in llm.decide(TEXT, QUESTIONS[::-1])] == alone[::-1]


def test_neither_does_it_see_neighbours(llm: LLM, alone: list[tuple[object, ...]]) -> None:
    stream = llm.stream("Once upon a time", SamplingParams(max_tokens=40, temperature=1.0, seed=3))
    next(stream)
    assert [bits(decision) for decision in llm.decide(TEXT, QUESTIONS)] == alone
    stream.close()


def test_the_input_is_read_once(llm: LLM) -> None:
    llm.flush_cache()
    before = llm.stats()
    llm.decide(TEXT, QUESTIONS[:3])
    after = llm.stats()
    inquiry = inquire(llm._builder, TEXT, QUESTIONS[:3])
    suffixes = inquiry.input_tokens - inquiry.context_tokens
    asked = 3 * inquiry.context_tokens + suffixes
    assert after.prompt_tokens - before.prompt_tokens == asked
    assert after.computed_tokens - before.computed_tokens <= inquiry.context_tokens + suffixes


def test_many_options_add_up(llm: LLM) -> None:
    decision = llm.decide(TEXT, QUESTIONS[3])
    assert math.isclose(math.fsum(decision.probabilities), 1.0, rel_tol=1e-9)
    assert 0.0 < decision.mass <= 1.0


def test_single_labels_are_the_next_tokens_logprobs(llm: LLM) -> None:
    """Against the door that everybody uses: the same prompt, drawn from with alternatives."""
    inquiry = inquire(llm._builder, TEXT, [QUESTIONS[1]])
    (request,) = inquiry.requests()
    plain = SamplingParams(max_tokens=1, temperature=0.0, logprobs=100)
    (entry,) = llm.generate(list(request.prompt), plain).logprobs
    top = dict(entry.top)
    wanted = request.sampling.logprob_token_ids
    decision = llm.decide(TEXT, QUESTIONS[1])
    weights = [math.exp(top[token]) for token in wanted]
    assert math.isclose(decision.mass, math.fsum(weights), rel_tol=1e-9)
    for weight, probability in zip(weights, decision.probabilities, strict=True):
        assert math.isclose(probability, weight / math.fsum(weights), rel_tol=1e-9)


def test_sequences_are_what_scoring_them_gives(llm: LLM) -> None:
    options = ["the first", "the second", "none of them"]
    decision = llm.decide_prefix("Of the two I like", " ", options)
    ids = llm.tokenizer.encode("Of the two I like") + llm.tokenizer.encode_inside(" ")
    paths = [llm.tokenizer.encode_inside(option) for option in options]
    scores = llm.score(paths, context=ids)
    weights = [math.exp(score.total) for score in scores]
    assert math.isclose(decision.mass, math.fsum(weights), rel_tol=1e-9)
    assert np.allclose(decision.probabilities, np.array(weights) / math.fsum(weights), rtol=1e-9)


def test_late_scores_are_the_bits_of_whole_ones(llm: LLM) -> None:
    """`score_from` on cached pages against every position computed."""
    builder = llm._builder
    ids = builder.encode(TEXT)
    params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=2)
    llm.flush_cache()
    (whole,) = llm._run([builder.build(ids, params)], False)
    for first in (1, 17, len(ids) - 1):
        (late,) = llm._run([builder.build(ids, params, score_from=first)], False)
        assert late.cached_tokens == (0 if first == 1 else first - 1)
        assert late.prompt_logprobs is not None
        assert whole.prompt_logprobs is not None
        assert late.prompt_logprobs[first:] == whole.prompt_logprobs[first:]
        assert late.prompt_logprobs[:first] == (None,) * first


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_have_one_set_of_bits(llm: LLM, pooling: str) -> None:
    texts = [TEXT, "short", TEXT[:200], "a " * 300]
    llm.flush_cache()
    alone = []
    for text in texts:
        llm.flush_cache()
        alone.append(llm.embed(text, pooling=pooling))  # type: ignore[arg-type]
    together = llm.embed(texts, pooling=pooling)  # type: ignore[arg-type]
    again = llm.embed(texts[::-1], pooling=pooling)[::-1]  # type: ignore[arg-type]
    for one, two, three in zip(alone, together, again, strict=True):
        assert one.tobytes() == two.tobytes() == three.tobytes()
        assert one.dtype == np.float32
        assert math.isclose(float(np.linalg.norm(one.astype(np.float64))), 1.0, rel_tol=1e-6)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_do_not_see_chunks_nor_preemption(llm: LLM, pooling: str) -> None:
    texts = ["word " * 90, "other words " * 60, TEXT]
    expected = llm.embed(texts, pooling=pooling)  # type: ignore[arg-type]
    page = llm.info.pool_bytes // llm.info.pool_tokens * 16
    with LLM(
        "smollm2",
        max_step_tokens=24,
        max_chunk_tokens=7,
        max_context=160,
        cache_bytes=page * 12,
        progress=False,
    ) as small:
        scheduler = small._engine._scheduler  # type: ignore[union-attr]
        scheduler._has_room = lambda *_: True  # type: ignore[method-assign]
        got = small.embed(texts, pooling=pooling)  # type: ignore[arg-type]
        assert small.stats().preemptions > 0
    for one, two in zip(got, expected, strict=True):
        assert one.tobytes() == two.tobytes()


def test_pooling_is_what_its_name_says(llm: LLM) -> None:
    """The mean of prefixes' last rows is the mean of all rows; dimensions cut first."""
    ids = llm.tokenizer.encode("a b c")
    last = llm.embed(ids, pooling="last")
    assert last.shape == (llm.info.hidden_size,)
    short = llm.embed(ids, pooling="last", dimensions=10)
    np.testing.assert_allclose(short, last[:10] / np.linalg.norm(last[:10]), rtol=1e-5)
    rows = []
    for end in range(1, len(ids) + 1):
        request = llm._builder.build(
            ids[:end], SamplingParams(max_tokens=0, temperature=0.0), pooling="last"
        )
        (completion,) = llm._run([request], False)
        rows.append(np.frombuffer(completion.pooled[0], np.float32).astype(np.float64))
    mean = np.mean(rows, axis=0)
    np.testing.assert_allclose(
        llm.embed(ids, pooling="mean"), mean / np.linalg.norm(mean), rtol=1e-5, atol=1e-6
    )


def test_thresholds_choose_and_probabilities_stay(llm: LLM) -> None:
    question = QUESTIONS[1]
    assert isinstance(question, Choice)
    plain = llm.decide(TEXT, question)
    low = [replace(option, threshold=0.0) for option in question.options]
    held = llm.decide(TEXT, Choice(question.instructions, low))
    assert held.probabilities == plain.probabilities
    assert held.chosen == 0
