"""A server whose answers depend on their company shows it; one whose do not shows exactly zero."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lockstep.cli.main import app
from lockstep.types import RequestError
from lockstep.verify.endpoint import Endpoint, ProbeRequest, Reading
from lockstep.verify.ledger import check, past_runs
from lockstep.verify.noise import Noise, Plan, measure, questions, without_unknown
from lockstep.verify.noise_report import figures, reason_of, report_of
from lockstep.verify.report import html
from tests.server.support import ServerThread, fake_llm
from tests.verify.servers import Vendor, answer, prompt_of, reading, serving, vendor, words_of


class Crowded:
    """A source that knows how many others it answers at once and what it has seen."""

    name = "crowded"

    def __init__(self, script: Any) -> None:
        self.script = script
        self.running = 0
        self.long = 0
        self.seen: set[str] = set()

    async def ask(self, request: ProbeRequest) -> Reading:
        text = request.prompt
        if len(text.split()) > 100:
            self.long += 1
            await asyncio.sleep(0.001)
            self.long -= 1
            return reading(["x"])
        self.running += 1
        await asyncio.sleep(0.001)
        found: Reading = self.script(text, self.running, text in self.seen, self.long)
        self.running -= 1
        self.seen.add(text)
        return found


def plan(count: int = 12, **settings: Any) -> Plan:
    items = questions("nonce", count=count, chat=False)
    return Plan(items, **{"repeats": 2, "concurrency": 4, "prefill_words": 200, **settings})


async def noise(script: Any, **settings: Any) -> Noise:
    return await measure(plan(**settings), Crowded(script))


def by_name(found: Noise) -> dict[str, int]:
    return {one.name: len(one.differ) for one in found.conditions}


async def test_a_steady_server_is_exactly_zero() -> None:
    found = await noise(lambda text, running, seen, long: reading(words_of(text, 6)))
    assert found.verdict == "zero"
    assert by_name(found) == {
        "together, cold": 0,
        "alone, warm": 0,
        "together, warm": 0,
        "together, beside long prefills": 0,
    }
    assert all(
        one.answers == len(one.asked) * (1 if "cold" in one.name else 2) for one in found.conditions
    )
    assert reason_of(found).startswith("no logprob and no token of 78 answers differs")
    assert found.conditions[-1].prefills[0] > 0


async def test_company_that_moves_a_token_is_seen_where_there_is_company() -> None:
    def script(text: str, running: int, seen: bool, long: int) -> Reading:
        words = words_of(text, 6)
        return reading(
            [*words[:4], "crowd", words[5]] if running > 1 and "-1]" not in text else words
        )

    found = await noise(script)
    counts = by_name(found)
    assert found.verdict == "noisy"
    assert counts["alone, warm"] == 0
    assert counts["together, cold"] >= 1
    assert counts["together, warm"] >= 6
    assert {seen.position for one in found.conditions for seen in one.partings if seen} == {4}
    text = html(report_of(found, "it"))
    assert "token 4" in text
    assert "together, warm" in text


async def test_c02_a_prefix_hit_that_moves_a_token_is_seen_when_alone() -> None:
    def script(text: str, running: int, seen: bool, long: int) -> Reading:
        words = words_of(text, 6)
        return reading([*words[:5], "warm"] if seen else words)

    found = await noise(script)
    # Half of the requests met it alone and cold, the others first in a crowd.
    assert by_name(found)["alone, warm"] == 6
    assert by_name(found)["together, cold"] == 6


async def test_long_prefills_that_move_only_a_logprob_are_seen() -> None:
    def script(text: str, running: int, seen: bool, long: int) -> Reading:
        return reading(words_of(text, 6), shift=1e-7 if long else 0.0)

    found = await noise(script, prefills=3)
    assert found.verdict == "noisy"
    assert set(by_name(found).values()) == {0}
    assert [bool(one.shifted) for one in found.conditions] == [False, False, False, True]
    assert 0 < figures(found)["conditions"]["together, beside long prefills"]["largest_gap"] < 2e-7


async def test_failures_are_their_own_state() -> None:
    def script(text: str, running: int, seen: bool, long: int) -> Reading:
        if running > 2:
            return Reading(False, error="status 429: slow down")
        return reading(words_of(text, 6))

    found = await noise(script)
    assert found.verdict == "unreadable"
    assert found.differ == 0
    assert figures(found)["conditions"]["together, warm"]["failures"] == {
        "status 429: slow down": found.conditions[2].failures.total()
    }


async def test_a_server_without_logprobs_is_asked_without_them() -> None:
    def respond(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if body.get("logprobs") is not None:
            return 400, {"error": {"message": "logprobs are not supported"}}
        return 200, answer(path, body, words_of(prompt_of(body), 6))

    async with Vendor(respond).endpoint() as endpoint:
        fixed = await without_unknown(plan(4), endpoint)
        assert all(item.request.logprobs is None for item in fixed.items)
        found = await measure(fixed, endpoint)
    assert found.verdict == "zero"
    assert "logprobs are not reported" in reason_of(found)
    async with vendor().endpoint() as endpoint:
        assert (await without_unknown(plan(4), endpoint)) == plan(4)


async def test_c03_on_lockstep_it_is_exactly_zero_and_the_cache_was_warm() -> None:
    with ServerThread(fake_llm) as server:
        async with Endpoint(server.url) as endpoint:
            fixed = Plan(questions("n", count=6, max_tokens=8), 1, 4, 1, 150)
            found = await measure(fixed, endpoint)
    assert found.verdict == "zero", reason_of(found)
    cached = {one.name: one.cached or 0 for one in found.conditions}
    assert cached["alone, warm"] > cached["together, cold"]
    assert found.conditions[-1].prefills[0] > 0


def test_the_command_tells_records_and_reports(tmp_path: Path) -> None:
    ledger, page = tmp_path / "l.jsonl", tmp_path / "r.html"
    asked = ["--count", "4", "--repeats", "1", "--ledger", str(ledger), "--report", str(page)]
    turns = iter(range(10_000))

    def unsteady(prompt: str) -> list[str]:
        return [*words_of(prompt, 3), str(next(turns))]

    for server, status, verdict in ((vendor(), 0, "zero"), (vendor(unsteady), 1, "noisy")):
        with serving(server) as url:
            done = CliRunner().invoke(app, ["verify", "noise", url, *asked])
        assert done.exit_code == status, done.output
        assert verdict.upper() in done.output
    assert "NOISY" not in page.read_text()
    assert "noisy" in page.read_text()
    gone = CliRunner().invoke(app, ["verify", "noise", "http://127.0.0.1:9", "--wait", "0", *asked])
    assert gone.exit_code == 2
    runs = past_runs(check(ledger).records)
    assert [run.verdict for run in runs] == ["zero", "noisy", "unreadable"]


@pytest.mark.parametrize("count", [2, 30])
def test_built_in_requests_are_new_in_every_run(count: int) -> None:
    one, other = (questions(nonce, count=count) for nonce in ("a", "b"))
    assert len({item.id for item in one}) == count
    assert not {str(i.request.messages) for i in one} & {str(i.request.messages) for i in other}
    assert Plan(one).hash != Plan(other).hash


def test_requests_that_differ_from_themselves_by_design_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text('{"prompt": "a"}\n{"id": "b", "prompt": "b", "temperature": 1}\n')
    words = ["verify", "noise", "http://127.0.0.1:9", "--requests", str(file)]
    with pytest.raises(RequestError, match="request b draws at temperature 1 without a seed"):
        CliRunner().invoke(app, words, catch_exceptions=False)
    file.write_text('{"prompt": "a"}\n{"id": "b", "prompt": "b", "temperature": 1, "seed": 3}\n')
    ledger = tmp_path / "ledger.jsonl"
    words += ["--wait", "0"]
    done = CliRunner().invoke(app, [*words, "--ledger", str(ledger), "--repeats", "1"])
    assert done.exit_code == 2, "nobody listens there"
    file.write_text('{"prompt": "a"}\n')
    with pytest.raises(RequestError, match="two requests"):
        CliRunner().invoke(app, words, catch_exceptions=False)
