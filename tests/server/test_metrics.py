"""What `/metrics` counts, that it adds up, and that the example dashboard asks for what exists."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from lockstep.server.metrics import Histogram
from tests.server.support import ServerThread, fake_llm, wait_until

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
# What Prometheus sends; an answer in OpenMetrics would have other names.
PROMETHEUS_ACCEPTS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=0.0.4;q=0.4,*/*;q=0.1"
)
FAIL, CRASH = 13, 14  # see tests.server.support.make_engine


def scrape(url: str, key: str = "none") -> Samples:
    headers = {"accept": PROMETHEUS_ACCEPTS, "authorization": f"Bearer {key}"}
    reply = httpx.get(f"{url}/metrics", headers=headers)
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/plain; version=")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    """The sum of the samples of a name that have these labels."""
    found = [
        number
        for (own, pairs), number in samples.items()
        if own == name and labels.items() <= dict(pairs).items()
    ]
    assert found or labels, f"there is no {name}"
    return sum(found)


def adds_up(samples: Samples) -> bool:
    accepted = value(samples, "lockstep:requests_accepted_total")
    outcomes = value(samples, "lockstep:requests_outcome_total")
    return accepted == outcomes + value(samples, "lockstep:requests_in_flight")


@given(st.lists(st.floats(0, 2000), max_size=50))
def test_a_histogram_counts_as_prometheus_does(values: list[float]) -> None:
    histogram = Histogram((0.5, 1.0, 100.0))
    for each in values:
        histogram.observe(each)
    samples = histogram.family("x", "text", "model").samples
    for bound in (0.5, 1.0, 100.0, float("inf")):
        (bucket,) = [s for s in samples if s.labels.get("le") in (str(bound), f"+{bound}".title())]
        assert bucket.value == sum(each <= bound for each in values)
    (total,) = [s.value for s in samples if s.name == "x_sum"]
    assert total == pytest.approx(sum(values))


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    with ServerThread(lambda: fake_llm("slow-fails")) as made:
        yield made


def ask(server: ServerThread, **body: Any) -> httpx.Response:
    content = {"model": "slow-fails", "max_tokens": 50, **body}
    return httpx.post(f"{server.url}/v1/completions", json=content, timeout=30)


def test_tokens_and_times_of_an_answer(server: ServerThread) -> None:
    before = scrape(server.url)
    reply = ask(server, prompt="one two three four five six", n=2).json()
    after = scrape(server.url)

    def grown(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    usage = reply["usage"]
    tokens = usage["completion_tokens"]
    assert tokens == 14
    for prefix in ("lockstep:", "vllm:"):
        assert grown(f"{prefix}prompt_tokens_total") == usage["prompt_tokens"]
        assert grown(f"{prefix}generation_tokens_total") == tokens
        assert grown(f"{prefix}request_success_total", finished_reason="stop") == 2
        for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
            assert grown(f"{prefix}{name}_seconds_count") == 1
        for name in ("request_prefill_time", "request_decode_time", "request_inference_time"):
            assert grown(f"{prefix}{name}_seconds_count") == 1
        assert grown(f"{prefix}inter_token_latency_seconds_count") == tokens - 2
        assert grown(f"{prefix}request_time_per_output_token_seconds_count") == 2
        assert grown(f"{prefix}request_generation_tokens_sum") == tokens
        assert grown(f"{prefix}request_prompt_tokens_sum") == usage["prompt_tokens"]
    # A step takes 30 ms; the prompt's and six more make one choice's answer.
    mean = grown("lockstep:inter_token_latency_seconds_sum") / (tokens - 2)
    assert 0.028 < mean < 2.0
    whole = grown("lockstep:e2e_request_latency_seconds_sum")
    parts = [
        grown(f"lockstep:{name}_seconds_sum")
        for name in ("request_queue_time", "request_prefill_time", "request_decode_time")
    ]
    assert all(part >= 0 for part in parts)
    assert 0.5 * whole < sum(parts) < whole + 0.001
    assert parts[2] > 6 * 0.028
    assert grown("lockstep:http_requests_total", route="/v1/completions", status="200") == 1


def test_a_server_that_lags_sends_several_tokens_at_once(server: ServerThread) -> None:
    name = "lockstep:inter_token_latency_seconds_count"
    before = value(scrape(server.url), name)
    text = "one two three four five six seven eight nine ten eleven twelve"
    body = {"model": "slow-fails", "prompt": text, "stream": True, "max_tokens": 50}
    body["stream_options"] = {"include_usage": True}
    pieces: list[str] = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if not pieces:  # the server stops for five steps, the engine goes on
                assert server.loop is not None
                server.loop.call_soon_threadsafe(time.sleep, 0.2)
            pieces += [choice["text"] for choice in chunk["choices"]]
            tokens = (chunk["usage"] or {}).get("completion_tokens", 0)
    assert "".join(pieces) == text
    assert len(pieces) < tokens - 2
    assert value(scrape(server.url), name) - before == tokens - 1


def test_a_wait_in_the_queue_is_queue_time() -> None:
    with ServerThread(lambda: fake_llm("slow", max_sequences=1)) as server:
        body = {"model": "slow", "prompt": ["a b c d e f g h i j"] * 2, "max_tokens": 20}
        assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
        samples = scrape(server.url)
        assert value(samples, "lockstep:request_queue_time_seconds_count") == 2
        # The second one waits for the eleven steps of the first.
        queue = value(samples, "lockstep:request_queue_time_seconds_sum")
        assert queue > 11 * 0.028
        assert value(samples, "lockstep:request_prefill_time_seconds_sum") < queue


def test_every_accepted_request_has_one_outcome() -> None:
    """Whatever becomes of requests, accepted = outcomes + in flight, at every moment."""
    url = ""

    async def one(client: httpx.AsyncClient, index: int) -> None:
        kind = index % 5
        body: dict[str, Any] = {"model": "slow-fails-kills", "max_tokens": 60, "prompt": "w " * 40}
        if kind == 1:
            body["stop"] = "w w w"
        if kind == 2:
            body["n"] = 2
        if kind == 3:
            body["prompt"] = ["a b", "c d", "e f"]
        if kind == 4:  # leaves in the middle
            body |= {"prompt": "w " * 200, "max_tokens": 250, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as stream:
                async for _ in stream.aiter_lines():
                    return
        reply = await client.post("/v1/completions", json={**body, "stream": index % 2 == 0})
        assert reply.status_code == 200

    async def watch(stop: asyncio.Event) -> int:
        looks = 0
        async with httpx.AsyncClient(base_url=url) as client:
            while not stop.is_set():
                text = (await client.get("/metrics")).text
                samples: Samples = {
                    (s.name, tuple(s.labels.items())): s.value
                    for family in text_string_to_metric_families(text)
                    for s in family.samples
                }
                assert adds_up(samples)
                looks += 1
                await asyncio.sleep(0.05)
        return looks

    async def crowd() -> None:
        stop = asyncio.Event()
        watching = asyncio.create_task(watch(stop))
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            await asyncio.gather(*(one(client, index) for index in range(50)))
        stop.set()
        assert await watching > 5

    with ServerThread(lambda: fake_llm("slow-fails-kills")) as server:
        url = server.url
        asyncio.run(crowd())
        wait_until(lambda: value(scrape(url), "lockstep:requests_in_flight") == 0)
        failing = {"model": "slow-fails-kills", "prompt": [FAIL, 500, 501], "max_tokens": 9}
        for stream in (False, True):
            httpx.post(f"{url}/v1/completions", json={**failing, "stream": stream})
        killed = httpx.post(
            f"{url}/v1/completions", json={"model": "slow-fails-kills", "prompt": [CRASH, 500]}
        )
        assert killed.status_code == 503
        wait_until(lambda: httpx.get(f"{url}/ready").status_code == 200)
        victim = server.llm.client.pid
        assert victim is not None
        body = {"model": "slow-fails-kills", "prompt": "w " * 100, "max_tokens": 99, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(victim, signal.SIGKILL)
            assert "SIGKILL" in "".join(lines)
        samples = scrape(url)
        assert adds_up(samples)
        assert value(samples, "lockstep:requests_in_flight") == 0
        outcome = {
            name: value(samples, "lockstep:requests_outcome_total", outcome=name)
            for name in ("completed", "cancelled", "failed", "lost")
        }
        # Ten of each kind; one kind is three requests in one, one leaves.
        assert outcome == {"completed": 60, "cancelled": 10, "failed": 2, "lost": 1}
        wait_until(lambda: value(scrape(url), "lockstep:engine_restarts_total") == 2)


def test_errors_are_counted_by_code_and_routes_are_few(server: ServerThread) -> None:
    before = scrape(server.url)
    for index in range(5):
        httpx.get(f"{server.url}/nothing/{index}")
        httpx.get(f"{server.url}/v1/models/other{index}")
        httpx.request("BREW", f"{server.url}/nothing")
    ask(server, prompt="x", temperature=-1)
    after = scrape(server.url)
    for code, count in (("not_found", 10), ("model_not_found", 5), ("invalid_value", 1)):
        grown = value(after, "lockstep:http_errors_total", code=code) - value(
            before, "lockstep:http_errors_total", code=code
        )
        assert grown == count, code
    routes = {dict(pairs).get("route") for (name, pairs) in after if "http_requests_total" in name}
    assert not any("nothing" in str(route) for route in routes)
    assert "/v1/models/{name:path}" in routes


def test_gateways_find_the_gauges_that_they_read(server: ServerThread) -> None:
    samples = scrape(server.url)
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        labels = (("model_name", "slow-fails"),)
        assert ("vllm:" + name, labels) in samples
        assert ("lockstep:" + name, labels) in samples
    with ServerThread(fake_llm, vllm_metric_names=False) as other:
        assert not any(name.startswith("vllm:") for name, _ in scrape(other.url))


def test_the_cache_is_told(server: ServerThread) -> None:
    prompt = "the same beginning of a long prompt " * 20
    ask(server, prompt=prompt, max_tokens=1)
    ask(server, prompt=prompt, max_tokens=1)
    wait_until(lambda: server.llm.stats().running == 0)
    samples = scrape(server.url)
    assert value(samples, "lockstep:prefix_cache_hits_total") > 100
    assert value(samples, "lockstep:prompt_tokens_cached_total") > 100
    pages = [value(samples, "lockstep:cache_pages", state=s) for s in ("used", "cached", "free")]
    assert pages[0] == 0
    assert pages[1] > 0
    assert sum(pages) == server.llm.stats().pages_total


def test_metrics_answer_before_the_engine_is_there() -> None:
    from lockstep.config import ServerConfig
    from lockstep.server import create_app

    app = create_app(fake_llm(), ServerConfig())
    text = app.state.operations.metrics.text().decode()
    assert "lockstep:engine_up" in text
    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["lockstep:engine_up"] == 0


def test_every_metric_that_the_dashboard_and_the_alerts_name_exists(
    server: ServerThread, repository: Path
) -> None:
    ask(server, prompt="x", temperature=-1)  # so that there is an error to count
    exist = {name for name, _ in scrape(server.url)}
    dashboard = json.loads((repository / "deploy/grafana/lockstep.json").read_text())
    queries = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])
    ]
    assert len(queries) >= 15
    rules = (repository / "deploy/alerts.yml").read_text()
    queries += re.findall(r"expr: (.*)", rules)
    keyed = {"lockstep:key_tokens_total", "lockstep:key_requests_total"}  # need a key
    for query in queries:
        names = re.findall(r"(?:lockstep:|process_)[a-z0-9_]+", query)
        assert names, query
        for name in names:
            assert name in exist | keyed, f"{name} in {query}"
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))


def test_batches_are_gauged_and_charge_no_client() -> None:
    body = {"model": "slow", "prompt": "one two three four five six seven", "max_tokens": 9}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    with ServerThread(lambda: fake_llm("slow"), tokens_per_minute=5, api_keys=("k",)) as server:
        http = httpx.Client(base_url=server.url, headers={"authorization": "Bearer k"})

        def gauges() -> tuple[float, float]:
            samples = scrape(server.url, "k")
            names = ("batches_in_progress", "requests_in_background")
            return tuple(value(samples, f"lockstep:{name}") for name in names)  # type: ignore[return-value]

        assert gauges() == (0, 0)
        upload = {"file": ("in.jsonl", json.dumps(line).encode())}
        file = http.post("/v1/files", data={"purpose": "batch"}, files=upload).json()
        made = {"input_file_id": file["id"], "endpoint": "/v1/completions"}
        batch = http.post("/v1/batches", json={**made, "completion_window": "24h"}).json()
        wait_until(lambda: gauges() == (1, 1))
        wait_until(lambda: gauges() == (0, 0))
        assert http.get(f"/v1/batches/{batch['id']}").json()["request_counts"]["completed"] == 1
        samples = scrape(server.url, "k")
        assert adds_up(samples)
        assert value(samples, "lockstep:generation_tokens_total") == 8
        kind = {"key": "env-1", "kind": "generation"}
        assert value(samples, "lockstep:key_tokens_total", **kind) == 8
        assert http.post("/v1/completions", json=body).status_code == 200, "nothing was charged"
        assert http.post("/v1/completions", json=body).status_code == 429
