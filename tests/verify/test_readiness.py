"""A server that is still starting is waited for; one that answers, whatever it says, is not."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from typer.testing import CliRunner

from lockstep.cli.main import app
from lockstep.verify.endpoint import Endpoint, EndpointError
from lockstep.verify.ledger import check, past_runs
from lockstep.verify.readiness import wait_until_ready
from tests.verify.servers import Vendor, answer, prompt_of, serving, vendor, words_of


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.verify.readiness.PAUSE", 0.01)


def starting(status: int, times: int) -> Vendor:
    """Says this status to so many requests, and answers then."""
    left = times

    def respond(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        nonlocal left
        left -= 1
        if left >= 0:
            return status, {"error": {"message": "loading"}}
        return 200, answer(path, body, words_of(prompt_of(body), 6))

    return Vendor(respond)


@pytest.mark.parametrize("status", [502, 503, 504])
@pytest.mark.parametrize("chat", [True, False])
async def test_a_server_that_says_not_yet_is_asked_again(status: int, chat: bool) -> None:
    app, told = starting(status, 3), list[str]()
    async with app.endpoint(extra={"top_k": 1}) as endpoint:
        await wait_until_ready(endpoint, 10.0, chat=chat, say=told.append)
    assert told == [f"waiting up to 10 s for http://vendor/v1: status {status}"]
    assert len(app.bodies) == 4
    assert all(body["max_tokens"] == 1 and body["top_k"] == 1 for body in app.bodies)
    assert all(("messages" in body) is chat for body in app.bodies)


@pytest.mark.parametrize("status", [200, 400, 401, 404, 429, 500])
async def test_any_other_answer_ends_the_wait(status: int) -> None:
    app, told = starting(status, 1), list[str]()
    async with app.endpoint(model="m") as endpoint:
        await wait_until_ready(endpoint, 10.0, say=told.append)
    assert (len(app.bodies), told) == (1, [])


async def test_no_wait_asks_nothing() -> None:
    app = vendor()
    async with app.endpoint() as endpoint:
        await wait_until_ready(endpoint, 0.0)
    assert app.headers == []


async def test_the_wait_has_an_end_and_says_what_was_missing() -> None:
    async with Endpoint("http://127.0.0.1:9", "m") as endpoint:
        with pytest.raises(EndpointError, match=r"not ready after 0.05 s: ConnectError .*--wait"):
            await wait_until_ready(endpoint, 0.05)
    app = starting(200, 0)
    app.delay = 5.0
    async with app.endpoint(model="m") as endpoint:
        with pytest.raises(EndpointError, match="no answer to the first request"):
            await wait_until_ready(endpoint, 0.05)
    async with app.endpoint(model="m", timeout=0.02) as endpoint:
        with pytest.raises(EndpointError, match="the first request timed out"):
            await wait_until_ready(endpoint, 0.2)


async def test_a_model_that_is_listed_late_is_waited_for_and_several_are_not() -> None:
    late = vendor()
    late.models = ()
    async with late.endpoint() as endpoint:
        with pytest.raises(EndpointError, match="serves none: name one"):
            await wait_until_ready(endpoint, 0.05)

    def appears(text: str) -> None:
        late.models = ("model",)

    async with late.endpoint() as endpoint:
        await wait_until_ready(endpoint, 10.0, say=appears)
        assert await endpoint.model() == "model"
    late.models, began = ("one", "two"), time.monotonic()
    async with late.endpoint() as endpoint:
        with pytest.raises(EndpointError, match="serves one, two: name one"):
            await wait_until_ready(endpoint, 10.0)
    assert time.monotonic() - began < 5.0


async def test_a_connection_that_breaks_is_waited_out() -> None:
    tried = 0

    def handle(request: httpx.Request) -> httpx.Response:
        nonlocal tried
        tried += 1
        if tried < 3:
            raise httpx.RemoteProtocolError("it went away")
        return httpx.Response(200, json={})

    transport = httpx.MockTransport(handle)
    async with Endpoint("http://vendor", "m", transport=transport) as endpoint:
        await wait_until_ready(endpoint, 10.0)
    assert tried == 3


def test_a_comparison_that_meets_a_starting_server_passes(tmp_path: Path) -> None:
    """Before, every request that met the closed port was unread, and the verdict undecidable."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    late = starting(503, 2)
    server = uvicorn.Server(
        uvicorn.Config(late, port=port, log_level="error", lifespan="off")  # type: ignore[arg-type]
    )

    def start_late() -> None:
        time.sleep(0.5)
        server.run()

    thread = threading.Thread(target=start_late, daemon=True)
    rule, ledger = tmp_path / "rule.yaml", tmp_path / "ledger.jsonl"
    with serving(vendor()) as url:
        rule.write_text(
            f"name: late\nendpoints: {{a: {{url: '{url}'}}, b: {{url: 'http://127.0.0.1:{port}'}}}}\n"
            "requests: [{prompt: p}, {prompt: q}]\ncriterion: {kind: exact}\n"
        )
        words = ["verify", "compare", str(rule), "--ledger", str(ledger)]
        absent = CliRunner().invoke(app, [*words, "--wait", "0.05"])
        thread.start()
        done = CliRunner().invoke(app, [*words, "--wait", "20"])
    server.should_exit = True
    thread.join(10)
    assert isinstance(absent.exception, EndpointError)
    assert done.exit_code == 0, done.output
    assert f"waiting up to 20 s for http://127.0.0.1:{port}/v1" in done.output
    runs = past_runs(check(ledger).records)
    assert [run.verdict for run in runs] == ["error", "pass"]
    assert "not ready after 0.05 s" in runs[0].reason
