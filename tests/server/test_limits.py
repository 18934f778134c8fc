"""Rates, crowds and sizes: who has to wait, for how long, and what is too long."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.server.auth import new_key
from lockstep.server.limits import Allowance, Bucket
from tests.server.support import ServerThread, fake_llm, wait_until

ASK = {"model": "parrot", "prompt": "hello there", "max_tokens": 2}
CHAT = {"model": "parrot", "messages": [{"role": "user", "content": "one two three " * 9}]}
LONG = "word " * 300


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.floats(0, 100), st.integers(0, 200)), max_size=40),
)
def test_a_bucket_never_gives_more_than_its_rate(
    limit: int, events: list[tuple[float, int]]
) -> None:
    """Over any time, what is taken while it has some is at most a full bucket and the refill."""
    clock = Clock()
    bucket = Bucket(limit, clock)
    taken, last, start = 0, 0, clock.now
    for pause, amount in events:
        clock.now += pause
        wait = bucket.wait(1.0)
        if wait == 0:
            bucket.take(amount)
            taken, last = taken + amount, amount
        else:
            clock.now += wait  # waiting as long as told is enough
            assert bucket.wait(1.0) < 1e-6
        assert bucket.level() <= limit
        allowed = limit + (clock.now - start) * limit / 60
        assert taken - last <= allowed + 1e-6


def test_an_allowance_refills_a_request_at_a_time() -> None:
    clock = Clock()
    allowance = Allowance("it", requests=6, tokens=0, concurrent=0, clock=clock)
    assert [allowance.enter() for _ in range(6)] == [None] * 6
    refusal = allowance.enter()
    assert refusal is not None
    assert refusal.kind == "requests"
    assert refusal.seconds == pytest.approx(10.0)
    assert allowance.headers()["x-ratelimit-remaining-requests"] == "0"
    clock.now += 10.0
    assert allowance.enter() is None
    assert allowance.enter() is not None
    clock.now += 3600
    assert allowance.headers() == {
        "x-ratelimit-limit-requests": "6",
        "x-ratelimit-remaining-requests": "6",
        "x-ratelimit-reset-requests": "0.000s",
    }


def test_tokens_are_owed_when_more_were_used_than_there_were() -> None:
    clock = Clock()
    allowance = Allowance("it", requests=0, tokens=60, concurrent=0, clock=clock)
    assert allowance.enter() is None
    allowance.charge(90)
    refusal = allowance.enter()
    assert refusal is not None
    assert refusal.kind == "tokens"
    assert refusal.seconds == pytest.approx(31.0)  # 30 owed, and one to go on with
    clock.now += 31.0
    assert allowance.enter() is None


def test_a_refused_request_costs_nothing() -> None:
    clock = Clock()
    allowance = Allowance("it", requests=2, tokens=0, concurrent=1, clock=clock)
    assert allowance.enter() is None
    for _ in range(5):
        refusal = allowance.enter()
        assert refusal is not None
        assert refusal.kind == "concurrent"
    allowance.leave()
    assert allowance.enter() is None
    assert allowance.running == 1


def test_requests_a_minute_over_http(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    small = new_key(path, "small", requests_per_minute=2)
    free = new_key(path, "free", requests_per_minute=0)
    with ServerThread(fake_llm, keys_file=str(path), requests_per_minute=3) as server:

        def ask(key: str) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"}
            return httpx.post(f"{server.url}/v1/completions", json=ASK, headers=headers)

        replies = [ask(small) for _ in range(3)]
        assert [reply.status_code for reply in replies] == [200, 200, 429]
        assert [r.headers["x-ratelimit-remaining-requests"] for r in replies] == ["1", "0", "0"]
        assert replies[0].headers["x-ratelimit-limit-requests"] == "2"
        assert 1 <= int(replies[2].headers["retry-after"]) <= 30
        error = replies[2].json()["error"]
        assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
        assert "'small'" in error["message"]
        assert "2 requests" in error["message"]
        assert [ask(free).status_code for _ in range(6)] == [200] * 6, "keys do not share"
        headers = {"authorization": f"Bearer {small}"}
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200


def test_tokens_a_minute_over_http() -> None:
    with ServerThread(fake_llm, tokens_per_minute=20) as server:
        first = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT)
        assert first.status_code == 200
        assert first.headers["x-ratelimit-limit-tokens"] == "20"
        used = first.json()["usage"]["total_tokens"]
        assert used > 20
        second = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT)
        assert second.status_code == 429
        # Until what was used too much, and one more token, has been refilled.
        owed = (used - 20 + 1) * 3
        assert owed - 2 <= int(second.headers["retry-after"]) <= owed + 1
        assert "20 tokens" in second.json()["error"]["message"]


def test_requests_at_once_over_http() -> None:
    with ServerThread(lambda: fake_llm("slow"), max_concurrent=2) as server:
        body = {"model": "slow", "prompt": LONG, "max_tokens": 300, "stream": True}
        stop = threading.Event()

        def hold() -> None:
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as stream:
                assert stream.status_code == 200
                for _ in stream.iter_lines():
                    if stop.is_set():
                        return

        holders = [threading.Thread(target=hold) for _ in range(2)]
        for holder in holders:
            holder.start()
        wait_until(lambda: server.llm.stats().running == 2)
        ask = {**ASK, "model": "slow"}
        reply = httpx.post(f"{server.url}/v1/completions", json=ask)
        assert reply.status_code == 429
        assert reply.json()["error"]["code"] == "too_many_concurrent_requests"
        assert reply.headers["retry-after"] == "1"
        assert httpx.get(f"{server.url}/ready").status_code == 200
        stop.set()
        for holder in holders:
            holder.join(10)
        # Those who hung up have left by now, or do in a moment.
        end = time.monotonic() + 5
        while (status := httpx.post(f"{server.url}/v1/completions", json=ask).status_code) == 429:
            assert time.monotonic() < end
        assert status == 200


def test_long_prompts_and_answers() -> None:
    with ServerThread(fake_llm, max_prompt_tokens=50, max_output_tokens=5) as server:

        def error(path: str, **body: object) -> dict[str, object]:
            reply = httpx.post(f"{server.url}/v1/{path}", json={"model": "parrot", **body})
            assert reply.status_code == 400, reply.text
            return dict(reply.json()["error"])

        found = error("completions", prompt=LONG, max_tokens=1)
        assert (found["code"], found["param"]) == ("prompt_too_long", "prompt")
        assert "50" in str(found["message"])
        assert "300" in str(found["message"]) or "301" in str(found["message"])
        found = error("completions", prompt="x", max_tokens=6)
        assert (found["code"], found["param"]) == ("max_tokens_too_large", "max_tokens")
        assert "6" in str(found["message"])
        assert "5" in str(found["message"])
        found = error("responses", input="x", max_output_tokens=16)
        assert (found["code"], found["param"]) == ("max_tokens_too_large", "max_output_tokens")
        found = error("chat/completions", messages=[{"role": "user", "content": LONG}])
        assert (found["code"], found["param"]) == ("prompt_too_long", "messages")
        long = [{"role": "user", "content": "one two three four five six seven eight nine"}]
        reply = httpx.post(
            f"{server.url}/v1/chat/completions", json={"model": "parrot", "messages": long}
        ).json()
        assert reply["choices"][0]["finish_reason"] == "length"
        assert reply["usage"]["completion_tokens"] == 5
        scored = {"model": "parrot", "prompt": "x y", "max_tokens": 0, "echo": True, "logprobs": 1}
        assert httpx.post(f"{server.url}/v1/completions", json=scored).status_code == 200
