"""Providers whose truth is known: what is found, what is not, and what is said about it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from lockstep.cli.main import app
from lockstep.verify.endpoint import Endpoint, ProbeRequest, Reading
from lockstep.verify.markdown import markdown
from lockstep.verify.provider import conformance, context, fingerprint, sampling, template
from lockstep.verify.provider.check import check_provider, report_of
from lockstep.verify.provider.findings import Finding, overall
from lockstep.verify.statistics import clopper_pearson
from lockstep.verify.verdict import Verdict
from tests.verify.proxy import BrokenToolJSON, Fault, SwappedTemplate, TruncatedContext, before
from tests.verify.servers import Vendor, serving
from tests.verify.toy import Toy

FINGERPRINT, TEMPLATE, CONTEXT, CALLS = (
    "next-token distributions",
    "template and tokenizer",
    "context length",
    "function calls",
)


def behind(toy: Toy, *faults: Fault) -> Endpoint:
    return before(toy.vendor(), *faults).endpoint()


async def check(a: Endpoint, b: Endpoint, **settings: Any) -> dict[str, Finding]:
    options: dict[str, Any] = {"longest": 600, "draws": 150, **settings}
    async with a, b:
        found = await check_provider(a, b, **options)
    return {finding.name: finding for finding in found}


def failed(found: dict[str, Finding]) -> set[str]:
    return {name for name, finding in found.items() if finding.verdict is Verdict.FAIL}


@pytest.mark.parametrize("noise", [0.0, 0.05])
async def test_the_same_model_twice_passes(noise: float) -> None:
    found = await check(behind(Toy(noise=noise)), behind(Toy(noise=noise)))
    assert {f.verdict for f in found.values()} == {Verdict.PASS}, found
    if not noise:
        assert found[FINGERPRINT].figures["excess"] == 0.0


@pytest.mark.parametrize(
    ("toy", "faults", "expected"),
    [
        (Toy(weights=2), (), {FINGERPRINT}),
        (Toy(noise=0.05, weights=2), (), {FINGERPRINT}),
        (Toy(), (SwappedTemplate(),), {FINGERPRINT, TEMPLATE}),
        (Toy(), (TruncatedContext(words=100),), {CONTEXT, TEMPLATE}),
        (Toy(noise=0.05), (TruncatedContext(words=100),), {CONTEXT, TEMPLATE}),
        (Toy(), (BrokenToolJSON(),), {CALLS}),
        (Toy(tools=0.4), (), {CALLS}),
        (Toy(top_k=2), (), {"sampling of B"}),
        (Toy(temperature_scale=0.5), (), {"sampling of B"}),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, Toy) else "",
)
async def test_each_fault_fails_its_check_and_no_other(
    toy: Toy, faults: tuple[Fault, ...], expected: set[str]
) -> None:
    found = await check(behind(Toy(noise=toy.noise)), behind(toy, *faults))
    assert failed(found) == expected, {n: f.reason for n, f in found.items()}
    assert overall(found.values())[0] is Verdict.FAIL
    reasons = " ".join(finding.reason for finding in found.values())
    if CONTEXT in expected:
        assert "B: cut off at" in reasons
    if TEMPLATE in expected and CONTEXT not in expected:
        assert "so the template is another" in reasons


async def test_a_small_difference_is_told_from_a_large_one() -> None:
    """Found, and still within what other arithmetic may do; without tolerance it is a failure."""

    class Shifted(Toy):
        def distribution(self, context: str) -> Any:
            logprobs = super().distribution(context)
            shifted = logprobs + 0.02 * np.cos(np.arange(len(logprobs)))
            return shifted - np.logaddexp.reduce(shifted)

    a, b = Toy(), Shifted()
    found = await fingerprint.compare_distributions(behind(a), behind(b))
    assert not isinstance(found, str)
    assert found.p_value < 0.001
    assert fingerprint.judge(found, 0.0025).verdict is Verdict.PASS
    assert "other arithmetic" in fingerprint.judge(found, 0.0025).reason
    assert fingerprint.judge(found, 0.0025, tolerance=0.001).verdict is Verdict.FAIL


async def test_servers_without_logprobs_are_compared_by_samples() -> None:
    a, b, other = Toy(reports=False), Toy(reports=False), Toy(reports=False, weights=2)
    same = await fingerprint.compare_distributions(behind(a), behind(b))
    changed = await fingerprint.compare_distributions(behind(a), behind(other))
    assert not isinstance(same, str)
    assert not isinstance(changed, str)
    assert not same.logprobs
    assert fingerprint.judge(same, 0.0025).verdict is Verdict.PASS
    assert fingerprint.judge(changed, 0.0025).verdict is Verdict.FAIL
    silent = await sampling.sample(behind(a), 10)
    assert sampling.judge("A", silent, 0.01).verdict is Verdict.UNDECIDABLE


def test_the_permutation_test_keeps_its_rate() -> None:
    """Noise of a size of its own at every prompt; 150 pairs of equal providers."""
    source = np.random.default_rng(1)
    rejected, trials = 0, 150
    for trial in range(trials):
        matrices = []
        for _ in range(6):
            values = source.standard_cauchy(8) * source.exponential()
            matrices.append(np.abs(values[:, None] - values[None, :]))
        sides: Any = [(str(i), ([Reading(True)] * 4, [Reading(True)] * 4)) for i in range(6)]
        found = fingerprint._compare(matrices, sides, logprobs=True, seed=trial)
        rejected += found.p_value <= 0.1
    rate = clopper_pearson(rejected, trials, 0.99)
    assert 0.1 in rate, f"{rejected} of {trials}: {rate}"


def test_the_energy_statistic_is_the_definition() -> None:
    source = np.random.default_rng(2)
    values = source.normal(size=6)
    distances = np.abs(values[:, None] - values[None, :])
    mine = np.array([True, False, True, False, True, False])
    a, b = values[mine], values[~mine]
    across = np.mean([abs(x - y) for x in a for y in b])
    within = np.mean(
        [abs(s[i] - s[j]) for s in (a, b) for i in range(3) for j in range(3) if i != j]
    )
    excess, own = fingerprint.energy(distances, mine)
    assert float(own) == pytest.approx(within)
    assert float(excess) == pytest.approx(across - within)


def test_the_goodness_of_fit_keeps_its_rate_and_finds_a_truncation() -> None:
    source = np.random.default_rng(3)
    names = [f" {chr(97 + i)}" for i in range(12)]
    rejected, trials = 0, 40
    for trial in range(trials):
        shares = source.dirichlet(np.ones(13) * 0.7)
        drawn = source.multinomial(120, shares)
        counts = {n.strip(): int(c) for n, c in zip([*names, " rest"], drawn, strict=True) if c}
        logprobs = {n: float(np.log(p + 1e-300)) for n, p in zip(names, shares, strict=False)}
        rejected += sampling.goodness_of_fit(counts, logprobs, seed=trial) <= 0.1
    rate = clopper_pearson(rejected, trials, 0.99)
    assert rate.low <= 0.1, f"{rejected} of {trials}: {rate}"
    flat = {name: float(np.log(1 / 12)) for name in names}
    assert sampling.goodness_of_fit({"a": 40, "b": 41, "c": 39}, flat) < 0.001


async def test_a_refusal_of_long_prompts_is_no_silent_cut() -> None:
    toy = Toy()

    def respond(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if len(body["messages"][0]["content"].split()) > 150:
            return 400, {"error": {"message": "context_length_exceeded"}}
        return toy.respond(path, body)

    async with Vendor(respond).endpoint() as short, toy.vendor().endpoint() as long:
        lengths = await context.compare_contexts(long, short, 600)
        both = await context.compare_contexts(short, short, 600)
    finding = context.judge(lengths)
    assert finding.verdict is Verdict.FAIL
    assert finding.reason == "B: refused at 256 words, which the other side reads"
    assert context.judge(both).verdict is Verdict.PASS
    assert [length.words for length in both[0]] == [64, 128, 256]


def test_what_a_rate_of_failures_comes_to_in_an_agent() -> None:
    assert conformance.compound(0.0, 100) == 0.0
    assert conformance.compound(0.01, 1) == pytest.approx(0.01)
    assert conformance.compound(0.01, 50) == pytest.approx(0.395, abs=0.001)
    a = {"case": [""] * 40}
    b = {"case": ["bad"] * 10 + [""] * 30}
    finding = conformance.judge(conformance.Attempts(a, b), 0.01)
    assert finding.verdict is Verdict.FAIL
    assert finding.figures["agent"]["B"]["10"] == pytest.approx(1 - 0.75**10)
    none = conformance.judge(conformance.Attempts(b, {"case": ["bad"] * 12 + [""] * 28}), 0.01)
    assert none.verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ('{"name": "Ada", "guests": 4, "when": "dinner"}', ""),
        ('{"name": "Ada", "guests": "4", "when": "dinner"}', "against the schema"),
        ('{"name": "Ada", "when": "dinner"}', "'guests' is a required property"),
        ('{"name": "Ada", "guests": 4, "when": "tea"}', "is not one of"),
        ('{"name": "Ada", "guests": 4,', "no JSON"),
    ],
)
def test_arguments_are_held_against_their_schema(arguments: str, wrong: str) -> None:
    from lockstep.verify.endpoint import ToolCall

    reading = Reading(True, finish="tool_calls", tool_calls=(ToolCall("book_table", arguments),))
    found = conformance.failure(conformance.CASES[0], reading)
    assert wrong in found
    assert bool(found) == bool(wrong)


def test_template_differences_are_told_apart() -> None:
    def judged(extra: Sequence[int], bare: int = 0) -> str:
        names = [*template.CONVERSATIONS, *(n + template.BARE for n in template.TEXTS)]
        counts = [
            template.Count(name, 20, 20 + (bare if name.endswith(template.BARE) else more))
            for name, more in zip(names, [*extra, 0, 0, 0], strict=True)
        ]
        return template.judge(counts).reason

    same = [0] * len(template.CONVERSATIONS)
    assert "equal token counts" in judged(same)
    assert "always +12, as a text that is added" in judged([12] * len(same))
    assert "so the template is another" in judged([1, *same[1:]])
    assert "tokenizer is another" in judged([1, *same[1:]], bare=2)


async def test_a_server_that_answers_nothing_is_undecidable() -> None:
    dead = Vendor(lambda path, body: (503, {"error": {"message": "starting"}}))
    found = await check(dead.endpoint(), Toy().vendor().endpoint(), draws=10)
    assert found[FINGERPRINT].verdict is Verdict.UNDECIDABLE
    assert "503" in found[FINGERPRINT].reason


def test_the_command_writes_a_report_that_can_be_sent(tmp_path: Path) -> None:
    runner = CliRunner()
    ledger = tmp_path / "ledger.jsonl"

    def run(b: str, report: Path) -> Any:
        options = ["--longest", "128", "--draws", "40", "--ledger", str(ledger)]
        return runner.invoke(app, ["verify", "provider", a, b, *options, "--report", str(report)])

    with serving(Toy().vendor()) as a, serving(Toy(weights=2).vendor()) as b:
        result = run(a, tmp_path / "same.html")
        assert result.exit_code == 0, result.output
        result = run(b, tmp_path / "other.md")
        assert result.exit_code == 1, result.output
    assert "<html" in (tmp_path / "same.html").read_text()
    text = (tmp_path / "other.md").read_text()
    assert "# Is it the same model?" in text
    assert "**FAIL** next-token distributions" in text
    assert "n = 10" in text
    records = [json.loads(line) for line in ledger.read_text().splitlines()]
    assert [r["verdict"] for r in records if "verdict" in r] == ["pass", "fail"]


def test_nothing_in_a_report_is_markup() -> None:
    from lockstep.verify.report import Section

    section = Section("a|b", ["<script>*x*"], ["h"], [["a|b\nc"]])
    finding = Finding("x", Verdict.PASS, "", section)
    text = markdown(report_of([finding], "http://a", "http://b"))
    assert "<script>" not in text.replace("\\<script\\>", "")
    assert "| a\\|b c |" in text


async def test_requests_go_out_in_turns() -> None:
    order: list[str] = []

    class Side:
        def __init__(self, name: str) -> None:
            self.name = name

        async def ask(self, request: ProbeRequest) -> Reading:
            order.append(f"{self.name}{request.prompt}")
            return Reading(True)

    requests = [ProbeRequest(prompt=str(i)) for i in range(3)]
    await fingerprint.in_turns(Side("a"), Side("b"), requests)
    assert order == ["a0", "b0", "a1", "b1", "a2", "b2"]
