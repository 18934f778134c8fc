"""`lockstep verify compare` and `ledger` as a person and a CI job meet them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from lockstep.cli.main import app
from lockstep.verify.ledger import check, past_runs
from lockstep.verify.rule import load
from tests.verify.servers import Vendor, answer, prompt_of, serving, vendor, words_of


def call(*words: str) -> Result:
    return CliRunner().invoke(app, ["verify", *words])


def write_rule(folder: Path, a: str, b: str, criterion: str = "{kind: exact}") -> Path:
    path = folder / "rule.yaml"
    requests = "\n".join(f"  - {{prompt: p{index}, logprobs: 1}}" for index in range(10))
    path.write_text(
        f"name: planted\nendpoints:\n  a: {{url: '{a}'}}\n  b: {{url: '{b}', api_key_env: B_KEY}}\n"
        f"requests:\n{requests}\ncriterion: {criterion}\ntimeout: 10\n"
    )
    return path


def one_differs(prompt: str) -> list[str]:
    return ["changed", *words_of(prompt, 5)] if prompt == "p7" else words_of(prompt, 6)


def half_fails() -> Vendor:
    def respond(path: str, body: dict[str, str]) -> tuple[int, object]:
        prompt = prompt_of(body)
        if prompt in ("p1", "p2"):
            return 500, {"error": {"message": "out of memory"}}
        return 200, answer(path, body, words_of(prompt, 6))

    return Vendor(respond)


def test_the_status_says_the_verdict_and_every_run_stays_on_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("B_KEY", "sesame")
    ledger, page = tmp_path / "ledger.jsonl", tmp_path / "report.html"
    asked = ["--ledger", str(ledger), "--report", str(page)]
    for b, status, verdict in ((vendor(), 0, "PASS"), (vendor(one_differs), 1, "FAIL"),
                               (half_fails(), 2, "UNDECIDABLE")):  # fmt: skip
        with serving(vendor()) as first, serving(b) as second:
            rule = write_rule(tmp_path, first, second)
            done = call("compare", str(rule), *asked)
        assert done.exit_code == status, done.output
        assert verdict in done.output
        assert load(rule).hash in done.output
        assert {headers.get("authorization") for headers in b.headers} == {"Bearer sesame"}
        assert load(rule).hash in page.read_text()
    checked = check(ledger)
    assert not checked.problems
    runs = past_runs(checked.records)
    assert [run.verdict for run in runs] == ["pass", "fail", "undecidable"]
    assert runs[1].rule != runs[0].rule, "other ports, another rule"
    starts = [record["kind"] for record in checked.records]
    assert starts == ["run.started", "run.ended"] * 3
    assert "sesame" not in "".join(file.read_text() for file in tmp_path.rglob("*.json*"))

    shown = call("ledger", "show", str(ledger), "--report", str(page))
    assert shown.exit_code == 0
    assert "undecidable" in shown.output
    assert "out of memory" not in shown.output
    assert page.read_text().count("<svg") == 1
    sound = call("ledger", "check", str(ledger), "--head", checked.head)
    assert (sound.exit_code, sound.output) == (0, f"6 records, head {checked.head}\n")
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join(lines[:2] + lines[4:]))  # the failed run, gone
    missed = call("ledger", "check", str(ledger))
    assert missed.exit_code == 1
    assert "line 3: record 4 stands at place 2" in missed.output
    ledger.write_bytes(b"".join(lines[:4]))
    assert call("ledger", "check", str(ledger)).exit_code == 0
    assert call("ledger", "check", str(ledger), "--head", checked.head).exit_code == 1


def test_what_stops_a_run_before_its_first_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = write_rule(tmp_path, "http://127.0.0.1:9", "http://127.0.0.1:9")
    ledger = tmp_path / "ledger.jsonl"
    no_key = call("compare", str(rule), "--ledger", str(ledger))
    assert no_key.exit_code == 2
    assert "B_KEY" in no_key.output
    assert not ledger.exists()
    monkeypatch.setenv("B_KEY", "x")
    gone = call("compare", str(rule), "--ledger", str(ledger), "--wait", "0")
    assert gone.exit_code == 2
    assert "none of the 10 requests could be compared" in gone.output.replace("\n", " ")
    hashed = call("compare", str(rule), "--print-hash")
    assert hashed.output == load(rule).hash + "\n"
    rule.write_text("name: [")
    bad = subprocess.run(
        [sys.executable, "-m", "lockstep", "verify", "compare", str(rule)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert bad.returncode == 2
    assert bad.stderr.startswith(f"error: {rule}: not YAML")


def test_a_server_that_answers_nothing_leaves_a_run_and_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("B_KEY", "x")
    ledger = tmp_path / "ledger.jsonl"
    with serving(vendor()) as a, serving(Vendor(lambda path, body: (200, b"<html>"))) as b:
        done = call("compare", str(write_rule(tmp_path, a, b)), "--ledger", str(ledger))
    assert done.exit_code == 2
    (run,) = past_runs(check(ledger).records)
    assert run.figures["unread"] == 10
    assert list(run.figures["failures"]) == [
        "B: unreadable: not JSON: Expecting value: line 1 column 1 (char 0)"
    ]
    json.dumps(run.figures, allow_nan=False)


def test_help_names_the_commands() -> None:
    done = CliRunner().invoke(app, ["verify", "--help"])
    for command in ("compare", "noise", "self", "ledger"):
        assert command in done.output
