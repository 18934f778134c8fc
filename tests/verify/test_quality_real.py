"""The gate on SmolLM2 with planted faults: rounded weights, a merged adapter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from lockstep import LLM
from lockstep.verify.quality import accuracy, divergence, longform
from lockstep.verify.quality.check import Checked, check_quality
from lockstep.verify.quality.subject import LocalSubject
from lockstep.verify.quality.tasks import Limits, LongForm, Tasks, load
from lockstep.verify.verdict import Verdict
from tests.verify.degraded import Change, chained, merged, quantised, unchanged, write_model

pytestmark = pytest.mark.slow

FOUR = quantised(4, 32)
APART = chained(FOUR, merged(8, 0.02))
Make = Callable[[str, Change], LocalSubject]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """Models by name, each made once."""
    made: dict[str, LocalSubject] = {}

    def one(name: str, change: Change) -> LocalSubject:
        if name not in made:
            folder = write_model(tmp_path_factory.mktemp(name), change)
            llm = LLM(folder, dtype="float32", threads=2, cache_bytes=200 << 20, progress=False)
            made[name] = LocalSubject(llm, name)
        return made[name]

    yield one
    for subject in made.values():
        subject.llm.close()


@pytest.fixture(scope="module")
def tasks(repository: Path) -> Tasks:
    """The example, shortened."""
    whole = load(repository / "examples/quality-tasks.yaml")
    choices, counting = whole.tasks
    items = tuple(
        msgspec.structs.replace(item, answer=", ".join(item.answer.split(", ")[:5]))
        for item in counting.items[::5]
    )
    return msgspec.structs.replace(
        whole,
        tasks=(
            msgspec.structs.replace(choices, items=choices.items[:10]),
            msgspec.structs.replace(counting, items=items, max_tokens=24),
        ),
        texts=whole.texts[:3],
        long=None,
    )


@pytest.fixture(scope="module")
def rounded_rows(make: Make, tasks: Tasks) -> Checked:
    base, rows = make("base", unchanged), make("rows", quantised(4, 0))
    return asyncio.run(check_quality(base, rows, tasks))


async def test_i06_generation_finds_what_choices_do_not(rounded_rows: Checked) -> None:
    verdicts = {finding.name: finding.verdict for finding in rounded_rows.findings}
    assert verdicts["task capitals"] is not Verdict.FAIL
    assert verdicts["task counting"] is Verdict.FAIL
    assert rounded_rows.verdict[0] is Verdict.FAIL
    capitals, counting = rounded_rows.outcomes
    assert counting.lost / len(counting.answers) > 2 * capitals.lost / len(capitals.answers)


async def test_i07_one_scale_a_row_is_worse_than_one_a_group(
    make: Make, tasks: Tasks, rounded_rows: Checked
) -> None:
    (rows,) = [f.figures for f in rounded_rows.findings if f.name == "divergence"]
    base, groups = make("base", unchanged), make("apart", APART)
    found = await divergence.diverge(base, groups, tasks.texts)
    _, _, _, figures = divergence.judge(found, tasks.limits, tasks.confidence)
    assert 0 < 1.3 * figures["kl_mean"] < rows["kl_mean"]
    assert 0 < figures["flips"] < rows["flips"]


async def test_i07_long_answers_fail_the_gate(make: Make, tasks: Tasks) -> None:
    base, rows = make("base", unchanged), make("rows", quantised(4, 0))
    prompts = tuple(text[:40] for text in tasks.texts) * 2
    pairs = await longform.follow(base, rows, LongForm(prompts, max_tokens=48, temperature=1.0))
    verdict, reason, section, figures = longform.judge(pairs, tasks.limits, tasks.confidence)
    assert verdict is Verdict.FAIL, reason
    assert figures["late_excess"] > 0.5
    assert len(section.rows) >= 2
    same = await longform.follow(base, base, LongForm(prompts[:2], max_tokens=48))
    assert longform.judge(same, tasks.limits, tasks.confidence)[3]["late_excess"] == 0.0


async def test_i02_an_adapter_merged_into_rounded_weights(make: Make, tasks: Tasks) -> None:
    """Base: the adapter beside four-bit weights. Changed: merged into them, and rounded again."""
    apart, together = make("apart", APART), make("together", chained(APART, FOUR))
    found = await divergence.diverge(apart, together, tasks.texts)
    strict = Limits(kl_mean=0.002)
    verdict, reason, _, figures = divergence.judge(found, strict, tasks.confidence)
    assert verdict is Verdict.FAIL, reason
    assert reason.startswith("mean KL over 0.002")
    assert "largest" in reason
    assert 0.0 < figures["kl_mean"] < figures["kl_max"]
    loose = Limits(kl_mean=5.0, kl_max=50.0, flips=0.99)
    assert divergence.judge(found, loose, tasks.confidence)[0] is Verdict.PASS


async def test_the_same_weights_in_another_file_are_the_same_model(
    make: Make, tasks: Tasks
) -> None:
    base = make("base", unchanged)
    found = await divergence.diverge(base, base, tasks.texts)
    assert not found.mismatch
    assert all(one.kl == 0.0 and not one.flipped for one in found.positions)
    outcome = await accuracy.run_task(base, base, tasks.tasks[0])
    assert (outcome.lost, outcome.won, outcome.flips) == (0, 0, 0)
    assert outcome.right[0] >= 8, "a task that the base model cannot do proves nothing"
