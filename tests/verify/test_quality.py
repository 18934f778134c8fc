"""The gate on models whose faults are known: what it measures, and that averages hide nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from lockstep.cli.main import app
from lockstep.verify.provider.findings import Finding
from lockstep.verify.quality import accuracy, divergence, longform
from lockstep.verify.quality.check import Checked, check_quality, collapsed, report_of
from lockstep.verify.quality.subject import EMPTY, HTTPSubject, Scored, SubjectError, Writing
from lockstep.verify.quality.tasks import Item, Limits, LongForm, Task, Tasks, TasksError, load
from lockstep.verify.verdict import Verdict
from tests.server.support import ServerThread, fake_llm
from tests.verify.servers import Vendor

Write = Callable[[Item, Writing], str]


def sure(text: str, loss: float = 0.1, shift: float = 0.0) -> Scored:
    """A text whose words the model expects, each as much as the other."""
    tokens = tuple(text.split())
    tops = tuple({token: -loss, "other": math.log1p(-math.exp(-loss)) - shift} for token in tokens)
    return Scored(tokens, (-loss,) * len(tokens), tops)


@dataclass
class Model:
    """A subject that writes and scores by rule."""

    answer: Write = lambda item, how: item.answer
    choose: Callable[[Item, str], float] = lambda item, option: float(option == item.answer)
    scored: Callable[[str], Scored] = sure
    name: str = "model"
    asked: list[Writing] = field(default_factory=list)

    async def score(self, texts: Sequence[tuple[Item, str]]) -> list[Scored]:
        return [
            Scored((text,), (self.choose(item, text) - 5.0,), ({},))
            if item.options
            else self.scored(text)
            for item, text in texts
        ]

    async def write(self, items: Sequence[Item], how: Writing) -> list[str]:
        self.asked.append(how)
        return [self.answer(item, how) or "It is so because of this and that." for item in items]


def generation(count: int = 60, drop: float = 0.1) -> Task:
    items = tuple(
        Item(prompt=f"q{i}", answer=f"step {i}, step {i + 1}, {i * 7}") for i in range(count)
    )
    return Task(name="steps", kind="generate", items=items, drop=drop)


def choice(count: int = 80) -> Task:
    items = tuple(Item(prompt=f"c{i}", answer=" a", options=(" a", " b")) for i in range(count))
    return Task(name="pick", kind="choice", items=items)


def loses_every(nth: int) -> Write:
    """Wrong in the last step of every n-th generation."""

    def write(item: Item, how: Writing) -> str:
        number = int(item.prompt[1:]) if item.prompt.startswith("q") else 1
        return item.answer + ("1" if item.answer and number % nth == 0 else "")

    return write


async def test_i06_a_gate_of_choices_alone_cannot_pass_and_a_generation_task_fails_it() -> None:
    base, changed = Model(), Model(answer=loses_every(5))
    choices = await check_quality(base, changed, Tasks(tasks=(choice(),)))
    verdict, why = choices.verdict
    assert (verdict, why) == (Verdict.UNDECIDABLE, "coverage")
    both = await check_quality(base, changed, Tasks(tasks=(choice(), generation())))
    assert both.verdict == (Verdict.FAIL, "task steps")
    assert [f.verdict for f in both.findings if f.name == "task pick"] == [Verdict.PASS]
    same = await check_quality(base, Model(), Tasks(tasks=(choice(), generation())))
    assert same.verdict[0] is Verdict.PASS


async def test_i06_no_average_hides_a_task() -> None:
    """One task of ten loses everything; the others win as much as it loses."""
    easy = [Task(f"t{i}", "generate", generation().items) for i in range(9)]
    hard = Task("hard", "generate", tuple(Item(prompt="x0", answer=f"{i}") for i in range(30)))
    base = Model(answer=lambda item, how: item.answer if item.prompt[:1] != "q" else "wrong")
    changed = Model(answer=lambda item, how: item.answer if item.prompt[:1] == "q" else "wrong")
    found = await check_quality(base, changed, Tasks(tasks=(*easy, hard)))
    assert sum(o.won for o in found.outcomes) > 10 * sum(o.lost for o in found.outcomes)
    assert found.verdict == (Verdict.FAIL, "task hard")


@pytest.mark.parametrize(
    ("lost", "won", "count", "expected"),
    [
        (0, 0, 60, Verdict.PASS),
        (0, 0, 20, Verdict.UNDECIDABLE),  # too few to rule a drop of 10% out
        (12, 0, 60, Verdict.FAIL),
        (12, 10, 60, Verdict.UNDECIDABLE),
        (2, 0, 20, Verdict.UNDECIDABLE),
        (0, 12, 60, Verdict.PASS),
        (97, 0, 1319, Verdict.PASS),  # gsm8k, 0.712 -> 0.638, where a tenth is allowed
    ],
)
def test_a_task_is_judged_by_lost_and_won_items(
    lost: int, won: int, count: int, expected: Verdict
) -> None:
    item = Item(prompt="q", answer="x")
    kinds = [(True, False)] * lost + [(False, True)] * won + [(True, True)] * (count - lost - won)
    answers = tuple(accuracy.Answered(item, "x", "y", one, other) for one, other in kinds)
    outcome = accuracy.Outcome(generation(), answers)
    verdict, shown = accuracy.judge(outcome, 0.95)
    assert verdict is expected, shown


def test_i06_the_loss_seen_in_the_field_fails_by_default() -> None:
    """gsm8k, 0.712 -> 0.638 of 1,319."""
    item = Item(prompt="q", answer="x")
    kinds = [(True, False)] * 150 + [(False, True)] * 53 + [(True, True)] * 1116
    answers = tuple(accuracy.Answered(item, "x", "y", one, other) for one, other in kinds)
    task = Task(name="gsm8k", kind="generate", items=(item,))
    verdict, shown = accuracy.judge(accuracy.Outcome(task, answers), 0.95)
    assert verdict is Verdict.FAIL, shown


@given(st.lists(st.floats(-6, 6), min_size=6, max_size=6), st.integers(2, 6), st.integers(2, 6))
def test_the_divergence_of_what_is_reported_never_exceeds_the_whole(
    logits: list[float], first: int, second: int
) -> None:
    p = np.array(logits) - np.logaddexp.reduce(logits)
    q = p[::-1] + np.linspace(0, 1, 6)
    q = q - np.logaddexp.reduce(q)
    whole = float((np.exp(p) * (p - q)).sum())

    def top(values: Any, count: int) -> dict[int, float]:
        return {int(i): float(values[i]) for i in np.argsort(-values)[:count]}

    assert -1e-9 <= divergence.kl(top(p, first), top(q, second)) <= whole + 1e-9
    assert divergence.kl(top(p, 6), top(q, 6)) == pytest.approx(whole, abs=1e-6)
    assert divergence.kl(top(p, 3), top(p, 3)) == pytest.approx(0.0, abs=1e-12)


TEXTS = tuple(" ".join(f"w{i}" for i in range(40)) + f" {n}" for n in range(8))


async def judged(base: Model, changed: Model, **limits: float) -> Any:
    found = await divergence.diverge(base, changed, TEXTS)
    return divergence.judge(found, Limits(**limits), 0.95)


async def test_i02_mean_and_largest_divergence_are_reported_and_each_is_a_gate() -> None:
    verdict, reason, _, figures = await judged(Model(), Model())
    assert verdict is Verdict.PASS
    assert figures["kl_mean"] == figures["kl_max"] == figures["flips"] == 0.0
    worse = Model(scored=lambda text: sure(text, loss=1.5))
    verdict, reason, _, figures = await judged(Model(), worse)
    assert verdict is Verdict.FAIL
    assert "mean KL over 0.1" in reason
    assert "flips over" in reason

    def one_place(text: str) -> Scored:
        """Far off at one position of one text only: invisible in the mean."""
        fine = sure(text)
        if not text.endswith(" 3"):
            return fine
        tops = list(fine.tops)
        tops[20] = {"w20": -9.0, "other": math.log1p(-math.exp(-9.0))}
        return Scored(fine.tokens, (*fine.logprobs[:20], -9.0, *fine.logprobs[21:]), tuple(tops))

    verdict, reason, section, figures = await judged(Model(), Model(scored=one_place))
    assert figures["kl_mean"] < 0.1
    assert verdict is Verdict.FAIL
    assert reason.startswith("largest KL over 5")
    assert [row[0] for row in section.rows] == ["0 to 15", "16 to 40"]


async def test_i09_another_tokenisation_is_a_failure_of_its_own() -> None:
    other = Model(scored=lambda text: sure(text.replace("w7", "w 7")))
    verdict, reason, _, _ = await judged(Model(), other)
    assert verdict is Verdict.FAIL
    assert "tokenizers differ: text 0" in reason


def long_pairs(early: float, late: float, repeat: bool = False) -> list[longform.Pair]:
    source = np.random.default_rng(1)
    pairs = []
    for index in range(8):
        ours = source.normal(2.0, 0.1, 96)
        ramp = np.where(np.arange(96) < 16, early, late)
        theirs = source.normal(2.0, 0.1, 96) + ramp
        text = " ".join(f"{index}w{i}" for i in range(96))
        again = " ".join(["one two three four"] * 24) if repeat else text
        pairs.append(longform.Pair(text, again, tuple(ours.tolist()), tuple(theirs.tolist())))
    return pairs


def test_i07_what_fails_only_late_in_an_answer_is_found() -> None:
    verdict, reason, _, figures = longform.judge(long_pairs(0.0, 0.0), Limits(), 0.95)
    assert verdict is Verdict.PASS
    assert not figures["grows"]
    verdict, reason, _, figures = longform.judge(long_pairs(0.0, 1.0), Limits(), 0.95)
    assert verdict is Verdict.FAIL
    assert "late excess" in reason
    assert "it grows with length" in reason
    assert abs(figures["early_excess"]) < 0.1
    verdict, reason, _, _ = longform.judge(long_pairs(0.0, -1.0, repeat=True), Limits(), 0.95)
    assert verdict is Verdict.FAIL
    assert "repetition over" in reason


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("!" * 64, True),
        ("", True),
        ("the the the the the the the the the the the the the the the the", True),
        ("Higher education matters because it opens doors.", False),
        ("A table:\n| a | b |\n|----------------|---|\nand much more text than the line.", False),
    ],
)
async def test_i04_a_model_that_prints_one_thing_again_and_again_fails(
    text: str, expected: bool
) -> None:
    assert collapsed(text) is expected
    if text:
        broken = Model(answer=lambda item, how: item.answer or text)
        found = await check_quality(Model(), broken, Tasks(tasks=(generation(),)))
        assert (found.verdict[0] is Verdict.FAIL) is expected
    else:
        assert collapsed("   ")


async def test_long_answers_are_drawn_with_the_seeds_of_the_base() -> None:
    long = LongForm(prompts=("a", "b"), max_tokens=48, temperature=0.7)
    base, changed = Model(), Model()
    pairs = await longform.follow(base, changed, long)
    assert base.asked == changed.asked == [Writing(48, 0.7)]
    assert len(pairs) == 2
    assert pairs[0].late_excess == 0.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tasks: []", "tasks"),
        ("tasks: [{name: a, kind: other, items: [{prompt: x, answer: y}]}]", "other"),
        ("tasks: [{name: a, kind: generate, items: [{prompt: x}]}]", "has an answer"),
        ("tasks: [{name: a, kind: generate, items: [{answer: x}]}]", "exactly one"),
        ("tasks: [{name: a, kind: choice, items: [{prompt: x, answer: y, options: [z]}]}]", "'y'"),
        (
            "tasks: [{name: a, kind: generate, match: regex, items: [{prompt: x, answer: '('}]}]",
            "regular expression",
        ),
        ("tasks: [{name: a, kind: generate, items: [{prompt: x, answer: y}], drops: 1}]", "drops"),
        ("a: [", "tasks.yaml"),
    ],
)
def test_a_wrong_tasks_file_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "tasks.yaml"
    file.write_text(text)
    with pytest.raises(TasksError, match=message):
        load(file)


def test_the_example_is_a_tasks_file(repository: Path) -> None:
    tasks = load(repository / "examples/quality-tasks.yaml")
    assert {task.kind for task in tasks.tasks} == {"choice", "generate"}
    assert tasks.texts
    assert tasks.long is not None


def echo(path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """A server that scores prompts: a token a word."""
    if not body.get("echo"):
        return 200, {"choices": [{"text": " 42", "finish_reason": "stop"}]}
    words, offsets, at = [], [], 0
    for word in body["prompt"].split(" "):
        words.append(word if not words else " " + word)
        offsets.append(at)
        at += len(words[-1])
    values = [None, *(-1.0 - len(word) for word in words[1:])]
    tops = [None, *({word: -1.0 - len(word), " x": -0.5} for word in words[1:])]
    reported = {
        "tokens": [*words, " more"],
        "token_logprobs": [*values, -0.1],
        "top_logprobs": [*tops, {" more": -0.1}],
        "text_offset": [*offsets, at],
    }
    return 200, {"choices": [{"text": body["prompt"] + " more", "logprobs": reported}]}


async def test_a_server_scores_behind_its_prompt() -> None:
    transport = httpx.ASGITransport(app=Vendor(echo))  # type: ignore[arg-type]
    async with HTTPSubject("http://x", transport=transport) as subject:
        bare, behind = await subject.score([(EMPTY, "a bb ccc"), (Item(prompt="q r"), " ss t")])
        assert bare == Scored(
            ("a", " bb", " ccc"),
            (None, -4.0, -5.0),
            ({}, {" bb": -4.0, " x": -0.5}, {" ccc": -5.0, " x": -0.5}),
        )
        assert behind.tokens == (" ss", " t")
        assert await subject.write([Item(prompt="p")], Writing(4)) == [" 42"]
        with pytest.raises(SubjectError, match="message"):
            await subject.score([(Item(message="m"), "x")])
    silent = httpx.ASGITransport(app=Vendor(lambda path, body: (404, {})))  # type: ignore[arg-type]
    async with HTTPSubject("http://x", transport=silent) as subject:
        with pytest.raises(SubjectError, match="does not score"):
            await subject.score([(EMPTY, "a b")])


@pytest.mark.parametrize(
    ("top", "said"),
    [({"x": "y"}, "a logprob is 'y'"), ({"x": 900.0}, "a logprob is 900.0"), ("x", "items")],
)
async def test_scores_that_are_none_are_the_servers_fault(top: Any, said: str) -> None:
    def odd(path: str, body: Any) -> tuple[int, Any]:
        rows = {"tokens": ["a"], "token_logprobs": [-1.0], "text_offset": [0]}
        return 200, {"choices": [{"text": "a", "logprobs": {**rows, "top_logprobs": [top]}}]}

    transport = httpx.ASGITransport(app=Vendor(odd))  # type: ignore[arg-type]
    async with HTTPSubject("http://x", transport=transport) as subject:
        with pytest.raises(SubjectError, match=said):
            await subject.score([(EMPTY, "a")])


@pytest.mark.parametrize("texts", [2, 3, 8])
def test_intervals_of_few_texts_are_wide_enough(texts: int) -> None:
    """Texts of skewed difficulty: a limit at the true mean is passed about as rarely as said."""
    source = np.random.default_rng(texts)
    true, sides = math.exp(0.5**2 / 2), [0, 0]
    for _ in range(120):
        hard = source.lognormal(0.0, 0.5, texts)
        values = (hard[:, None] * source.exponential(size=(texts, 20))).ravel().tolist()
        groups = np.repeat(np.arange(texts), 20).tolist()
        low, high = divergence.interval(values, groups, 0.95)
        sides = [sides[0] + (true < low), sides[1] + (true > high)]
    assert sides[0] <= 6
    assert sides[1] <= 18  # of 120; the bootstrap alone: 41 with two texts


def test_one_text_says_nothing_of_others() -> None:
    low, high = divergence.interval([0.0, 0.0], [0, 0], 0.95)
    assert (low, high) == (-math.inf, math.inf)
    assert divergence.bounds(low, high) is None


def test_the_command_over_two_endpoints(tmp_path: Path) -> None:
    """A parrot against itself: it keeps what it is asked to, and its record says so."""
    items = "\n".join(f"      - {{prompt: word{i}, answer: word{i}}}" for i in range(40))
    (tmp_path / "t.yaml").write_text(
        f"tasks:\n  - name: parrot\n    kind: generate\n    drop: 0.1\n    items:\n{items}\n"
        "texts: [one two three four five, six seven eight]\n"
    )
    options = ["--tasks", str(tmp_path / "t.yaml"), "--ledger", str(tmp_path / "l.jsonl")]
    options += ["--report", str(tmp_path / "r.md")]
    with ServerThread(fake_llm) as server:
        result = CliRunner().invoke(app, ["verify", "quality", server.url, server.url, *options])
    assert result.exit_code == 0, result.output
    assert "40 (100" not in result.output
    text = (tmp_path / "r.md").read_text()
    assert "| parrot | generate | 40 | 100.0%" in text
    last = json.loads((tmp_path / "l.jsonl").read_text().splitlines()[-1])
    assert last["verdict"] == "pass"
    assert last["figures"]["task parrot"]["right"] == [40, 40]


def test_a_report_lists_what_was_lost() -> None:
    item = Item(prompt="what is it", answer="it")
    outcome = accuracy.Outcome(
        generation(), (accuracy.Answered(item, "it", "that", True, False),) * 30
    )
    finding = Finding(
        "task steps", *accuracy.judge(outcome, 0.95), section=accuracy.section_of([], 0.95)
    )
    made = report_of(Checked((finding,), (outcome,), 0.95), "base", "changed")
    assert made.verdict == "fail"
    assert made.sections[-1].title == "Lost answers"
    assert made.sections[-1].rows[0] == ["steps", "what is it", "it", "that"]
