"""Servers, rules and keys that are careless or mean harm: refused or read, never an exception."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import pytest

from lockstep.verify.difference import gaps
from lockstep.verify.drift.measure import logprob_distance
from lockstep.verify.endpoint import Endpoint, EndpointError, ProbeRequest
from lockstep.verify.probe import ToolCall
from lockstep.verify.provider.sampling import goodness_of_fit
from lockstep.verify.reply import read, refusal
from lockstep.verify.rule import RuleError, parse
from lockstep.verify.scoring import is_json_object

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
