"""`verify` on the real SmolLM2 behind HTTP: its noise is exactly zero, and other seeds differ."""

from __future__ import annotations

from lockstep.verify.compare import compare
from lockstep.verify.comparison_report import figures
from lockstep.verify.endpoint import Endpoint
from lockstep.verify.noise import Plan, measure, questions
from lockstep.verify.noise_report import reason_of
from lockstep.verify.rule import parse
from lockstep.verify.verdict import Verdict
from tests.server.support import ServerThread


async def test_c01_c03_the_noise_of_lockstep_is_exactly_zero(server: ServerThread) -> None:
    """Cold and warm, alone and in a crowd, beside prompts of more than 256 rows."""
    plan = Plan(questions("case", count=8, max_tokens=8), 1, 8, 1, 300)
    async with Endpoint(server.url) as endpoint:
        found = await measure(plan, endpoint)
    assert found.verdict == "zero", reason_of(found)
    assert all(one.answers for one in found.conditions)
    assert all(value == 0.0 for one in found.conditions for value in one.moved if value is not None)
    cached = {one.name: one.cached or 0 for one in found.conditions}
    assert cached["alone, warm"] > 8 * 31, "more than the template's own tokens came from the cache"
    assert found.conditions[-1].prefills[0] > 0


async def test_c11_seeds_hold_over_http_and_other_seeds_are_told_apart(
    server: ServerThread,
) -> None:
    text = (
        "name: seeds\nendpoints: {a: {url: 'http://a'}, b: {url: 'http://b'}}\nconcurrency: 4\n"
        "defaults: {temperature: 1, seed: 5, max_tokens: 8, logprobs: 1}\n"
        "requests: [{prompt: Once upon a time}, {prompt: The old map}, {prompt: In the sea}]\n"
        "criterion: {kind: exact, confirm: 0}\n"
    )
    async with Endpoint(server.url) as a, Endpoint(server.url) as b:
        same = await compare(parse(text), a, b)
    assert same.verdict is Verdict.PASS
    assert figures(same)["logprob_gap"]["cross"]["largest"] == 0.0
    async with Endpoint(server.url) as a, Endpoint(server.url, extra={"seed": 6}) as b:
        other = await compare(parse(text), a, b)
    assert other.verdict is Verdict.FAIL
    assert other.tally.own == 0
