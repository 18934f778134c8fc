"""Watching what cannot be read: missing answers; servers and webhooks that hang or tell."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection
from pathlib import Path

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

from lockstep.cli.main import app
from lockstep.verify.drift import passive, publish
from lockstep.verify.drift.baseline import Answered, Baseline, Round
from lockstep.verify.drift.measure import MEAN, TOOLS
from lockstep.verify.drift.monitor import MOST_FINGERPRINTS, Monitor, State, Status
from lockstep.verify.drift.probes import Kind, default_probes
from lockstep.verify.drift.routing import MOST_REPLICAS, Routing
from lockstep.verify.probe import Reading

PROBES = default_probes()
TOKENS = [probe.name for probe in PROBES if probe.kind is Kind.TOKEN]
NOISE = {name: 0.001 if place < 10 else 0.3 for place, name in enumerate(TOKENS)}
HOOK = "https://hooks.example.org/services/T000/secret"


def _round(source: np.random.Generator, missing: Collection[str] = ()) -> Round:
    """Half of the questions are steadier than the others; `missing` ones are not answered."""
    found = {}
    for probe in PROBES:
        if probe.name in missing:
            found[probe.name] = Answered(Reading(False, error="status 429"))
        elif probe.kind is Kind.TOKEN:
            value = -1.0 + NOISE[probe.name] * source.normal()
            top = ((("a", value), ("b", -5.0)),)
            reading = Reading(True, "a", ("a",), (value,), top, "stop")
            found[probe.name] = Answered(reading)
        else:
            found[probe.name] = Answered(Reading(True, f'{{"a": {int(source.integers(3))}}}'))
    return found


def test_questions_that_go_unread_are_no_change() -> None:
    """The noisy ones alone have a larger mean, and that is no change of the server."""
    source = np.random.default_rng(0)
    monitor = Monitor(PROBES, Baseline.of(PROBES, [_round(source) for _ in range(64)], "s", "t"))
    for number in range(40):
        status = monitor.observe(_round(source, TOKENS[:9] if number >= 5 else ()))
        assert not status.changed
    assert status.state is State.UNREADABLE


def test_a_baseline_of_a_day_with_errors_is_none_of_fewer_calls() -> None:
    """Sums over the answers that came were smaller on that day than on a whole one."""
    source = np.random.default_rng(2)
    rounds = []
    for _ in range(64):
        lost = [probe.name for probe in PROBES if source.random() < 0.15]
        rounds.append(_round(source, lost))
    baseline = Baseline.of(PROBES, rounds, "s", "t")
    assert MEAN not in baseline.statistics  # hardly a round had all twenty
    assert set(baseline.statistics[TOOLS]) == {3.0}  # nobody calls here; never 2 of 2
    monitor = Monitor(PROBES, baseline)
    for _ in range(60):
        assert not monitor.observe(_round(source)).changed


def test_names_without_end_are_not_kept_without_end() -> None:
    routing = Routing()
    for number in range(MOST_REPLICAS + 50):
        routing.saw("p", f"r{number}")
    assert len(routing.seen) == MOST_REPLICAS
    source = np.random.default_rng(0)
    monitor = Monitor(PROBES, Baseline.of(PROBES, [_round(source)] * 12, "s", "t"))
    for number in range(40):
        each = {
            name: Answered(Reading(True, "x", fingerprint=f"{name}{number}")) for name in TOKENS
        } | {f"extra{i}": Answered(Reading(True, fingerprint=f"{i}/{number}")) for i in range(30)}
        status = monitor.observe(each)
    assert len(status.new_fingerprints) == MOST_FINGERPRINTS
    assert f"and {MOST_FINGERPRINTS - 3} more" in publish.describe(status)


def _news() -> Status:
    return Status(State.CHANGED, 1, 30, (), (), 0, 30, False, ())


@pytest.mark.parametrize("status", [302, 404, 500])
async def test_a_webhook_is_not_followed_elsewhere_and_its_url_stays_secret(status: int) -> None:
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(str(request.url))
        return httpx.Response(status, headers={"location": "http://169.254.169.254/latest"})

    transport = httpx.MockTransport(answer)
    async with httpx.AsyncClient(transport=transport, follow_redirects=True) as client:
        hook = publish.Webhook(HOOK, "s", client)
        await hook.tell(_news(), "now")
    assert seen == [HOOK]
    assert hook.failure == f"webhook: status {status}"


async def _drops() -> AsyncIterator[bytes]:
    while True:
        yield b"# a comment\n"
        await asyncio.sleep(0.01)


async def test_what_comes_drop_by_drop_does_not_hold_up_the_watch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(passive, "PATIENCE", 0.2)
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=_drops()))
    began = time.perf_counter()
    async with httpx.AsyncClient(transport=transport, timeout=30.0) as client:
        assert await passive.scrape(client, "http://server") is None
        hook = publish.Webhook(HOOK, "s", client)
        await hook.tell(_news(), "now")
    assert hook.failure == ""  # the status is all that is read
    assert time.perf_counter() - began < 5.0


@pytest.mark.parametrize(
    "options",
    [
        ["watch", "http://localhost:1", "--concurrency", "0"],
        ["watch", "http://localhost:1", "--interval", "-1"],
        ["watch", "http://localhost:1", "--rounds", "-1"],
        ["provider", "http://localhost:1", "http://localhost:1", "--concurrency", "0"],
        ["provider", "http://localhost:1", "http://localhost:1", "--alpha", "2"],
    ],
)
def test_numbers_that_would_hang_or_mean_nothing_are_refused(options: list[str]) -> None:
    result = CliRunner().invoke(app, ["verify", *options])
    assert result.exit_code == 2
    assert "Invalid value" in result.output


def test_a_password_in_a_url_reaches_no_record(tmp_path: Path) -> None:
    ledger = tmp_path / "l.jsonl"
    urls = ["http://user:secret@localhost:1", "http://localhost:1"]
    result = CliRunner().invoke(app, ["verify", "provider", *urls, "--ledger", str(ledger)])
    assert result.exit_code != 0
    assert not ledger.exists()
    assert "secret" not in f"{result.output}{result.exception}"
