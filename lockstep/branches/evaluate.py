"""A branch as it is served, on labelled rows: against a majority and the trunk's own head.

Rows are asked through `AsyncLLM`, so that what is measured is what a client gets: the served
layers in the served dtype, the branch's temperature and thresholds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.async_llm import AsyncLLM
from lockstep.branch import Branch
from lockstep.branches import calibrate
from lockstep.branches.calibrate import Floats, Ints
from lockstep.branches.data import Example, majority
from lockstep.decisions import Choice, Decision, Question
from lockstep.settings import EngineSettings

Progress = Callable[[str, float], None]

NAME = "judge"
_AT_ONCE = 64


def _silent(stage: str, done: float) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Report:
    """What was found on the rows; figures as `calibrate.figures` or `value_figures` names them.

    Attributes:
        branch: the branch's. trunk: of the model's own head that was asked the same in words;
            empty where it was not asked. majority: of always deciding as most training rows.
        cases: of every case that rows name: rows, and the accuracies of branch and trunk.
    """

    branch: dict[str, Any]
    trunk: dict[str, Any]
    majority: dict[str, Any]
    cases: dict[str, dict[str, float]] = field(default_factory=dict)


async def served(
    llm: AsyncLLM,
    branch: Branch,
    examples: Sequence[Example],
    *,
    name: str = NAME,
    progress: Progress = _silent,
) -> list[Decision]:
    """The decisions of a loaded branch about every row."""

    async def ask(example: Example) -> Decision:
        if example.question is not None:
            return (await llm.decide(example.given, [example.question], branch=name))[0]
        return await llm.decide(example.given, branch=name)

    return await _all(examples, ask, "asking the branch", progress)


async def by_trunk(
    llm: AsyncLLM,
    branch: Branch,
    examples: Sequence[Example],
    *,
    progress: Progress = _silent,
) -> list[Decision]:
    """What the model says without any training: the question in words, with labelled options."""
    own = None if branch.head == "codes" else Choice(branch.instructions, list(branch.options))

    async def ask(example: Example) -> Decision:
        question: Question | None = example.question or own
        assert question is not None
        return (await llm.decide(example.given, [question]))[0]

    return await _all(examples, ask, "asking the trunk", progress)


async def _all(
    examples: Sequence[Example],
    ask: Callable[[Example], Awaitable[Decision]],
    stage: str,
    progress: Progress,
) -> list[Decision]:
    gate = asyncio.Semaphore(_AT_ONCE)
    done = 0

    async def one(example: Example) -> Decision:
        nonlocal done
        async with gate:
            decision = await ask(example)
        done += 1
        progress(f"{stage}: {done} of {len(examples)} rows", done / len(examples))
        return decision

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one(example)) for example in examples]
    return [task.result() for task in running]


def compare(
    branch: Branch,
    examples: Sequence[Example],
    decisions: Sequence[Decision],
    trunk: Sequence[Decision] = (),
) -> Report:
    """Figures of decisions about labelled rows."""
    if branch.head == "value":
        return _of_values(branch, examples, decisions)
    targets, probabilities, chosen = _table(branch, examples, decisions)
    report = calibrate.figures(probabilities, targets, chosen, branch.options)
    most = np.full_like(targets, _majority(branch, examples))
    baseline = {"option": branch.options[most[0]], "accuracy": _share(most == targets)}
    own: dict[str, Any] = {}
    right: Ints | None = None
    if trunk:
        _, trunk_probabilities, trunk_chosen = _table(branch, examples, trunk)
        own = calibrate.figures(trunk_probabilities, targets, trunk_chosen, branch.options)
        right = trunk_chosen == targets
    cases: dict[str, dict[str, float]] = {}
    for case in dict.fromkeys(example.case for example in examples):
        inside = np.array([example.case == case for example in examples])
        if case:
            cases[case] = {"rows": int(inside.sum()), "branch": _share((chosen == targets)[inside])}
            if right is not None:
                cases[case]["trunk"] = _share(right[inside])
    return Report(report, own, baseline, dict(sorted(cases.items())))


def _of_values(
    branch: Branch, examples: Sequence[Example], decisions: Sequence[Decision]
) -> Report:
    wanted = np.array([float(example.target) for example in examples])
    found = np.array([decision.expected for decision in decisions])
    mean = np.full_like(wanted, wanted.mean())
    return Report(calibrate.value_figures(found, wanted), {}, calibrate.value_figures(mean, wanted))


def _table(
    branch: Branch, examples: Sequence[Example], decisions: Sequence[Decision]
) -> tuple[Ints, Floats, Ints]:
    """Targets [N], probabilities [N, outputs] and chosen [N], by the head's outputs."""
    targets = np.array([int(example.target) for example in examples], dtype=np.int64)
    probabilities: Floats = np.zeros((len(examples), len(branch.options)))
    chosen = np.empty(len(examples), dtype=np.int64)
    everything = tuple(range(len(branch.options)))
    for row, (example, decision) in enumerate(zip(examples, decisions, strict=True)):
        places = example.outputs or everything
        probabilities[row, places] = decision.probabilities
        chosen[row] = places[decision.chosen]
    return targets, probabilities, chosen


def _majority(branch: Branch, examples: Sequence[Example]) -> int:
    """The output that was right most often in training; of a branch without a record, here."""
    counts = branch.training.get("labels")
    if not isinstance(counts, dict) or not counts:
        return majority(examples)
    return max(range(len(branch.options)), key=lambda i: counts.get(branch.options[i], 0))


def _share(right: Any) -> float:
    return round(float(np.mean(right)), 4)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Decisions of the served branch beside those that training computed.

    Attributes:
        rows, flipped: compared, and with another most probable option.
        largest: difference of a probability; of a value head of its value.
        dtype: of the served layers.
    """

    rows: int
    flipped: int
    largest: float
    dtype: str

    def record(self) -> dict[str, Any]:
        """Plain values, for `branch.json`."""
        return {
            "rows": self.rows,
            "flipped": self.flipped,
            "largest_difference": round(self.largest, 5),
            "dtype": self.dtype,
        }


def agreement(
    branch: Branch,
    examples: Sequence[Example],
    decisions: Sequence[Decision],
    outputs: Floats,
    dtype: str,
) -> Agreement:
    """Compare decisions with training's own outputs [N, outputs] of the same rows."""
    if branch.head == "value":
        found = np.array([decision.expected for decision in decisions])
        gap = float(np.abs(found - outputs[:, 0]).max())
        return Agreement(len(examples), 0, gap, dtype)
    _, probabilities, _ = _table(branch, examples, decisions)
    expected = calibrate.softmax(outputs, branch.temperature)
    flipped = int((probabilities.argmax(axis=1) != expected.argmax(axis=1)).sum())
    gap = float(np.abs(probabilities - expected).max())
    return Agreement(len(examples), flipped, gap, dtype)


async def evaluate(
    model: str,
    settings: EngineSettings,
    folder: Path,
    branch: Branch,
    examples: Sequence[Example],
    *,
    trunk: bool = True,
    progress: Progress = _silent,
) -> Report:
    """Serve the branch in a process of its own and ask it every row.

    Args:
        trunk: ask the trunk's own head as well, where there is a question in words.

    Raises:
        ModelError, ConfigError, BranchError: as starting an engine does.
        RequestError: a row that cannot be asked.
    """
    asks = trunk and branch.head != "value"
    whole: EngineSettings = {**settings, "branches": {NAME: folder}}
    async with AsyncLLM(model, **whole) as llm:
        decisions = await served(llm, branch, examples, progress=progress)
        own = await by_trunk(llm, branch, examples, progress=progress) if asks else ()
    return compare(branch, examples, decisions, own)


async def check_served(
    model: str,
    settings: EngineSettings,
    folder: Path,
    branch: Branch,
    examples: Sequence[Example],
    outputs: Floats,
    *,
    progress: Progress = _silent,
) -> Agreement:
    """Serve a branch that was just trained, and count what it decides otherwise.

    Args:
        outputs: as `build.Built.outputs`, of `examples`.

    Raises:
        As `evaluate`.
    """
    whole: EngineSettings = {**settings, "branches": {NAME: folder}}
    async with AsyncLLM(model, **whole) as llm:
        decisions = await served(llm, branch, examples, progress=progress)
        dtype = llm.info.dtype
    return agreement(branch, examples, decisions, outputs, dtype)
