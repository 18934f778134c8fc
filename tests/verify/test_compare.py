"""Planted cases of which the truth is known, undecidable ones among them."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from lockstep.verify.compare import Comparison, compare
from lockstep.verify.comparison_report import details, figures, report_of
from lockstep.verify.difference import Decision, Parting, gaps, parting
from lockstep.verify.endpoint import Reading
from lockstep.verify.report import html
from lockstep.verify.rule import Rule, parse
from lockstep.verify.statistics import clopper_pearson
from lockstep.verify.verdict import Tally, Verdict, judge
from tests.verify.servers import (
    Script,
    Scripted,
    changed,
    honest,
    noisy,
    reading,
    vendor,
    words_of,
)

EXACT = "{kind: exact}"


def rule(
    requests: int = 20, criterion: str = EXACT, difference: str = "{kind: token}", more: str = ""
) -> Rule:
    listed = "\n".join(f"  - {{prompt: p{index}, logprobs: 1}}" for index in range(requests))
    return parse(
        "name: planted\nendpoints: {a: {url: 'http://a'}, b: {url: 'http://b'}}\n"
        f"requests:\n{listed}\ncriterion: {criterion}\ndifference: {difference}\n{more}"
    )


async def found(fixed: Rule, a: Script, b: Script) -> Comparison:
    return await compare(fixed, Scripted(a), Scripted(b))


async def test_identical_deployments_pass() -> None:
    one = await found(rule(), honest, honest)
    assert one.verdict is Verdict.PASS
    assert one.reason == "B differs from A on 0 of 20 requests, the rule allows 0"
    assert figures(one)["cross"] == {
        "count": 0,
        "low": 0.0,
        "high": pytest.approx(0.1684, abs=1e-3),
    }
    assert figures(one)["logprob_gap"]["cross"]["largest"] == 0.0


@pytest.mark.parametrize(("allow", "verdict"), [(2, "fail"), (3, "pass"), (4, "pass")])
async def test_one_differing_token_in_three_of_twenty_is_counted(allow: int, verdict: str) -> None:
    planted = {"p3", "p8", "p19"}
    one = await found(rule(criterion=f"{{kind: exact, allow: {allow}}}"), honest, changed(planted))
    assert one.verdict == verdict
    assert {row.item.request.prompt for row in one.rows if row.cross} == planted
    known = figures(one)
    assert (known["own"]["count"], known["cross"]["count"], known["b_own"]["count"]) == (0, 3, 0)
    assert known["first_difference"] == {
        "smallest": 3,
        "median": 3,
        "largest": 3,
        "units": ["token"],
    }
    text = html(report_of(one, "A", "B"))
    assert verdict in text
    assert "token 3" in text
    assert str(one.rule.hash) in text


async def test_a_reference_that_differs_from_itself_decides_nothing() -> None:
    """A noisy itself: whatever B is, equal, better or worse, the rule cannot say."""
    for b in (noisy(0.3, 2), honest, changed({f"p{i}" for i in range(20)})):
        one = await found(rule(), noisy(0.3, 1), b)
        assert one.verdict is Verdict.UNDECIDABLE
        assert one.reason.startswith("A differs from itself on ")


async def test_confirmation_unmasks_a_reference_that_agreed_with_itself_by_luck() -> None:
    """A's first two answers agree, its later ones differ: without confirmation a false fail."""

    def lucky(prompt: str, before: int) -> Reading:
        words = words_of(prompt, 6)
        return reading([*words[:5], "late"] if prompt == "p4" and before >= 2 else words)

    planted = changed({"p4"})
    careless = await found(rule(criterion="{kind: exact, confirm: 0}"), lucky, planted)
    assert careless.verdict is Verdict.FAIL
    careful = await found(rule(criterion="{kind: exact, confirm: 1}"), lucky, planted)
    assert careful.verdict is Verdict.UNDECIDABLE
    asked = next(row for row in careful.rows if row.cross)
    assert len(asked.a) == len(asked.b) == 3
    assert sum(len(row.a) for row in careful.rows) == 2 * 20 + 1, "only what differs is confirmed"


def failing(prompts: set[str], rest: Script) -> Script:
    def script(prompt: str, before: int) -> Reading:
        if prompt in prompts:
            return Reading(False, error="status 503: overloaded")
        return rest(prompt, before)

    return script


async def test_a_server_that_fails_some_requests_is_neither_pass_nor_fail() -> None:
    some = {"p1", "p2"}
    for a, b in ((failing(some, honest), honest), (honest, failing(some, honest))):
        one = await found(rule(), a, b)
        assert one.verdict is Verdict.UNDECIDABLE
        assert one.reason.endswith("but 2 could not be compared")
        assert figures(one)["unread"] == 2
        (why,) = figures(one)["failures"]
        assert why.endswith(": status 503: overloaded")
    enough = await found(rule(criterion="{kind: exact, allow: 2}"), honest, failing(some, honest))
    assert enough.verdict is Verdict.PASS, "even if both differed, the rule would allow it"
    worse = await found(rule(), honest, failing(some, changed({"p7"})))
    assert worse.verdict is Verdict.FAIL, "a difference that was seen is one, whatever failed"
    everything = {f"p{index}" for index in range(20)}
    nothing = await found(rule(), honest, failing(everything, honest))
    assert nothing.verdict is Verdict.UNDECIDABLE
    assert nothing.reason == "none of the 20 requests could be compared"


RELATIVE = "{kind: relative, margin: 0.05, most_own: 0.5}"


async def test_relative_to_its_own_noise_an_equal_deployment_passes_and_a_changed_one_fails() -> (
    None
):
    fixed = rule(800, RELATIVE)
    equal = await found(fixed, noisy(0.05, 1), noisy(0.05, 2))
    assert equal.tally.own > 20, "the noise is there"
    assert equal.verdict is Verdict.PASS
    planted = {f"p{index}" for index in range(0, 800, 5)}
    worse = await found(fixed, noisy(0.05, 1), changed(planted))
    assert worse.verdict is Verdict.FAIL
    assert figures(worse)["sign_test"] < 1e-9


async def test_relative_with_few_requests_or_much_noise_is_undecidable() -> None:
    few = await found(rule(20, RELATIVE), honest, honest)
    assert few.verdict is Verdict.UNDECIDABLE
    assert "too few requests" in few.reason
    loud = await found(rule(200, "{kind: relative, margin: 0.05}"), noisy(0.3, 1), noisy(0.3, 2))
    assert loud.verdict is Verdict.UNDECIDABLE
    assert loud.reason.startswith("A differs from itself on ")
    mute = await found(rule(400, RELATIVE), honest, failing({f"p{i}" for i in range(40)}, honest))
    assert mute.verdict is Verdict.UNDECIDABLE
    assert mute.reason.endswith("40 requests could not be compared")


@pytest.mark.parametrize(
    "criterion", ["{kind: relative, margin: 0, most_own: 0.9}", "{kind: exact, confirm: 2}"]
)
async def test_equal_noise_is_called_a_difference_as_rarely_as_stated(criterion: str) -> None:
    """Null: B is A, noisy at 10%. The sign test at 5%, and fails, in 120 comparisons."""
    fixed = rule(40, criterion)
    alarms = fails = 0
    for seed in range(120):
        one = await found(fixed, noisy(0.1, 2 * seed), noisy(0.1, 2 * seed + 1))
        alarms += figures(one)["sign_test"] <= 0.05
        fails += one.verdict is Verdict.FAIL
    assert clopper_pearson(alarms, 120, 0.999).low <= 0.05
    assert clopper_pearson(fails, 120, 0.999).low <= 0.05


async def test_a_first_asking_that_differs_from_later_ones_is_no_difference_of_b() -> None:
    """Both answer otherwise when the prompt is cold: the pairs that are compared cancel it."""

    def cold(prompt: str, before: int) -> Reading:
        words = words_of(prompt, 6)
        return reading([*words[:5], "cold"] if before == 0 else words)

    one = await found(rule(300, "{kind: relative, margin: 0.02, most_own: 1.0e-9}"), honest, cold)
    assert one.tally.cross == 0
    assert figures(one)["b_own"]["count"] == 300
    both = await found(rule(50, "{kind: relative, margin: 0.02, most_own: 0.5}"), cold, cold)
    assert both.tally.own == 50
    assert both.tally.more == 0


async def test_the_order_is_interleaved_and_drawn_from_the_seed() -> None:
    heard: list[str] = []

    class Side(Scripted):
        async def ask(self, request: Any) -> Reading:
            heard.append(f"{self.name}{request.prompt}")
            return await super().ask(request)

    orders = []
    for seed in (1, 1, 2):
        heard.clear()
        await compare(
            rule(8, more=f"rounds: 2\nseed: {seed}\n"), Side(honest, "a"), Side(honest, "b")
        )
        orders.append(list(heard))
    assert orders[0] == orders[1] != orders[2]
    assert len(orders[0]) == 8 * 2 * 4
    for start in range(0, len(orders[0]), 4):
        four = orders[0][start : start + 4]
        assert sorted(name[0] for name in four) == ["a", "a", "b", "b"]
        assert len({name[1:] for name in four}) == 1
    firsts = "".join(orders[0][start][0] for start in range(0, len(orders[0]), 4))
    assert {"a", "b"} == set(firsts), "neither side always comes first"


async def test_decisions_flip_and_words_may_vary() -> None:
    def says(words: dict[str, str]) -> Script:
        return lambda prompt, before: reading(words.get(prompt, "yes of course").split())

    decision = "{kind: decision, options: ['yes', 'no']}"
    reworded = await found(rule(5, EXACT, decision), says({}), says({"p1": "well YES"}))
    assert reworded.verdict is Verdict.PASS
    flipped = await found(rule(5, EXACT, decision), says({}), says({"p1": "no or yes"}))
    assert flipped.verdict is Verdict.FAIL
    none = await found(rule(5, EXACT, decision), says({}), says({"p1": "nobody knows"}))
    assert none.verdict is Verdict.FAIL, "no decision is not the same decision"
    pattern = Decision(pattern=r"answer: (\w+)")
    assert pattern.of("So the answer: Seven.") == "seven"
    assert pattern.of("So what") == ""


async def test_probabilities_that_move_by_more_than_the_rule_allows() -> None:
    def shifted(shift: float) -> Script:
        return lambda prompt, before: reading(words_of(prompt, 6), shift if prompt == "p2" else 0)

    kind = "{kind: probability, above: 0.05}"
    assert (await found(rule(5, EXACT, kind), honest, shifted(-0.01))).verdict is Verdict.PASS
    assert (await found(rule(5, EXACT, kind), honest, shifted(-0.5))).verdict is Verdict.FAIL

    def mute(prompt: str, before: int) -> Reading:
        return Reading(True, text=" ".join(words_of(prompt, 6)))

    silent = await found(rule(5, EXACT, kind), honest, mute)
    assert silent.verdict is Verdict.UNDECIDABLE
    assert figures(silent)["failures"] == {"the answer reports no logprobs": 5}


async def test_a_score_that_drops_counts_and_gains_count_against_it() -> None:
    listed = "\n".join(
        f"  - {{prompt: p{index}, expect: {{contains: 'right'}}}}" for index in range(100)
    )
    fixed = parse(
        "name: scores\nendpoints: {a: {url: 'http://a'}, b: {url: 'http://b'}}\n"
        f"requests:\n{listed}\ncriterion: {{kind: exact, allow: 5}}\ndifference: {{kind: score}}\n"
    )

    def right(share: range) -> Script:
        inside = {f"p{index}" for index in share}
        return lambda prompt, before: reading(["right" if prompt in inside else "wrong"])

    moved = await found(fixed, right(range(80)), right(range(10, 90)))
    assert (moved.tally.more, moved.tally.less, moved.tally.cross) == (10, 10, 0)
    assert moved.verdict is Verdict.PASS
    worse = await found(fixed, right(range(80)), right(range(70)))
    assert worse.verdict is Verdict.FAIL
    assert worse.reason.startswith("B loses against A, on balance, on 10 of 100 requests")
    better = await found(fixed, right(range(70)), right(range(80)))
    assert better.verdict is Verdict.PASS


def test_where_answers_part() -> None:
    one = Reading(True, text="a b", tokens=("a", " b"), finish="stop")
    assert parting(one, one) is None
    ended = Reading(True, text="a b", tokens=("a", " b", "<end>"), finish="stop")
    assert parting(one, ended) is None, "one lists the token that ended it"
    other = Reading(True, text="a c", tokens=("a", " c"), finish="stop")
    assert parting(one, other) == Parting(1, "token", " b", " c")
    longer = Reading(True, text="a b c", tokens=("a", " b", " c"), finish="stop")
    assert parting(one, longer) == Parting(2, "token", "", " c")
    bare = Reading(True, text="a c", finish="stop")
    assert parting(one, bare) == Parting(2, "character", "b", "c")
    cut = Reading(True, text="a b", tokens=("a", " b"), finish="length")
    assert parting(one, cut) == Parting(2, "end", "stop", "length")


def test_gaps_stop_where_texts_part_and_take_what_both_report() -> None:
    def told(tokens: tuple[str, ...], values: tuple[float, ...]) -> Reading:
        top = tuple((("x", -3.0), ("y", -2.0)) for _ in tokens)
        return Reading(True, text="".join(tokens), tokens=tokens, logprobs=values, top=top)

    one, other = (
        told(("a", "b", "c"), (-1.0, -1.0, -9.0)),
        told(("a", "d", "c"), (-1.5, -4.0, -1.0)),
    )
    seen = gaps(one, other)
    assert seen is not None
    assert (seen.logprob, seen.positions) == (0.5, 2)
    assert gaps(one, Reading(True, text="abc")) is None
    never = float("-inf")
    same = gaps(told(("a",), (never,)), told(("a",), (never,)))
    assert same is not None
    assert same.logprob == 0.0


def test_the_verdict_is_a_function_of_the_counts() -> None:
    source = random.Random(5)
    fixed = rule(criterion=RELATIVE).criterion
    for _ in range(300):
        requests = source.randint(1, 400)
        more, less = source.randint(0, requests // 3), source.randint(0, requests // 3)
        both = source.randint(0, requests // 3)
        unread = source.randint(0, requests - more - less - both)
        tally = Tally(requests, less + both, more + both, more, less, unread)
        verdict, _ = judge(tally, fixed)
        bounds = tally.excess(0.95)
        assert bounds.low <= (more - less) / requests <= bounds.high
        if verdict is Verdict.PASS:
            assert (more + unread - less) / requests <= 0.05
        if verdict is Verdict.FAIL:
            assert (more - less - unread) / requests > 0.05


async def test_over_http_a_failing_vendor_and_markup_in_answers() -> None:
    """The whole way, and an answer that would be markup in the report."""
    a, b = vendor(), vendor(lambda prompt: ["<script>alert(1)</script>", *words_of(prompt, 5)])
    fixed = rule(6, more="concurrency: 3\nrounds: 2\n")
    async with a.endpoint() as one, b.endpoint() as other:
        seen = await compare(fixed, one, other)
    assert seen.verdict is Verdict.FAIL
    assert figures(seen)["fingerprints"] == {"a": ["vendor-1"], "b": ["vendor-1"]}
    text = html(report_of(seen, "A", "B"))
    assert "<script" not in text
    assert "alert(1)" in text
    outside = re.findall(r"""(?:src|href)\s*=\s*["'](?!#)|url\((?!#)|@import""", text)
    assert not outside, "it loads nothing"
    assert len(details(seen)["requests"][0]["a"]) == 4 + 4, "two rounds, and four to confirm"
