"""The Python doors over an executor that repeats its prompt."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from lockstep import LLM, SamplingParams
from lockstep.config import CacheConfig, ConfigError, SchedulerConfig
from lockstep.engine.loop import Engine
from lockstep.llm import GenerationError
from lockstep.outputs import Score
from lockstep.settings import engine_config
from lockstep.types import FinishReason, LockstepError, ModelError, RequestError
from tests.fakes import FakeExecutor
from tests.server.support import fake_llm, parrot, smollm2_tokenizer

HELLO = {"role": "user", "content": "hello"}


def make(scheduler: SchedulerConfig | None = None, latency: float = 0.0) -> LLM:
    executor = FakeExecutor(
        vocab_size=49152,
        max_context=512,
        script=parrot,
        latency=latency,
        fails=lambda plan: any(13 in run.tokens for run in plan.runs),
    )
    engine = Engine(executor, scheduler or SchedulerConfig(), CacheConfig())
    return LLM.from_engine(engine, smollm2_tokenizer(), progress=False)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with make() as made:
        yield made


def test_one_in_one_out_and_a_list_for_a_list(llm: LLM) -> None:
    ids = smollm2_tokenizer().encode("by ids")
    assert llm.generate("by text").text == "by text"
    assert llm.generate(ids).text == "by ids"
    assert [c.text for c in llm.generate(["a b", "c d"])] == ["a b", "c d"]
    assert [c.text for c in llm.generate([ids, ids[:1]])] == ["by ids", "by"]
    assert llm.generate([]) == []
    assert "hello" in llm.chat([HELLO]).text
    assert ["hello" in c.text for c in llm.chat([[HELLO], [HELLO]])] == [True, True]


def test_params_for_all_or_one_each(llm: LLM) -> None:
    short, long = SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)
    prompts = ["one two three", "one two three"]
    assert [len(c.token_ids) for c in llm.generate(prompts, short)] == [1, 1]
    assert [len(c.token_ids) for c in llm.generate(prompts, [short, long])] == [1, 2]
    with pytest.raises(RequestError, match="1 sampling parameters for 2"):
        llm.generate(prompts, [short])


def test_results_carry_what_was_asked(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, n=2, logprobs=1, prompt_logprobs=0, stop=(" three",))
    first = llm.generate("one two three four", params)
    assert first.text == "one two"
    assert first.finish_reason is FinishReason.STOP
    assert first.choices[1].stop_reason == " three"
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    assert [len(choice.logprobs) for choice in first.choices] == [3, 3]
    assert first.cached_tokens == 0
    assert llm.stats().running == 0
    page = "word " * 40
    assert llm.generate(page, SamplingParams(max_tokens=1)).cached_tokens == 0
    assert llm.generate(page, SamplingParams(max_tokens=1)).cached_tokens >= 32
    llm.flush_cache()
    assert llm.generate(page, SamplingParams(max_tokens=1)).cached_tokens == 0


def test_a_stop_string_ends_one_choice_in_the_engine_not_the_others(llm: LLM) -> None:
    before = llm.stats()
    long = "stop here " + "word " * 60
    llm.generate([long, long], SamplingParams(max_tokens=60, stop=("here",)))
    assert llm.stats().generated_tokens - before.generated_tokens <= 8


def test_seeds_are_drawn_apart_when_absent_and_kept_when_given(llm: LLM) -> None:
    seeds = set()
    submit = llm._engine.submit  # type: ignore[union-attr]
    llm._engine.submit = lambda request: (seeds.add(request.sampling.seed), submit(request))[1]  # type: ignore[union-attr,func-returns-value,method-assign]
    llm.generate(["x"] * 8)
    assert len(seeds) == 8
    assert None not in seeds
    seeds.clear()
    llm.generate(["x"] * 8, SamplingParams(seed=0))
    assert seeds == {0}


def test_scores_align_with_their_tokens(llm: LLM) -> None:
    tokenizer = smollm2_tokenizer()
    whole = llm.score("The sky is blue")
    assert isinstance(whole, Score)
    assert whole.token_ids == tuple(tokenizer.encode("The sky is blue"))
    assert whole.logprobs[0] is None
    assert whole.total == sum(value for value in whole.logprobs if value is not None)
    part = llm.score(" blue", context="The sky is")
    assert isinstance(part, Score)
    assert part.token_ids == tuple(tokenizer.encode(" blue"))
    assert part.logprobs == whole.logprobs[3:]
    both = llm.score([" blue", " red"], context=["The sky is", [HELLO]])
    assert isinstance(both, list)
    assert [score.token_ids[0] for score in both] == [
        tokenizer.encode(" blue")[0],
        tokenizer.encode(" red")[0],
    ]
    assert all(value is not None for score in both for value in score.logprobs)
    with pytest.raises(RequestError, match="context has 1"):
        llm.score(["a", "b"], context=["just one"])


@pytest.mark.parametrize(
    ("prompts", "field"),
    [
        ("", "prompt"),
        ([""], "prompt"),
        (["fine", ""], "prompt"),
        ([[]], "prompt"),
        ([49152], "prompt"),
        ([-1], "prompt"),
        ([1, "x"], "prompt"),
        ([True, 2], "prompt"),
        (["fine", 3], "prompt"),
        (3, "prompt"),
        (None, "prompt"),
        ({"a": 1}, "prompt"),
        (b"bytes", "prompt"),
        ("\ud800", "prompt"),
        ("word " * 600, "prompt"),
    ],
)
def test_bad_prompts_are_named_and_nothing_runs(llm: LLM, prompts: object, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(prompts)  # type: ignore[call-overload]
    assert caught.value.field == field
    assert llm.stats().steps == 0
    assert llm.generate("fine").text == "fine"


@pytest.mark.parametrize(
    "messages", [[], "hi", [[]], [{"content": "x"}], [{"role": 3}], [{"role": "user"}], None]
)
def test_bad_conversations_are_named(llm: LLM, messages: object) -> None:
    with pytest.raises(RequestError) as caught:
        llm.chat(messages)  # type: ignore[call-overload]
    assert caught.value.field in ("messages", "prompt")


@pytest.mark.parametrize("wrong", [{"temperature": 0}, 3, "greedy", [None], [{"n": 1}], 0, {}])
@pytest.mark.parametrize("call", ["generate", "chat", "stream", "stream_chat"])
def test_params_of_another_type_are_named(llm: LLM, call: str, wrong: object) -> None:
    prompt = [HELLO] if "chat" in call else "x"
    with pytest.raises(RequestError, match="SamplingParams") as caught:
        getattr(llm, call)(prompt, wrong)
    assert caught.value.field == "params"
    assert llm.stats().steps == 0


@pytest.mark.parametrize(
    ("texts", "options", "field"),
    [
        ("x", {"context": 5}, "context"),
        ("x", {"context": b"bytes"}, "context"),
        ("x", {"context": ""}, "context"),
        (["x", "y"], {"context": ["a", 5]}, "context"),
        ("x", {"context": [49152]}, "context"),
        ("x", {"alternatives": None}, "alternatives"),
        ("x", {"alternatives": True}, "alternatives"),
        (5, {}, "prompt"),
    ],
)
def test_bad_scores_are_named(
    llm: LLM, texts: object, options: dict[str, object], field: str
) -> None:
    with pytest.raises(RequestError) as caught:
        llm.score(texts, **options)  # type: ignore[arg-type]
    assert caught.value.field == field
    assert llm.stats().steps == 0


@pytest.mark.parametrize(
    "field", ["ignore_eos", "skip_special_tokens", "include_stop_str_in_output"]
)
@pytest.mark.parametrize("value", ["no", 0, None])
def test_switches_must_be_booleans(field: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("threads", "2"),
        ("threads", True),
        ("max_context", 1.5),
        ("max_queue", None),
        ("page_tokens", "16"),
        ("prefix_caching", "no"),
        ("prefix_caching", 1),
        ("cuda_graphs", "no"),
        ("device", 0),
    ],
)
def test_settings_of_another_type_are_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be"):
        LLM("smollm2", **{name: value})  # type: ignore[arg-type]


def test_a_failed_step_is_an_error_that_keeps_the_other_answers(llm: LLM) -> None:
    with make(SchedulerConfig(max_sequences=1)) as one_by_one:
        with pytest.raises(GenerationError, match="1 of 2 answers failed") as caught:
            one_by_one.generate([[500, 501], [13, 500]])
        good, bad = caught.value.completions
        assert good.token_ids[:2] == (500, 501)
        assert bad.finish_reason is FinishReason.ERROR
        assert one_by_one.generate("fine").text == "fine"


def test_more_prompts_than_the_queue_holds_all_run() -> None:
    with make(SchedulerConfig(max_queue=2, max_sequences=2)) as llm:
        texts = [f"number {index}" for index in range(20)]
        assert [completion.text for completion in llm.generate(texts)] == texts


def test_streams_join_to_the_whole_and_may_interleave_with_calls(llm: LLM) -> None:
    text = "streams é and 🙂 join"
    pieces = []
    for delta in llm.stream(text, SamplingParams(max_tokens=40)):
        pieces.append(delta.text)
        assert llm.generate("meanwhile").text == "meanwhile"
    assert "".join(pieces) == text
    stream = llm.stream_chat([HELLO])
    next(stream)
    stream.close()
    llm.generate("one more step")
    assert llm.stats().cancelled == 1


def test_threads_share_the_engine(llm: LLM) -> None:
    results: dict[int, list[str]] = {}

    def work(index: int) -> None:
        prompts = [f"thread {index} prompt {number}" for number in range(5)]
        results[index] = [c.text for c in llm.generate(prompts)]
        assert results[index] == prompts

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(results) == 4


def test_ctrl_c_cancels_between_steps() -> None:
    # As at a terminal, also where the suite runs in the background of a shell, which ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _interrupt_between_steps()
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupt_between_steps() -> None:
    with make(latency=0.01) as llm:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate("word " * 400, SamplingParams(max_tokens=100_000, ignore_eos=True))
        assert llm.generate("fine").text == "fine"
        assert llm.stats().running == 0
        assert llm.stats().failed == 0
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_closed_and_unknown_things_say_so() -> None:
    llm = make()
    llm.close()
    llm.close()
    with pytest.raises(LockstepError, match="closed"):
        llm.generate("x")
    with pytest.raises(ModelError, match="no-such-model"):
        LLM("no-such-model")
    with pytest.raises(ConfigError, match="dtype must be one of"):
        LLM("smollm2", dtype="float8")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="unknown setting 'treads'"):
        LLM("smollm2", treads=2)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="threads"):
        LLM("smollm2", threads=-1)


def test_settings_reach_their_rooms() -> None:
    config = engine_config("m", threads=3, cache_bytes=5, max_queue=7, prefix_caching=False)
    assert config.model.name == "m"
    assert config.model.threads == 3
    assert config.cache.memory_bytes == 5
    assert config.cache.prefix_caching is False
    assert config.scheduler.max_queue == 7


async def test_the_async_door_answers_alike() -> None:
    llm = fake_llm()
    await llm.start()
    try:
        assert (await llm.generate("one")).text == "one"
        assert [c.text for c in await llm.generate(["a b", "c d"])] == ["a b", "c d"]
        assert "hello" in (await llm.chat([HELLO])).text
        with make() as blocking:
            assert await llm.score(" blue", context="The sky is") == blocking.score(
                " blue", context="The sky is"
            )
        pieces = [delta.text async for delta in llm.stream_chat([HELLO])]
        assert "".join(pieces) == (await llm.chat([HELLO])).text
        crowd = await asyncio.gather(*(llm.generate(f"guest {index}") for index in range(50)))
        assert [c.text for c in crowd] == [f"guest {index}" for index in range(50)]
        with pytest.raises(RequestError) as caught:
            await llm.generate(["fine", "word " * 600])
        assert caught.value.code == "context_length_exceeded"
        llm.flush_cache()
    finally:
        await llm.close()


async def test_the_async_door_needs_a_start() -> None:
    llm = fake_llm()
    with pytest.raises(LockstepError, match="not started"):
        await llm.generate("x")
    await llm.close()
