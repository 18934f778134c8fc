"""Sequences under a grammar in the engine: they end well, and neighbours change nothing."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from functools import cache

import pytest
import torch

from lockstep.config import CacheConfig, EngineConfig, ModelOptions, SchedulerConfig
from lockstep.engine.loop import Engine
from lockstep.text import Tokenizer
from lockstep.text.grammar_matcher import GrammarCompiler
from lockstep.types import FinishReason, Grammar, Request, RequestError, SequenceOutput
from lockstep.weights import PACKAGED_MODELS, open_checkpoint
from tests.engine.harness import drain, request, tokens
from tests.fakes import FakeExecutor

VOCABULARY = 49152
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "s": {"type": ["string", "null"], "maxLength": 9}},
    "required": ["n", "s"],
    "additionalProperties": False,
}
GRAMMARS = [
    Grammar("json_schema", json.dumps(SCHEMA)),
    Grammar("regex", r"[a-z]{3,40}(-\d+)*"),
    Grammar("choice", '["yes", "no", "perhaps tomorrow"]'),
    Grammar("ebnf", 'start: (WORD " ")+ %json {"type": "boolean"}\nWORD: /[a-z]+/'),
]


@cache
def tokenizer() -> Tokenizer:
    model = next(model for model in PACKAGED_MODELS if model.name == "smollm2")
    if not model.installed():
        pytest.skip(f"smollm2 is not installed: {model.install}")
    return open_checkpoint("smollm2").tokenizer()


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCABULARY)


def engine(executor: FakeExecutor | None = None, **settings: int) -> Engine:
    executor = executor or FakeExecutor(vocab_size=VOCABULARY)
    return Engine(executor, SchedulerConfig(**settings), CacheConfig(), grammars=compiler())


def constrained(
    name: str,
    grammar: Grammar,
    most: int | None = 40,
    prompt: Sequence[int] = (1, 2, 3),
    **extra: object,
) -> Request:
    stops = extra.pop("stop_ids", tokenizer().eos_ids)
    return request(name, prompt, most, grammar=grammar, stop_ids=stops, **extra)  # type: ignore[arg-type]


def run(
    *work: Request, target: Engine | None = None
) -> dict[tuple[str, int], list[SequenceOutput]]:
    target = target or engine()
    for one in work:
        target.submit(one)
    return drain(target)


def answer(outputs: Sequence[SequenceOutput]) -> tuple[str, FinishReason | None]:
    ids = [token for token in tokens(outputs) if token not in tokenizer().eos_ids]
    text = b"".join(map(tokenizer().token_bytes, ids)).decode("utf-8", "replace")
    return text, outputs[-1].finish


def one(
    grammar: Grammar, most: int | None = 40, **extra: object
) -> tuple[str, FinishReason | None]:
    (outputs,) = run(constrained("r", grammar, most, **extra)).values()
    return answer(outputs)


# --- the end of a text ----------------------------------------------------------------------


def test_a_text_that_cannot_go_on_ends_without_an_end_token() -> None:
    (outputs,) = run(constrained("r", Grammar("choice", '["yes", "no"]'))).values()
    assert answer(outputs) in (("yes", FinishReason.STOP), ("no", FinishReason.STOP))
    assert not set(tokens(outputs)) & set(tokenizer().eos_ids)


def test_max_tokens_cuts_with_length() -> None:
    text, finish = one(Grammar("regex", "a{30}b{30}"), 3)
    assert finish is FinishReason.LENGTH
    assert set(text) <= {"a", "b"}


def test_the_last_token_allowed_may_complete_the_text() -> None:
    ids = tokenizer().encode("yes", add_special_tokens=False)
    assert one(Grammar("choice", '["yes"]'), len(ids) + 3, bad_ids=())[1] is FinishReason.STOP
    text, finish = one(Grammar("regex", "é"), 2)
    assert finish is FinishReason.STOP
    assert text == "é"


def test_ignore_eos_goes_on_as_long_as_the_grammar_does() -> None:
    text, finish = one(Grammar("regex", "(ab)*"), 30, stop_ids=(), ignore_eos=True)
    assert finish is FinishReason.LENGTH
    assert len(text) >= 30
    assert one(Grammar("regex", "(ab){3}"), 30, stop_ids=(), ignore_eos=True) == (
        "ababab",
        FinishReason.STOP,
    )


def test_min_tokens_forbids_the_end_but_cannot_break_the_grammar() -> None:
    (outputs,) = run(constrained("r", Grammar("regex", "a*"), 60, min_tokens=20)).values()
    assert len(tokens(outputs)) >= 20
    text, finish = one(Grammar("choice", '["yes"]'), 60, min_tokens=20)
    assert (text, finish) == ("yes", FinishReason.STOP)
    # The mask holds nothing but the end here, which min_tokens forbids.
    text, finish = one(Grammar("regex", "(?:yes)?"), 60, min_tokens=20)
    assert finish is FinishReason.STOP


def test_an_ordinary_stop_id_is_text_and_ends_the_sequence() -> None:
    (a,) = tokenizer().encode("a", add_special_tokens=False)
    bad = tuple(
        (token,) for token in range(VOCABULARY) if tokenizer().token_bytes(token)[:2] == b"aa"
    )
    (outputs,) = run(
        constrained("r", Grammar("regex", "a{50}"), stop_ids=(*tokenizer().eos_ids, a), bad_ids=bad)
    ).values()
    assert tokens(outputs) == [a]
    assert outputs[-1].finish is FinishReason.STOP


def test_bad_words_narrow_the_grammar() -> None:
    yes = tuple((t,) for t in range(VOCABULARY) if tokenizer().token_bytes(t)[:1] == b"y")
    assert one(Grammar("choice", '["yes", "no"]'), bad_ids=yes) == ("no", FinishReason.STOP)


def test_when_nothing_is_left_the_sequence_fails_and_others_go_on() -> None:
    both = tuple((t,) for t in range(VOCABULARY) if tokenizer().token_bytes(t)[:1] in (b"y", b"n"))
    grammar = Grammar("choice", '["yes", "no"]')
    found = run(
        constrained("stuck", grammar, bad_ids=both),
        constrained("fine", grammar),
        request("free", [4, 5, 6], 5),
    )
    (last,) = found["stuck", 0]
    assert last.finish is FinishReason.ERROR
    assert last.error.startswith("grammar: ")
    assert answer(found["fine", 0])[1] is FinishReason.STOP
    assert tokens(found["free", 0]) == tokens(run(request("free", [4, 5, 6], 5))["free", 0])


def test_bad_words_may_force_an_end_where_the_text_is_complete() -> None:
    b = tuple((t,) for t in range(VOCABULARY) if b"b" in tokenizer().token_bytes(t))
    assert one(Grammar("regex", "a?b*"), 9, bad_ids=b, stop_ids=()) in (
        ("", FinishReason.STOP),
        ("a", FinishReason.STOP),
    )


def test_a_grammar_at_the_librarys_limits_fails_alone() -> None:
    properties = {f"p{i}": {"type": "string"} for i in range(1000)}
    heavy = Grammar("json_schema", '{"type": "string", "minLength": 1000000, "pattern": "^a*$"}')
    wide = Grammar("json_schema", json.dumps({"type": "object", "properties": properties}))
    found = run(
        constrained("heavy", heavy, 30),
        constrained("wide", wide, 30),
        constrained("fine", GRAMMARS[2]),
    )
    assert answer(found["fine", 0])[1] is FinishReason.STOP
    for name in ("heavy", "wide"):
        assert found[name, 0][-1].finish in (
            FinishReason.LENGTH,
            FinishReason.ERROR,
            FinishReason.STOP,
        )


def test_a_prompt_that_is_only_scored_needs_no_token() -> None:
    (outputs,) = run(constrained("r", GRAMMARS[0], 0, prompt_logprobs=0)).values()
    assert outputs[-1].finish is FinishReason.LENGTH
    assert not tokens(outputs)


# --- what is refused ------------------------------------------------------------------------


def test_a_bad_grammar_is_refused_under_the_clients_name_for_it() -> None:
    target = engine()
    bad = Grammar("regex", "(", name="guided_regex")
    for _ in range(2):
        with pytest.raises(RequestError) as caught:
            target.submit(constrained("r", bad))
        assert caught.value.field == "guided_regex"
        assert "guided_regex" in str(caught.value)
    assert not target.has_work()
    assert run(constrained("r", GRAMMARS[2]), target=target)


def test_an_engine_without_a_tokenizer_refuses_grammars() -> None:
    target = Engine(FakeExecutor(), SchedulerConfig(), CacheConfig())
    with pytest.raises(RequestError, match="no tokenizer"):
        target.submit(request("r", [1], 3, grammar=GRAMMARS[0]))
    with pytest.raises(RequestError, match="kind"):
        Grammar("xml", "")  # type: ignore[arg-type]


# --- neighbours -----------------------------------------------------------------------------


def crowd(count: int) -> list[Request]:
    chance = random.Random(7)
    shared = [chance.randrange(VOCABULARY) for _ in range(60)]
    work = []
    for number in range(count):
        prompt = shared[: chance.randint(10, 60)]
        prompt += [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 20))]
        if number % 5 == 4:
            work.append(request(f"r{number}", prompt, 20, seed=number))
        else:
            grammar = GRAMMARS[number % len(GRAMMARS)]
            work.append(
                constrained(f"r{number}", grammar, 30, prompt, seed=number, n=1 + number % 2)
            )
    return work


def results(found: dict[tuple[str, int], list[SequenceOutput]]) -> dict[tuple[str, int], object]:
    return {key: (tokens(outputs), outputs[-1].finish) for key, outputs in found.items()}


def test_a_crowd_in_any_order_equals_each_alone() -> None:
    """A pool so small that sequences are preempted and computed again; prefixes are shared."""
    work = crowd(16)
    alone: dict[tuple[str, int], object] = {}
    for item in work:
        alone |= results(run(item))
    preempted = 0
    for order in (work, work[::-1], random.Random(2).sample(work, len(work))):
        executor = FakeExecutor(vocab_size=VOCABULARY, num_slabs=24)
        executor.keep_plans = False
        target = engine(executor, max_sequences=12, max_step_tokens=48)
        target._scheduler._has_room = lambda *_: True  # type: ignore[method-assign]
        assert results(run(*order, target=target)) == alone
        preempted += target.stats().preemptions
        assert target.stats().cached_tokens > 0
    assert preempted > 5
    for (name, _choice), (ids, finish) in alone.items():  # type: ignore[misc]
        number = int(name[1:])
        if number % 5 != 4 and number % len(GRAMMARS) == 0 and finish is FinishReason.STOP:
            text, _ = answer([SequenceOutput(name, 0, tuple(ids), finish=finish)])
            assert set(json.loads(text)) == {"n", "s"}


def test_a_grammar_that_was_compiled_anew_gives_the_same_text() -> None:
    item = constrained("r", GRAMMARS[0], 40, seed=3)
    first = results(run(item))
    fresh = Engine(
        FakeExecutor(vocab_size=VOCABULARY),
        SchedulerConfig(),
        CacheConfig(),
        grammars=GrammarCompiler(tokenizer, VOCABULARY),
    )
    assert results(run(item, target=fresh)) == first


def test_masks_are_computed_while_the_step_runs() -> None:
    """The mask of a step is asked for when it is planned, and waited for when it is used."""
    executor = FakeExecutor(vocab_size=VOCABULARY, latency=0.05)
    waited: list[float] = []
    whole = executor._read

    def timed(run: object) -> object:
        began = time.perf_counter()
        try:
            return whole(run)  # type: ignore[arg-type]
        finally:
            waited.append(time.perf_counter() - began)

    executor._read = timed  # type: ignore[assignment,method-assign]
    run(constrained("r", Grammar("json_object"), 12), target=engine(executor))
    assert sorted(waited)[len(waited) // 2] < 0.02


def test_a_crowd_on_a_real_model_equals_each_alone() -> None:
    """SmolLM2 in a pool that holds two or three of these sequences: tokens and logprobs."""
    tokenizer()  # skips where it is not installed
    config = EngineConfig(
        ModelOptions("smollm2", device="cpu", threads=1), CacheConfig(memory_bytes=4 << 20)
    )
    with torch.inference_mode():
        target = Engine.from_config(config)
    target._scheduler._has_room = lambda *_: True  # type: ignore[method-assign]
    ids = tokenizer().encode("A list of things that one sees on a walk through Paris: ")
    work = []
    for number in range(6):
        grammar = GRAMMARS[number % len(GRAMMARS)] if number % 3 != 2 else None
        stops = tokenizer().eos_ids
        extra = {"temperature": (0.0, 1.0)[number % 2], "seed": number, "logprobs": 1}
        prompt = ids * (1 + number % 2) + ids[:number]
        work.append(request(f"r{number}", prompt, 20, grammar=grammar, stop_ids=stops, **extra))

    def told(found: dict[tuple[str, int], list[SequenceOutput]]) -> dict[object, object]:
        return {
            key: (tokens(outputs), [entry for out in outputs for entry in out.logprobs])
            for key, outputs in found.items()
        }

    alone: dict[object, object] = {}
    for item in work:
        alone |= told(run(item, target=target))
        target.flush_cache()
    before = target.stats()
    assert told(run(*work, target=target)) == alone
    assert target.stats().preemptions > before.preemptions
    assert target.stats().cached_tokens > before.cached_tokens
    target.close()
