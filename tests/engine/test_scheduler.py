"""What goes into a step: budgets, fairness, priorities, preemption, sharing in flight."""

from __future__ import annotations

import random

import pytest

from lockstep.engine.loop import Engine
from lockstep.types import LayerGroup, LockstepError
from tests.engine.harness import drain, engine, request, tokens
from tests.fakes import FakeExecutor, expected_tokens


def step_sizes(executor: FakeExecutor) -> list[dict[int, int]]:
    """Per step: tokens of each sequence."""
    return [{run.sequence: len(run.tokens) for run in plan.runs} for plan in executor.plans]


def first_step_of(executor: FakeExecutor, sequence: int) -> int:
    return next(i for i, sizes in enumerate(step_sizes(executor)) if sequence in sizes)


def test_decodes_and_prompts_share_a_step_within_the_budget() -> None:
    executor = FakeExecutor()
    target = engine(executor, max_step_tokens=64, max_chunk_tokens=32)
    target.submit(request("a", range(20), 30))
    target.step()
    target.submit(request("b", range(100, 300), 5))
    drain(target)
    sizes = step_sizes(executor)
    assert all(sum(step.values()) <= 64 for step in sizes)
    assert any(step.get(0) == 1 and step.get(1, 0) > 1 for step in sizes)
    assert all(0 in step for step in sizes[:30])  # a decodes in every step, whatever b does


def test_alone_a_prompt_takes_the_whole_budget() -> None:
    executor = FakeExecutor()
    target = engine(executor, max_step_tokens=512, max_chunk_tokens=64)
    target.submit(request("a", range(1000), 1))
    drain(target)
    assert [step[0] for step in step_sizes(executor)] == [512, 488]


def test_a_long_prompt_does_not_starve_short_ones() -> None:
    executor = FakeExecutor(max_context=8192, num_slabs=1024)
    target = engine(executor, max_step_tokens=256, max_chunk_tokens=128)
    for name in ("long", "long2"):
        target.submit(request(name, [ord(name[-1]), *[i % 1000 for i in range(4000)]], 1))
    target.step()
    for number in range(10):
        target.submit(request(f"s{number}", [number] * 20, 2))
    done: dict[str, int] = {}
    steps = 0
    while target.has_work():
        steps += 1
        for output in target.step():
            if output.finish is not None:
                done[output.request] = steps
    assert max(done[f"s{number}"] for number in range(10)) <= 5
    # And they do not starve it: the oldest has its chunk in every step.
    assert done["long"] <= 4001 // 128 + 3


def test_a_stream_of_short_prompts_does_not_starve_a_long_one() -> None:
    executor = FakeExecutor(max_context=8192, num_slabs=1024)
    target = engine(executor, max_step_tokens=256, max_chunk_tokens=128)
    target.submit(request("writer", [1], 2000))  # older than all, and never a prompt
    target.step()
    target.submit(request("long", [i % 1000 for i in range(4000)], 1))
    for step in range(4000 // 112 + 3):
        for place in range(2):
            target.submit(request(f"s{step}.{place}", [step, place, *[7] * 200], 1))
        if any(output.request == "long" for output in target.step()):
            return
    pytest.fail("the long prompt was starved")


def test_equal_priorities_start_in_order_of_arrival_and_lower_ones_first() -> None:
    executor = FakeExecutor()
    target = engine(executor, max_sequences=1)
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -1)):
        target.submit(request(name, [ord(name)] * 5, 2, priority=priority))
    order = [output.request for outputs in iter_steps(target) for output in outputs]
    assert list(dict.fromkeys(order)) == ["d", "b", "a", "c"]


def iter_steps(target: Engine):  # type: ignore[no-untyped-def]
    while target.has_work():
        yield target.step()


def test_an_urgent_request_takes_the_place_of_a_lesser_one() -> None:
    target = engine(max_sequences=1)
    target.submit(request("slow", range(20), 50))
    for _ in range(5):
        target.step()
    target.submit(request("urgent", range(30, 40), 2, priority=-1))
    assert [output.request for output in target.step()] == ["urgent"]
    found = drain(target)
    assert target.stats().preemptions == 1
    assert tokens(found[("slow", 0)]) == expected_tokens(range(20), 50, 1000)[5:]


def test_preemption_takes_the_most_recent_and_gives_the_same_answer() -> None:
    executor = FakeExecutor(num_slabs=12, page_tokens=4)
    target = engine(executor)
    for number in range(3):
        target.submit(request(f"r{number}", [number] * 10, 30))
    found = drain(target)
    assert target.stats().preemptions > 0
    ends = {}
    for number in range(3):
        assert tokens(found[(f"r{number}", 0)]) == expected_tokens([number] * 10, 30, 1000)
        ends[number] = max(i for i, s in enumerate(step_sizes(executor)) if number in s)
    assert ends[0] < ends[1] < ends[2]


def test_scattered_slabs_do_not_stop_the_last_sequence() -> None:
    # Sequences that grow together leave the first one's pages over more slabs than it needs;
    # alone, it then lacks a slab for the other group and starts again on an empty pool.
    groups = (
        LayerGroup("full", "full", (0,), 1, 8),
        LayerGroup("sliding", "sliding", (1,), 1, 8, 9),
    )
    executor = FakeExecutor(groups=groups, num_slabs=6, pages_per_slab=(3, 2), page_tokens=4)
    target = engine(executor, max_step_tokens=24, max_chunk_tokens=8)
    for number in range(6):
        target.submit(request(f"r{number}", [number] * 8, 30))
    found = drain(target)
    for number in range(6):
        assert tokens(found[(f"r{number}", 0)]) == expected_tokens([number] * 8, 30, 1000)


@pytest.mark.parametrize("suffix", [1, 4, 20, 100])
@pytest.mark.parametrize("prefix", [1000, 1007, 1008])
def test_a_common_prefix_is_computed_once(prefix: int, suffix: int) -> None:
    target = engine(FakeExecutor(num_slabs=600))
    prompts = [
        [*(i % 997 for i in range(prefix)), *((number * 31 + i) % 1000 for i in range(suffix))]
        for number in range(32)
    ]
    for number, prompt in enumerate(prompts):
        target.submit(request(f"r{number}", prompt, 3))
    found = drain(target)
    for number, prompt in enumerate(prompts):
        assert tokens(found[(f"r{number}", 0)]) == expected_tokens(prompt, 3, 1000)
    stats = target.stats()
    ideal = prefix + 32 * suffix
    assert ideal <= stats.computed_tokens - 32 * 2 <= ideal * 1.05
    assert stats.steps < 40


def test_nobody_waits_for_a_prefix_that_is_not_coming() -> None:
    executor = FakeExecutor()
    target = engine(executor, max_step_tokens=128, max_chunk_tokens=64)
    prompt = [i % 997 for i in range(500)]
    for name in "abc":
        target.submit(request(name, [*prompt, ord(name)], 2))
    target.step()
    target.step()
    target.cancel("a")
    found = drain(target)
    assert tokens(found[("c", 0)]) == expected_tokens([*prompt, ord("c")], 2, 1000)
    # What a had computed is used, the rest is computed once more, by b.
    assert target.stats().computed_tokens <= 500 + 2 + 3 * 2
    assert first_step_of(executor, 1) == 2


def test_a_waiter_lets_others_pass() -> None:
    executor = FakeExecutor()
    target = engine(executor, max_step_tokens=128, max_chunk_tokens=64)
    prompt = [i % 997 for i in range(500)]
    target.submit(request("first", [*prompt, 1], 2))
    target.submit(request("waiter", [*prompt, 2], 2))
    target.submit(request("other", [5] * 30, 2))
    drain(target)
    assert first_step_of(executor, 2) == 0
    assert first_step_of(executor, 1) > 2


def test_a_short_common_beginning_delays_nobody() -> None:
    executor = FakeExecutor()
    target = engine(executor)
    for number in range(4):
        target.submit(request(f"r{number}", [1, 2, *[number + 3] * 100], 2))
    drain(target)
    assert all(first_step_of(executor, number) == 0 for number in range(4))


def test_a_window_lets_go_of_pages_and_the_plan_says_so() -> None:
    groups = (LayerGroup("sliding", "sliding", (0, 1), 1, 8, 20),)
    executor = FakeExecutor(groups=groups, num_slabs=8)
    target = engine(executor, keep=False)
    target.submit(request("r", range(300), 50))
    most = 0
    while target.has_work():
        target.step()
        most = max(most, target.stats().pages_used)
    assert most <= 8
    assert list(executor.plans[-1].runs[0].pages[0]) == []  # the tables ended with the sequence


@pytest.mark.parametrize("seed", [42, 147, 155])
def test_a_step_without_budget_for_a_prompt_has_no_run_of_it(seed: int) -> None:
    # As many sequences decode as a step has tokens, while a prompt is begun.
    chance = random.Random(seed)
    executor = FakeExecutor(page_tokens=4)
    budget = chance.choice((2, 3, 4))
    target = engine(executor, max_step_tokens=budget, max_sequences=8, max_chunk_tokens=2)
    for index in range(60):
        if chance.random() < 0.4:
            prompt = [index] * chance.randint(1, 9)
            target.submit(request(f"r{index}", prompt, 30, priority=chance.choice((0, 0, -1, 1))))
        target.step()
    assert all(run.tokens for plan in executor.plans for run in plan.runs)
    drain(target)


def test_schedule_and_complete_alternate() -> None:
    target = engine()
    target.submit(request("r", range(10)))
    scheduler = target._scheduler
    plan = scheduler.schedule()
    assert plan is not None
    with pytest.raises(LockstepError, match="before the last plan"):
        scheduler.schedule()
    with pytest.raises(LockstepError, match="before the last plan"):
        scheduler.cancel("r")
    scheduler.fail(plan, "why not")
    with pytest.raises(LockstepError, match="not the plan under way"):
        scheduler.fail(plan, "again")
    assert scheduler.schedule() is None


def test_runs_name_their_layer_range() -> None:
    executor = FakeExecutor(num_layers=7)
    target = engine(executor)
    target.submit(request("r", range(10)))
    drain(target)
    assert {run.layers for plan in executor.plans for run in plan.runs} == {(0, 7)}
    assert {run.source for plan in executor.plans for run in plan.runs} == {None}
