"""What a request reports of its prompt besides drawn tokens: late logprobs, pooled rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.types import Request, RequestError
from tests.engine.harness import drain, engine, request
from tests.fakes import FakeExecutor, hashes

PROMPT = tuple(range(100))


def asked(
    name: str, prompt: tuple[int, ...] = PROMPT, score_from: int = 1, **params: int
) -> Request:
    made = request(name, prompt, 0, prompt_logprobs=0, **params)
    return replace(made, score_from=score_from)


def pooled(name: str, kind: str, prompt: tuple[int, ...] = PROMPT) -> Request:
    return replace(request(name, prompt, 0), pooling=kind)


def test_score_from_leaves_the_rows_before_to_the_cache() -> None:
    target = engine()
    target.submit(request("first", PROMPT, 0))
    drain(target)
    target.submit(asked("late", score_from=90))
    (output,) = drain(target)["late", 0]
    assert output.cached_tokens == 89  # row 89 predicts token 90
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[:90] == (None,) * 90
    assert [entry.token for entry in output.prompt_logprobs[90:] if entry] == list(range(90, 100))
    target.submit(asked("all"))
    (output,) = drain(target)["all", 0]
    assert output.cached_tokens == 0  # every position reports


def test_a_prompt_can_be_scored_from_its_last_token_and_from_behind_it() -> None:
    target = engine()
    for first, entries in ((99, 1), (100, 0)):
        target.submit(asked(f"from {first}", score_from=first))
        (output,) = drain(target)[f"from {first}", 0]
        assert output.prompt_logprobs is not None
        assert sum(entry is not None for entry in output.prompt_logprobs) == entries


@pytest.mark.parametrize("first", [0, -1, 101])
def test_score_from_outside_the_prompt_is_refused(first: int) -> None:
    with pytest.raises(RequestError, match=r"score_from must be in \[1, 100\]"):
        engine().submit(asked("bad", score_from=first))


@pytest.mark.parametrize("kind", ["last", "mean"])
@pytest.mark.parametrize("chunk", [1, 7, 16, 512])
@pytest.mark.parametrize("cached", [False, True])
def test_pooled_rows_are_the_same_for_every_schedule(kind: str, chunk: int, cached: bool) -> None:
    executor = FakeExecutor()
    target = engine(executor, max_step_tokens=chunk, max_chunk_tokens=chunk)
    if cached:
        target.submit(request("before", PROMPT[:70], 2))
        drain(target)
    target.submit(pooled("one", kind))
    (output,) = drain(target)["one", 0]
    rows = hashes(PROMPT)
    expected = sum(rows) if kind == "mean" else rows[-1]
    assert sum(int.from_bytes(part, "little") for part in output.pooled) == expected
    assert output.cached_tokens == (70 if cached and kind == "last" else 0)


def test_pooled_runs_are_asked_for_no_logits() -> None:
    executor = FakeExecutor()
    target = engine(executor)
    target.submit(pooled("one", "last"))
    target.submit(pooled("two", "mean", PROMPT[::-1]))
    drain(target)
    assert {run.pooling for plan in executor.plans for run in plan.runs} == {"last", "mean"}
    assert all(run.sample is None for plan in executor.plans for run in plan.runs)


@pytest.mark.parametrize("change", [{"max_tokens": 1}, {"n": 2}, {"prompt_logprobs": 0}])
def test_a_pooled_request_reports_nothing_else(change: dict[str, int]) -> None:
    wanted = {"max_tokens": 0, **change}
    with pytest.raises(RequestError, match="a pooled request"):
        engine().submit(replace(request("bad", PROMPT, **wanted), pooling="last"))  # type: ignore[arg-type]


def test_an_unknown_pooling_is_refused() -> None:
    with pytest.raises(RequestError, match="pooling must be"):
        engine().submit(pooled("bad", "max"))
