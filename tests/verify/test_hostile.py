"""Servers, rules and keys that are careless or mean harm: refused or read, never an exception."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from zlib import crc32

import httpx
import pytest

from lockstep.verify.difference import gaps
from lockstep.verify.drift.measure import logprob_distance
from lockstep.verify.endpoint import Endpoint, EndpointError, ProbeRequest
from lockstep.verify.ledger import GENESIS, check, past_runs
from lockstep.verify.ledger_report import report_of
from lockstep.verify.probe import Reading, ToolCall, Usage
from lockstep.verify.provider.check import check_provider
from lockstep.verify.provider.sampling import goodness_of_fit
from lockstep.verify.reply import read, refusal
from lockstep.verify.rule import RuleError, parse
from lockstep.verify.scoring import is_json_object
from lockstep.verify.verdict import Tally, Verdict

DEEP = "[" * 100_000
RULE = """
name: odd
endpoints: {a: {url: "http://a"}, b: {url: "http://b"}}
criterion: {kind: exact}
"""
ONE = RULE + "requests: [{prompt: hi}]\n"


def _chat(logprob: Any) -> bytes:
    entry = {"token": "x", "logprob": logprob, "top_logprobs": []}
    choice = {"message": {"content": "x"}, "logprobs": {"content": [entry]}}
    return json.dumps({"choices": [choice]}).encode()


@pytest.mark.parametrize("value", [10**400, 1000.0, math.inf, math.nan, True, "-1"])
def test_what_is_no_logprob_makes_the_answer_unreadable(value: Any) -> None:
    found = read(_chat(value), chat=True, seconds=0.0)
    assert not found.ok
    assert found.error.startswith("unreadable: a logprob is")


@pytest.mark.parametrize("value", [-math.inf, -(10**400), -9999.0, 1e-6, 0])
def test_ruled_out_and_sure_tokens_are_read_and_compared(value: Any) -> None:
    found = read(_chat(value), chat=True, seconds=0.0)
    assert found.ok
    compared = gaps(found, read(_chat(-1.0), chat=True, seconds=0.0))
    assert compared is not None
    assert 0.0 <= compared.probability <= 1.0


def test_json_that_is_nested_too_deep_is_no_json() -> None:
    assert not ToolCall("f", DEEP).parses
    assert not is_json_object(DEEP)
    assert refusal(500, DEEP.encode(), 0.0).error.startswith("status 500: [[[")
    assert read(DEEP.encode(), chat=True, seconds=0.0).error.startswith("unreadable: not JSON")


def test_lone_surrogates_can_be_printed_and_still_differ() -> None:
    def of(escape: str) -> Reading:
        body = f'{{"choices": [{{"text": "x{escape}"}}], "system_fingerprint": "{escape}"}}'
        return read(body.encode(), chat=False, seconds=0.0)

    one, other, pair = of("\\ud800"), of("\\uDFFF"), of("\\ud83d\\ude00")
    assert one.text == "x\\ud800"
    assert other.text == other.fingerprint.join(["x", ""]) == "x\\udfff"
    assert pair.text == "x\N{GRINNING FACE}"
    assert refusal(500, b'{"error": "\\ud800"}', 0.0).error == "status 500: \\ud800"


def test_tokens_that_both_sides_rule_out_are_no_distance() -> None:
    one = {"a": -0.1, "b": -math.inf}
    assert logprob_distance(one, dict(one)) == 0.0
    assert 0.0 < logprob_distance(one, {"a": -0.1, "b": -1.0}) <= 20.0


@pytest.mark.parametrize("nothing", [-9999.0, -math.inf])
def test_draws_beside_a_token_without_probability_follow_the_logprobs(nothing: float) -> None:
    logprobs = {"a": math.log(0.5), "b": math.log(0.5), "c": nothing}
    assert goodness_of_fit({"a": 100, "b": 100}, logprobs) > 0.5
    assert goodness_of_fit({"a": 95, "b": 95, "c": 10}, logprobs) < 1e-3


@pytest.mark.parametrize("key", ["sk-secret\n", "sk secret", "sk-sécret", "\x00sk-secret"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(EndpointError) as refused:
        Endpoint("http://localhost:1", api_key=key)
    assert "cret" not in str(refused.value)


async def test_a_server_that_repeats_the_key_does_not_put_it_into_reports() -> None:
    def repeat(request: httpx.Request) -> httpx.Response:
        said = {"error": {"message": f"refused: {request.headers['authorization']}"}}
        return httpx.Response(401, json=said)

    transport = httpx.MockTransport(repeat)
    async with Endpoint("http://x", "m", "sk-secret", transport=transport) as endpoint:
        found = await endpoint.ask(ProbeRequest(prompt="x"))
    assert found.error == "status 401: refused: Bearer [API key]"


@pytest.mark.parametrize("url", ["http://user:secret@host/v1", "https://secret@host"])
def test_a_url_with_a_password_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(EndpointError, match="of host holds a user or a password") as refused:
        Endpoint(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ONE + "timeout: .inf", "timeout"),
        (ONE + "timeout: .nan", "timeout"),
        (ONE + "defaults: {extra: {x: .inf}}", "holds what JSON has not"),
        (ONE + "defaults: {extra: {day: 2020-01-01}}", "holds what JSON has not"),
        (ONE + "defaults: {extra: &a {x: *a}}", "not YAML"),
        (RULE + "requests: [{prompt: 2020-99-99}]", "not YAML"),
        (ONE + "seed: 1" + "0" * 5000, "not YAML"),
        (ONE + "\trounds: 1", "not YAML"),
        (ONE + "? [a]\n: 1", "not YAML"),
        (ONE + "rounds: 1\nrounds: 2", "the key 'rounds' is there twice"),
        (RULE + "requests: [{prompt: " + "x" * (1 << 20) + "}]", "at most 1048576"),
    ],
)
def test_odd_rules_are_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(RuleError, match=said):
        parse(text)


def test_aliases_that_unfold_without_end_are_refused_at_once() -> None:
    lines = [f"    a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    bomb = "requests:\n - prompt: hi\n   extra:\n    a0: &a0 [1, 1]\n" + "\n".join(lines)
    with pytest.raises(RuleError, match="its aliases unfold to"):
        parse(RULE + bomb)
    shared = "requests: [{prompt: hi, extra: &e {x: 1}}, {prompt: ho, extra: *e}]"
    assert parse(RULE + shared).hash == parse(RULE + shared.replace("*e", "{x: 1}")).hash


class _Busy:
    """Always the same model; refuses a share of the requests because there are too many."""

    name = "busy"

    def __init__(self, share: float, error: str) -> None:
        self._share, self._error, self._asked = share, error, 0

    async def ask(self, request: ProbeRequest) -> Reading:
        self._asked += 1
        if self._asked * self._share % 1 < self._share:
            return Reading(False, error=self._error)
        value = -0.5 - crc32(str(request.messages).encode()) % 1000 / 500
        calls = (ToolCall("now", "{}"),) if request.tools and request.tool_choice != "none" else ()
        logprobs = (("a", value), ("b", math.log1p(-math.exp(value))))
        text = "a" if (request.seed or 0) / 100 < math.exp(value) else "b"
        usage = Usage(10, 1)
        return Reading(True, text, ("a",), (value,), (logprobs,), "stop", calls, usage)


@pytest.mark.parametrize(
    "error", ["status 429: slow down", "status 503: busy", "timeout", "unreachable: ReadError"]
)
@pytest.mark.parametrize("share", [0.07, 0.6])
async def test_a_provider_that_limits_requests_is_not_called_another_model(
    share: float, error: str
) -> None:
    findings = await check_provider(_Busy(0.0, ""), _Busy(share, error), draws=100)
    assert not [f.name for f in findings if f.verdict is Verdict.FAIL]
    undecided = [f.name for f in findings if f.verdict is Verdict.UNDECIDABLE]
    assert "context length" in undecided
    if share > 0.5:
        assert {"next-token distributions", "function calls"} <= set(undecided)


async def test_a_refusal_of_long_prompts_still_is_one() -> None:
    class Short(_Busy):
        async def ask(self, request: ProbeRequest) -> Reading:
            if len(str(request.messages)) > 3000:
                return Reading(False, error="status 400: the prompt is too long")
            return await super().ask(request)

    findings = await check_provider(_Busy(0.0, ""), Short(0.0, ""), draws=100)
    assert [f.name for f in findings if f.verdict is Verdict.FAIL] == ["context length"]


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "run.started"},
        {"kind": "run.started", "run": ["x"], "time": 1},
        {"kind": "run.ended", "run": "x", "figures": 3, "details": {}},
        {"kind": ["run.ended"], "details": {"file": "..", "sha256": 1}},
    ],
)
def test_a_forged_record_is_a_finding_and_no_crash(tmp_path: Path, fields: dict[str, Any]) -> None:
    path = tmp_path / "l.jsonl"
    record = {"seq": 0, "previous": GENESIS, "hash": "0", **fields}
    path.write_text(json.dumps(record) + "\n")
    checked = check(path)
    assert "line 1: it was changed" in checked.problems[0]
    assert len(past_runs(checked.records)) == (fields["kind"] == "run.started")
    assert report_of(path, checked).sections


def test_a_request_that_is_unread_and_counted_has_bounds() -> None:
    """A drift of probabilities is not transitive: A may part from itself and from no B alone."""
    bounds = Tally(requests=1, own=1, cross=0, more=0, less=1, unread=1).excess(0.95)
    assert -1.0 <= bounds.low <= bounds.high <= 1.0
