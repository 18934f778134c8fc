"""The monitor over months, what it keeps and tells, and the counters of a server's own traffic."""

from __future__ import annotations

import json
import math
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from lockstep.cli.main import app
from lockstep.verify.drift.baseline import (
    Answered,
    Baseline,
    BaselineError,
    Round,
    take_baseline,
)
from lockstep.verify.drift.counters import read_counts
from lockstep.verify.drift.measure import PROBE, STREAMS
from lockstep.verify.drift.monitor import Monitor, State
from lockstep.verify.drift.passive import PassiveMonitor
from lockstep.verify.drift.probes import Kind, Probe, default_probes
from lockstep.verify.drift.publish import Metrics, Publisher, Webhook, message
from lockstep.verify.drift.watch import Watch, rounds
from lockstep.verify.endpoint import ProbeRequest, Reading
from lockstep.verify.ledger import check, past_runs
from lockstep.verify.reply import read
from lockstep.verify.statistics import clopper_pearson
from tests.server.support import ServerThread, fake_llm
from tests.server.test_tool_counts import GOOD, NAMED_BAD, say
from tests.verify.proxy import Unreadable, before
from tests.verify.servers import Vendor, serving
from tests.verify.test_watch_sequential import histories
from tests.verify.toy import Toy

THIRTY = tuple(
    Probe(f"p{i}", Kind.TOKEN, ProbeRequest(prompt=f"p{i}", logprobs=5)) for i in range(30)
)


def distribution(*logits: float) -> Reading:
    """A first token's distribution."""
    values = np.array(logits) - np.logaddexp.reduce(logits)
    top = tuple((f"t{i}", float(value)) for i, value in enumerate(values))
    ranked = tuple(sorted(top, key=lambda one: -one[1]))
    return Reading(
        True, ranked[0][0], (ranked[0][0],), (ranked[0][1],), (ranked,), fingerprint="v1"
    )


def day(source: np.random.Generator, changed: str = "", noise: float = 0.1) -> Round:
    """A round of thirty noisy answers; one probe's top two tokens may have swapped."""
    answers = {}
    for index, probe in enumerate(THIRTY):
        logits = np.array([2.0, 1.0, 0.5, 0.0, -1.0 - index / 10])
        if probe.name == changed:
            logits[[0, 1]] = logits[[1, 0]]
        answers[probe.name] = Answered(distribution(*(logits + source.normal(0, noise, 5))))
    return answers


UNREAD: Round = {p.name: Answered(Reading(False, error="status 502: x")) for p in THIRTY}


def baseline(source: np.random.Generator, rounds: int = 64) -> Baseline:
    return Baseline.of(THIRTY, [day(source) for _ in range(rounds)], "x", "a good day")


def test_j04_a_hundred_quiet_days_then_one_token_then_unreadable() -> None:
    source = np.random.default_rng(4)
    monitor = Monitor(THIRTY, baseline(source))
    for _ in range(100):
        status = monitor.observe(day(source))
        assert status.state is State.OK
    for _ in range(12):
        status = monitor.observe(day(source, changed="p7"))
        if status.state is State.CHANGED:
            break
    assert status.state is State.CHANGED
    assert PROBE + "p7" in {alarm.stream for alarm in status.changed}
    # Unreadable rounds take nothing back and add nothing.
    evidence = {name: wealth.log_value for name, wealth in monitor.wealths().items()}
    status = monitor.observe(UNREAD)
    assert (status.state, status.unread) == (State.CHANGED, 30)
    assert monitor.unreadable
    assert {name: wealth.log_value for name, wealth in monitor.wealths().items()} == evidence


def test_j04_what_cannot_be_read_is_not_called_changed() -> None:
    source = np.random.default_rng(5)
    monitor = Monitor(THIRTY, baseline(source))
    for _ in range(20):
        assert monitor.observe(UNREAD).state is State.UNREADABLE
    assert not monitor.alarms
    assert monitor.observe(day(source)).state is State.OK


def test_j04_the_whole_family_keeps_its_rate_over_clean_years() -> None:
    """80 years of daily rounds of all streams together, with the monitor's own weights."""
    source = np.random.default_rng(6)
    monitor = Monitor(THIRTY, baseline(source))
    weights = np.array(list(monitor.weights().values()))
    assert weights.sum() == pytest.approx(0.7)  # no replica seen; they have the rest
    assert len(weights) >= 30 + 2
    years, alpha, alarms = 80, 0.3, np.zeros(80, dtype=bool)
    for weight in weights:
        wealth = histories(source.lognormal(size=(years, 60 + 365)), 60)
        alarms |= wealth.max(axis=1) >= -math.log(alpha * weight)
    rate = clopper_pearson(int(alarms.sum()), years, 0.99)
    assert rate.high <= alpha, f"{alarms.sum()} of {years}: {rate}"


def test_a_monitor_that_is_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    source = np.random.default_rng(8)
    known = baseline(source)
    days = [day(source, changed="p3" if number > 20 else "") for number in range(40)]
    whole, parts = Monitor(THIRTY, known), Monitor(THIRTY, known)
    for each in days:
        expected = whole.observe(each)
        found = parts.observe(each)
        parts.save(file)
        parts = Monitor(THIRTY, known)
        parts.load(file)
        assert found == expected == parts.status()
    assert expected.state is State.CHANGED
    with pytest.raises(BaselineError, match="another baseline or rate"):
        Monitor(THIRTY, known, alpha=0.05).load(file)
    file.write_text(file.read_text()[:-100])
    with pytest.raises(BaselineError, match="no JSON"):
        Monitor(THIRTY, known).load(file)


def test_a_baseline_is_kept_in_a_file_and_belongs_to_its_probes(tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    known = baseline(np.random.default_rng(9))
    known.save(file)
    loaded = Baseline.load(file, THIRTY)
    assert loaded.references == known.references
    assert {n: list(v) for n, v in loaded.statistics.items()} == known.statistics
    with pytest.raises(BaselineError, match="other probes"):
        Baseline.load(file, THIRTY[:-1])
    with pytest.raises(BaselineError, match="at least"):
        Baseline.of(THIRTY, [day(np.random.default_rng(0))] * 5, "x", "y")
    with pytest.raises(BaselineError, match="502"):
        Baseline.of(THIRTY, [UNREAD] * 64, "x", "y")


def test_the_default_probes_have_every_stream() -> None:
    probes = default_probes()
    assert len(probes) == 30
    assert len({probe.name for probe in probes}) == 30
    toy = Toy()
    answers = {}
    for probe in probes:
        status, value = toy.respond("/v1/chat/completions", probe.request.body("toy"))
        assert status == 200
        answers[probe.name] = Answered(read(json.dumps(value).encode(), chat=True, seconds=0.0))
    known = Baseline.of(probes, [answers] * 12, "toy", "now")
    assert set(STREAMS) <= set(known.statistics)
    assert known.steady


async def test_prometheus_and_the_webhook_are_told(tmp_path: Path) -> None:
    source = np.random.default_rng(10)
    monitor = Monitor(THIRTY, baseline(source))
    posts: list[dict[str, Any]] = []
    broken = [True]

    def respond(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if broken[0]:
            return 500, {}
        posts.append(body)
        return 200, {}

    transport = httpx.ASGITransport(app=Vendor(respond))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport) as client:
        hook = Webhook("http://hook/x", "prod", client)
        metrics = Metrics(monitor, lambda: 123.0)
        publisher = Publisher(metrics, tmp_path / "watch.prom", hook)
        assert await publisher.tell(monitor.observe(day(source)), "t0") == ""
        assert "500" in await publisher.tell(monitor.observe(UNREAD), "t1")
        broken[0] = False
        assert await publisher.tell(monitor.observe(UNREAD), "t2") == ""
        assert await publisher.tell(monitor.observe(day(source)), "t3") == ""
    assert [(post["before"], post["state"], post["time"]) for post in posts] == [
        ("ok", "unreadable", "t1"),
        ("unreadable", "ok", "t3"),
    ]
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families((tmp_path / "watch.prom").read_text())
        for sample in family.samples
    }
    assert samples["lockstep_watch_state", "ok"] == 1
    assert samples["lockstep_watch_state", "changed"] == 0
    assert samples["lockstep_watch_rounds_total",] == 4
    assert samples["lockstep_watch_answers_total",] == 60
    assert samples["lockstep_watch_unread_total",] == 60
    assert samples["lockstep_watch_last_round_timestamp_seconds",] == 123.0
    assert ("lockstep_watch_log_e_value", PROBE + "p7") in samples
    url_line = generate_latest(metrics.registry).decode()
    assert "lockstep_watch_replica_unlike" in url_line


async def test_a_suspicious_round_is_confirmed_at_once() -> None:
    toy = Toy()
    probes = default_probes()[:12]
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async with before(toy.vendor()).endpoint() as endpoint:
        known = await take_baseline(rounds(endpoint, probes), probes, 64, "toy", "now")
    toy.weights = 2
    async with before(toy.vendor()).endpoint() as endpoint:
        watch = Watch(endpoint, probes, Monitor(probes, known), 3600.0, 1.0, sleep=sleep)
        for _ in range(10):
            if (await watch.run(2)).state is State.CHANGED:
                break
    assert watch.monitor.status().state is State.CHANGED
    assert watch.monitor.status().new_fingerprints == ("toy-2",)
    assert 1.0 in slept
    text = message(watch.monitor.status(), "x", State.OK, "t")
    assert json.loads(json.dumps(text))["state"] == "changed"


def page(ok: int, malformed: int, **outcomes: int) -> str:
    """Counters as a server writes them."""
    lines = ["# TYPE lockstep:tool_calls counter"]
    for result, count in {"ok": ok, "malformed": malformed, "aborted": 9}.items():
        lines.append(f'lockstep:tool_calls_total{{parser="h",tool="t",result="{result}"}} {count}')
    lines.append("# TYPE vllm:request_success counter")
    for reason, count in outcomes.items():
        lines.append(f'vllm:request_success_total{{finished_reason="{reason}"}} {count}')
    return "\n".join(lines) + "\n"


def test_counters_are_read_under_either_name() -> None:
    counts = read_counts(page(10, 5, stop=7, length=3))
    assert (counts["malformed-tool-calls/h/t"].bad, counts["malformed-tool-calls/h/t"].total) == (
        5,
        15,
    )
    assert (counts["cut-by-length"].bad, counts["cut-by-length"].total) == (3, 10)


@pytest.mark.parametrize(("rate", "most"), [(0.25, 160), (0.06, 1200)])
def test_j01_a_rate_that_grew_is_found_within_so_many_calls(rate: float, most: int) -> None:
    """From 1% of the calls."""
    source = np.random.default_rng(11)
    monitor = PassiveMonitor()
    ok = bad = calls = 0
    for _ in range(200):
        new = int(source.binomial(20, 0.01))
        bad, ok = bad + new, ok + 20 - new
        assert monitor.observe({"s": page(ok, bad)}).state is State.OK
    while calls < most:
        new = int(source.binomial(20, rate))
        bad, ok, calls = bad + new, ok + 20 - new, calls + 20
        status = monitor.observe({"s": page(ok, bad)})
        if status.state is State.CHANGED:
            break
    assert status.state is State.CHANGED
    assert status.changed[0].stream == "malformed-tool-calls/h/t"


def test_clean_counters_alarm_no_more_often_than_stated() -> None:
    """Simulated clean years of one rate, learned from few events; a restart in the middle."""
    source = np.random.default_rng(12)
    alpha, years, alarms = 0.5, 80, 0
    for _ in range(years):
        monitor = PassiveMonitor(alpha=alpha, learn=200)
        probability = source.uniform(0.001, 0.2)
        ok = bad = 0
        for week in range(52):
            if week == 30:
                ok = bad = 0
            new = int(source.binomial(100, probability))
            bad, ok = bad + new, ok + 100 - new
            monitor.observe({"s": page(ok, bad)})
        alarms += bool(monitor.alarms)
    rate = clopper_pearson(alarms, years, 0.99)
    assert rate.low <= alpha / 2, f"{alarms} of {years}: {rate}"  # the first rate has half


def test_counters_that_vanish_are_unreadable_and_a_state_file_goes_on(tmp_path: Path) -> None:
    monitor = PassiveMonitor(learn=10)
    for count in (0, 50, 100):
        monitor.observe({"a": page(count, 0), "b": page(count, 0)})
    status = monitor.observe({"a": page(150, 0), "b": None})
    assert (status.state, status.unread) == (State.UNREADABLE, 1)
    monitor.save(tmp_path / "s.json")
    again = PassiveMonitor(learn=10)
    again.load(tmp_path / "s.json")
    for each in (monitor, again):
        status = each.observe({"a": page(200, 0), "b": page(150, 400)})
        assert status.replicas == ("b",)
    assert monitor.status() == again.status()


def test_j01_the_rate_alarm_over_a_real_server(tmp_path: Path) -> None:
    """200 good calls, then as many malformed as good ones."""
    runner, ledger = CliRunner(), tmp_path / "ledger.jsonl"

    def watch(*more: str) -> Any:
        state = str(tmp_path / "state.json")
        options = ["--passive", "--rounds", "1", "--learn", "100", "--state", state]
        options += ["--ledger", str(ledger)]
        return runner.invoke(app, ["verify", "watch", f"{server.url}/v1", *options, *more])

    with ServerThread(lambda: fake_llm("speaks", max_sequences=64)) as server:
        assert watch().exit_code == 0
        say(server, [GOOD], model="speaks")
        assert watch().exit_code == 0
        say(server, [GOOD] * 100, model="speaks")
        result = watch()
        assert result.exit_code == 0, result.output
        say(server, [GOOD] * 10 + [NAMED_BAD] * 10, model="speaks")
        result = watch("--textfile", str(tmp_path / "x.prom"))
        assert result.exit_code == 1, result.output
        assert "malformed-tool-calls/hermes/now" in result.output
        assert 'state="changed"} 1.0' in (tmp_path / "x.prom").read_text()
    assert watch().exit_code == 1  # what was found stays, though the server is gone
    verdicts = [run.verdict for run in past_runs(check(ledger).records)]
    assert verdicts == ["ok", "ok", "ok", "changed", "changed"]


def test_the_command_makes_a_baseline_and_tells_states_apart(tmp_path: Path) -> None:
    runner, ledger = CliRunner(), tmp_path / "ledger.jsonl"
    toy = Toy()

    def watch(url: str, *more: str) -> Any:
        options = ["--baseline", str(tmp_path / "b.json"), "--baseline-rounds", "12"]
        options += ["--ledger", str(ledger)]
        return runner.invoke(app, ["verify", "watch", url, *options, "--rounds", "1", *more])

    with serving(toy.vendor()) as url:
        result = watch(url, "--exact")
        assert result.exit_code == 0, result.output
        assert "360 answers; no answer differed" in result.output
        assert "round 1: ok" in result.output
        toy.weights = 2
        result = watch(url, "--exact")
        assert result.exit_code == 1, result.output
        assert "round 2: changed" in result.output
        assert "new fingerprint toy-2" in result.output
        toy.weights = 1
    with serving(before(toy.vendor(), Unreadable())) as url:  # type: ignore[arg-type]
        result = watch(url, "--state", str(tmp_path / "other.json"))
        assert result.exit_code == 3, result.output
        assert "30 of 30 answers unreadable" in result.output
    gone = watch(url, "--state", str(tmp_path / "other.json"))
    assert gone.exit_code == 3, gone.output
    assert runner.invoke(app, ["verify", "watch", "ftp://x"]).exit_code != 0
    checked = check(ledger)
    assert not checked.problems
    runs = past_runs(checked.records)
    assert [run.verdict for run in runs] == ["ok", "changed", "unreadable", "unreadable"]
    assert runs[1].figures["changed"]
    assert all(round_ == 2 for round_ in runs[1].figures["changed"].values())
    assert "new fingerprint toy-2" in runs[1].reason
    assert {run.rule for run in runs[:2]} != {run.rule for run in runs[2:]}, "with --exact"
    kinds = [record["kind"] for record in checked.records]
    assert kinds == ["run.started", "run.noted", "run.noted", "run.ended"] * 4
    baselines = {record["baseline"] for record in checked.records if "baseline" in record}
    assert baselines == {sha256((tmp_path / "b.json").read_bytes()).hexdigest()}


def test_only_what_is_new_is_put_on_record_and_a_hand_that_stops_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy, path = Toy(), tmp_path / "ledger.jsonl"
    whole = Monitor.observe

    def observe(self: Monitor, each: Round) -> Any:
        if self.status().round == 3:
            raise KeyboardInterrupt
        return whole(self, each)

    monkeypatch.setattr(Monitor, "observe", observe)
    words = ["--baseline", str(tmp_path / "b.json"), "--baseline-rounds", "12", "--interval", "0"]
    with serving(toy.vendor()) as url:
        runner = CliRunner()
        runner.invoke(app, ["verify", "watch", url, *words, "--ledger", str(path)])
    records = check(path).records
    assert [record["kind"] for record in records] == [
        "run.started", "run.noted", "run.noted", "run.ended",
    ]  # fmt: skip
    assert records[-1]["verdict"] == "ok"
    assert records[-1]["figures"]["round"] == 3
    assert records[-1]["reason"].startswith("stopped by hand")
