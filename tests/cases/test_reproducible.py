"""Answers of the real SmolLM2 do not move by a bit, whoever shares the step or the cache."""

from __future__ import annotations

import struct

from lockstep import LLM, Completion, SamplingParams

SHARED = "You are a careful assistant. Read the statement and answer True or False. Statement: "
# The model is undecided about these: see the gap that the test asserts.
STATEMENTS = [
    "Oil is heavier than Cork.",
    "Milk is heavier than Lead.",
    "Oil is heavier than Gold.",
    "Lead is heavier than Iron.",
]
NEAR_TIE = 0.08  # nats between the two most probable tokens


def bits(completion: Completion) -> tuple[tuple[int, ...], bytes]:
    """Tokens, and every logprob's float bits."""
    values = [entry.logprob for choice in completion.choices for entry in choice.logprobs]
    values += [v for choice in completion.choices for e in choice.logprobs for _, v in e.top]
    tokens = tuple(token for choice in completion.choices for token in choice.token_ids)
    assert values
    return tokens, struct.pack(f"<{len(values)}d", *values)


def test_c01_three_hundred_decodes_at_once_equal_one(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, ignore_eos=True)
    prompts = [f"Line {index} says" for index in range(300)]
    before = llm.stats()
    crowd = llm.generate(prompts, params)
    assert llm.stats().steps - before.steps < 30, "they ran together"
    llm.flush_cache()
    for index in (0, 1, 150, 255, 256, 299):
        alone = llm.generate(prompts[index], params)
        assert bits(alone) == bits(crowd[index]), index


def test_c02_a_prefix_hit_does_not_flip_a_near_tie(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=5)
    prompts = [f"{SHARED}{statement} Answer:" for statement in STATEMENTS]
    cold = []
    for prompt in prompts:
        llm.flush_cache()
        cold.append(llm.generate(prompt, params))
        assert cold[-1].cached_tokens == 0
        (first, one), (second, other) = cold[-1].logprobs[0].top[:2]
        assert {llm.tokenizer.decode([token]) for token in (first, second)} == {" True", " False"}
        assert one - other < NEAR_TIE, prompt
    llm.flush_cache()
    llm.generate(SHARED, SamplingParams(max_tokens=1))
    warm = [llm.generate(prompt, params) for prompt in prompts]
    assert all(completion.cached_tokens > 0 for completion in warm)
    assert [bits(completion) for completion in warm] == [bits(completion) for completion in cold]


def test_c03_forty_prompts_run_three_times_to_the_bit(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=1)
    prompts = [
        f"Question {index}: what is {index} plus {index * 7 % 13}? Think step by step. Answer:"
        for index in range(40)
    ]
    llm.flush_cache()
    first = llm.generate(prompts, params)
    second = llm.generate(prompts, params)
    assert all(completion.cached_tokens > 0 for completion in second)
    llm.flush_cache()
    third = [llm.generate(prompt, params) for prompt in prompts[:5]]
    third += llm.generate(prompts[5:], params)
    assert third[0].cached_tokens == 0
    assert [bits(c) for c in first] == [bits(c) for c in second] == [bits(c) for c in third]


def test_c11_a_seed_gives_one_text_together_and_alone(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=42, max_tokens=16, logprobs=0)
    prompt = "Once upon a time there was"
    together = llm.generate([prompt, prompt], params)
    alone = [llm.generate(prompt, params) for _ in range(2)]
    assert len({bits(completion) for completion in [*together, *alone]}) == 1
    other = llm.generate(prompt, SamplingParams(temperature=1.0, seed=43, max_tokens=16))
    assert other.token_ids != alone[0].token_ids
    strangers = ["A stranger is here", prompt, "Yet another"] * 5
    crowd = llm.generate(strangers, params)
    assert all(bits(completion) == bits(alone[0]) for completion in crowd[1::3])


def test_n_choices_are_the_choices_of_the_same_request_alone(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=9, n=4, max_tokens=10, logprobs=1)
    llm.flush_cache()
    first = llm.generate("The old map shows", params)
    crowd = llm.generate(["The old map shows", "Something else", "The old"], params)
    assert bits(first) == bits(crowd[0])
    assert len({choice.token_ids for choice in first.choices}) == 4
