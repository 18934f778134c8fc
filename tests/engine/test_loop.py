"""The engine's door: what it refuses, how sequences end, and what survives a failure."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lockstep.config import ConfigError
from lockstep.runner.plan import Plan, RunResult, StepResult
from lockstep.types import FinishReason, RequestError
from tests.engine.harness import drain, engine, request, tokens
from tests.fakes import FakeExecutor, expected_tokens


def refusal(target: object, *args: object, **more: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        target.submit(request("r", *args, **more))  # type: ignore[attr-defined, arg-type]
    assert not target.has_work()  # type: ignore[attr-defined]
    return caught.value


def test_a20_a21_prompts_at_and_beyond_the_context() -> None:
    target = engine(FakeExecutor(max_context=32))
    error = refusal(target, range(33), 1)
    assert error.code == "context_length_exceeded"
    assert "33" in str(error)
    assert "32" in str(error)
    assert refusal(target, range(33), 0).code == "context_length_exceeded"
    assert refusal(target, range(32), 1).code == "context_length_exceeded"
    target.submit(request("scored", range(32), 0, prompt_logprobs=1))
    (output,) = drain(target)[("scored", 0)]
    assert output.finish is FinishReason.LENGTH
    assert output.tokens == ()
    assert output.prompt_logprobs is not None
    assert [entry and entry.token for entry in output.prompt_logprobs] == [None, *range(1, 32)]


def test_the_context_ends_an_answer() -> None:
    target = engine(FakeExecutor(max_context=32))
    target.submit(request("r", range(30), None))
    target.submit(request("s", range(30), 100))
    for outputs in drain(target).values():
        assert tokens(outputs) == expected_tokens(range(30), 2, 1000)
        assert outputs[-1].finish is FinishReason.LENGTH


def test_a_context_smaller_than_the_models_can_be_set_and_not_a_larger_one() -> None:
    target = engine(max_context=16)
    assert target.info.max_context == 16
    assert "16" in str(refusal(target, range(17)))
    with pytest.raises(ConfigError, match=r"5000.*4096"):
        engine(max_context=5000)


def test_what_the_pool_can_never_hold_is_refused_with_both_numbers() -> None:
    target = engine(FakeExecutor(num_slabs=4, page_tokens=4))
    error = refusal(target, range(10), 7)
    assert "17" in str(error)
    assert "16" in str(error)
    assert error.field == "max_tokens"
    assert refusal(target, range(16), 1).field == "prompt"
    target.submit(request("fits", range(10), 6))
    target.submit(request("open", range(10), None))  # ends where the pool does
    found = drain(target)
    assert len(tokens(found[("fits", 0)])) == len(tokens(found[("open", 0)])) == 6


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("prompt", {"prompt": (5, 1000)}),
        ("prompt", {"prompt": (-1,)}),
        ("prompt", {"prompt": ("a",)}),
        ("prompt", {"prompt": (True,)}),
        ("prompt", {"prompt": ()}),
        ("logit_bias", {"logit_bias": {1000: -100.0}}),
        ("logprob_token_ids", {"logprob_token_ids": (1000,)}),
        ("stop_token_ids", {"stop_ids": (1000,)}),
        ("bad_words", {"bad_ids": ((3, 1000),)}),
    ],
)
def test_a23_ids_beyond_the_vocabulary_are_refused(field: str, more: dict[str, object]) -> None:
    target = engine()
    assert refusal(target, more.pop("prompt", (1,)), **more).field == field
    target.submit(request("next", [1]))
    assert len(tokens(drain(target)[("next", 0)])) == 4


def test_a_live_id_cannot_be_used_twice_and_a_finished_one_can() -> None:
    target = engine()
    target.submit(request("r", [1]))
    with pytest.raises(RequestError, match="'r' is in use"):
        target.submit(request("r", [1]))
    drain(target)
    target.submit(request("r", [1]))
    drain(target)


def test_a_full_queue_is_refused() -> None:
    target = engine(max_queue=2)
    target.submit(request("a", [1]))
    target.submit(request("b", [1]))
    with pytest.raises(RequestError) as caught:
        target.submit(request("c", [1]))
    assert caught.value.code == "queue_full"
    assert len(drain(target)) == 2


def test_stop_ids_end_a_sequence_but_not_before_min_tokens() -> None:
    script = iter([7, 7, 5, 7, 9, 9])
    target = engine(FakeExecutor(script=lambda *_: next(script)))
    target.submit(request("r", [1], 10, min_tokens=2, stop_ids=(7,)))
    outputs = drain(target)[("r", 0)]
    assert tokens(outputs) == [7, 7, 5, 7]
    assert outputs[-1].finish is FinishReason.STOP


def test_a_stop_id_at_the_last_place_is_a_stop() -> None:
    target = engine(FakeExecutor(script=lambda *_: 7))
    target.submit(request("r", [1], 1, stop_ids=(7,)))
    assert drain(target)[("r", 0)][-1].finish is FinishReason.STOP


def test_a30_choices_differ_and_each_runs_to_its_end() -> None:
    target = engine()
    target.submit(request("r", range(40), 6, n=3, seed=1))
    found = drain(target)
    answers = [tokens(found[("r", choice)]) for choice in range(3)]
    assert answers == [expected_tokens(range(40), 6, 1000, choice, 1) for choice in range(3)]
    assert len({tuple(answer) for answer in answers}) == 3
    # The prompt is computed once; the others compute its last token for their own draw.
    assert target.stats().computed_tokens == 40 + 2 + 3 * 5


@pytest.mark.parametrize("keep", [True, False])
def test_choices_share_the_prompt_whether_or_not_prefixes_are_kept(keep: bool) -> None:
    target = engine(keep=keep)
    target.submit(request("a", range(40), 6, n=3))
    drain(target)
    target.submit(request("b", range(40), 6))
    cached = drain(target)[("b", 0)][0].cached_tokens
    assert cached == (39 if keep else 0)
    assert target.stats().pages_cached == (target.stats().pages_cached if keep else 0)


def test_c03_cached_tokens_are_reported_and_flushing_forgets() -> None:
    target = engine()
    seen = []
    for name in "abc":
        if name == "c":
            target.flush_cache()
        target.submit(request(name, range(50)))
        outputs = drain(target)[(name, 0)]
        assert tokens(outputs) == expected_tokens(range(50), 4, 1000)
        seen.append({output.cached_tokens for output in outputs})
    assert seen == [{0}, {49}, {0}]


def test_e08_a_salt_sees_only_its_own_prefixes() -> None:
    target = engine()
    seen = []
    for number, salt in enumerate("aab"):
        target.submit(request(f"r{number}", range(50), salt=salt))
        seen.append(drain(target)[(f"r{number}", 0)][0].cached_tokens)
    assert seen == [0, 49, 0]


def test_a17_a18_prompt_logprobs_are_whole_every_time() -> None:
    target = engine(max_step_tokens=16)
    for name in "ab":
        target.submit(request(name, range(33), 1, prompt_logprobs=1, n=2))
        found = drain(target)
        first, second = found[(name, 0)][0], found[(name, 1)][0]
        assert first.prompt_logprobs is not None
        assert [entry and entry.token for entry in first.prompt_logprobs] == [None, *range(1, 33)]
        assert first.cached_tokens == 0
        assert second.prompt_logprobs is None  # once a request
    target.submit(request("c", range(33), 0, prompt_logprobs=0))
    (output,) = drain(target)[("c", 0)]
    assert output.finish is FinishReason.LENGTH
    assert output.tokens == ()
    target.submit(request("one", [3], 0, prompt_logprobs=0))
    assert drain(target)[("one", 0)][0].prompt_logprobs == (None,)


def test_logprobs_come_when_asked_for() -> None:
    target = engine()
    target.submit(request("with", [1], logprobs=1))
    target.submit(request("without", [1]))
    found = drain(target)
    assert [o.logprobs[0].token for o in found[("with", 0)]] == tokens(found[("with", 0)])
    assert all(o.logprobs == () for o in found[("without", 0)])


def test_cancelling_ends_a_request_or_one_choice() -> None:
    target = engine()
    target.submit(request("r", range(20), 50, n=3))
    target.submit(request("s", range(20, 40), 3))
    for _ in range(4):
        target.step()
    target.cancel("unknown")
    target.cancel("r", 1)
    assert [(o.choice, o.finish) for o in target.step() if o.finish] == [
        (1, FinishReason.CANCELLED)
    ]
    target.cancel("r")
    target.cancel("r")
    found = drain(target)
    assert found[("r", 0)][0].finish is FinishReason.CANCELLED
    assert found[("r", 2)][0].finish is FinishReason.CANCELLED
    stats = target.stats()
    assert (stats.cancelled, stats.finished, stats.running, stats.waiting) == (3, 1, 0, 0)


def test_cancelled_while_waiting_is_reported_too() -> None:
    target = engine(max_sequences=1)
    target.submit(request("a", [1], 3))
    target.submit(request("b", [2], 3))
    target.cancel("b")
    assert target.has_work()
    assert [(o.request, o.finish) for o in target.step()] == [
        ("b", FinishReason.CANCELLED),
        ("a", None),
    ]


def test_a_failing_step_ends_only_its_own_sequences() -> None:
    failing = {2}
    executor = FakeExecutor(fails=lambda plan: plan.step in failing)
    target = engine(executor, max_sequences=2)
    for number in range(4):
        target.submit(request(f"r{number}", [*range(40), number], 5))
    found = drain(target)
    ended = {name: outputs[-1] for (name, _), outputs in found.items()}
    errors = [name for name, output in ended.items() if output.finish is FinishReason.ERROR]
    assert errors
    assert len(errors) < 4
    assert all("RuntimeError: the fake was told to fail" in ended[name].error for name in errors)
    for number in range(4):
        if f"r{number}" not in errors:
            whole = expected_tokens([*range(40), number], 5, 1000)
            assert tokens(found[(f"r{number}", 0)]) == whole
    assert target.stats().failed == len(errors)


def test_pages_of_a_failed_step_are_never_hits() -> None:
    executor = FakeExecutor(fails=lambda plan: plan.step == 1)
    target = engine(executor)
    target.submit(request("a", range(40)))
    assert drain(target)[("a", 0)][-1].finish is FinishReason.ERROR
    target.submit(request("b", range(40)))
    outputs = drain(target)[("b", 0)]
    assert outputs[0].cached_tokens == 0
    assert tokens(outputs) == expected_tokens(range(40), 4, 1000)


class Unsound(FakeExecutor):
    """Finds one run's numbers worthless, as a runner does whose hidden states are not finite."""

    def execute(self, plan: Plan) -> StepResult:
        result = super().execute(plan)
        runs = tuple(
            RunResult(drawn.token, error="not finite") if 13 in run.tokens else drawn
            for run, drawn in zip(plan.runs, result.runs, strict=True)
        )
        return StepResult(plan.step, runs)


def test_worthless_numbers_end_their_own_sequence_only() -> None:
    target = engine(Unsound())
    target.submit(request("bad", [*range(20, 40), 13], 5))
    target.submit(request("good", range(20, 40), 5))
    found = drain(target)
    (ended,) = found[("bad", 0)]
    assert (ended.finish, ended.error, ended.tokens) == (FinishReason.ERROR, "not finite", ())
    assert tokens(found[("good", 0)]) == expected_tokens(range(20, 40), 5, 1000)
    assert target.stats().failed == 1
    target.check_integrity()


def test_pages_behind_worthless_numbers_are_never_hits() -> None:
    target = engine(Unsound())
    target.submit(request("bad", [*range(20, 80), 13], 5))
    drain(target)
    target.submit(request("good", range(20, 80), 5))
    outputs = drain(target)[("good", 0)]
    assert outputs[0].cached_tokens == 0
    assert tokens(outputs) == expected_tokens(range(20, 80), 5, 1000)
    target.check_integrity()


class Broken(FakeExecutor):
    """Answers its first step wrongly."""

    def execute(self, plan: Plan) -> StepResult:
        result = super().execute(plan)
        if plan.step > 1:
            return result
        return StepResult(plan.step, tuple(RunResult() for _ in plan.runs[1:]))


def test_a_wrong_answer_of_the_executor_is_a_failed_step() -> None:
    target = engine(Broken())
    target.submit(request("a", [1]))
    output = drain(target)[("a", 0)][0]
    assert output.finish is FinishReason.ERROR
    assert "step 1" in output.error
    target.submit(request("b", [1]))
    assert len(tokens(drain(target)[("b", 0)])) == 4


def test_an_interrupt_leaves_an_engine_that_works() -> None:
    def interrupt(plan: Plan) -> bool:
        if plan.step == 1:
            raise KeyboardInterrupt
        return False

    target = engine(FakeExecutor(fails=interrupt))
    target.submit(request("a", range(20)))
    with pytest.raises(KeyboardInterrupt):
        target.step()
    target.submit(request("b", range(20)))
    found = drain(target)
    assert found[("a", 0)][0].finish is FinishReason.ERROR
    assert tokens(found[("b", 0)]) == expected_tokens(range(20), 4, 1000)


def test_a_closed_engine_says_so() -> None:
    target = engine()
    target.submit(request("a", [1]))
    target.close()
    target.close()
    assert not target.has_work()
    with pytest.raises(RequestError, match="closed"):
        target.step()


def test_two_hundred_clients_and_a_pool_for_ten() -> None:
    executor = FakeExecutor(num_slabs=40)  # 640 tokens, 60 a client
    target = engine(executor)
    for number in range(200):
        target.submit(request(f"r{number}", [number, *range(39)], 20))
    found = drain(target)
    for number in range(200):
        whole = expected_tokens([number, *range(39)], 20, 1000)
        assert tokens(found[(f"r{number}", 0)]) == whole
    assert target.stats().finished == 200


def test_scheduler_and_cache_need_no_torch() -> None:
    code = "import sys, lockstep.engine.loop, lockstep.cache; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
