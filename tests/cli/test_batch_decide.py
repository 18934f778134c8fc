"""`lockstep batch decide` on the real SmolLM2, as a process of its own."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from lockstep import LLM, SamplingParams
from lockstep.cli.main import app

PREFIX = '{"decision": "'
COMMAND = [sys.executable, "-m", "lockstep.cli.main", "batch", "decide"]
DECISION = ["--options", "write,skip", "--prefix", PREFIX, "--continue-if", "write"]
ENGINE = ["--threads", "1", "--max-context", "256", "--cache-mb", "64"]
NEW = 12


def rows(count: int) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = [
        {"id": f"r{i}", "text": f"Message {i}: {('late', 'fine', 'lost')[i % 3]}. Reply as JSON: "}
        for i in range(count)
    ]
    made[7]["text"] = "long " * 270
    return made


def command(source: Path, out: Path, *more: str) -> list[str]:
    return [*COMMAND, str(source), "-o", str(out), *DECISION, *ENGINE, "-n", str(NEW), *more]


def finished(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, capture_output=True, text=True, timeout=120)


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_killed_and_called_again_it_gives_the_rows_of_one_call(tmp_path: Path) -> None:
    """K04 on the way: an overlong row and a line that is no row are two error rows."""
    source, out, whole = (tmp_path / f"{name}.jsonl" for name in ("in", "out", "whole"))
    source.write_text("".join(json.dumps(row) + "\n" for row in rows(30)) + "no json\n")

    process = subprocess.Popen(command(source, out), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not any(part.read_bytes().count(b"\n") >= 9 for part in tmp_path.glob("*.part")):
        assert time.monotonic() < deadline
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    other = finished(command(source, out, "--max-context", "300"))  # in which that row fits
    assert other.returncode == 2
    assert "other options" in other.stderr
    again = finished(command(source, out))
    assert again.returncode == 1, again.stderr
    assert again.stdout == ""
    assert "31 rows: " in again.stderr
    assert "2 errors: " in again.stderr
    assert "from before" in again.stderr

    once = finished(command(source, whole))
    assert "from before" not in once.stderr
    assert out.read_bytes() == whole.read_bytes()
    found = results(out)
    assert [row["line"] for row in found] == list(range(1, 32))
    codes = {row["line"]: row["error"]["code"] for row in found if "error" in row}
    assert codes == {8: "context_length_exceeded", 31: "invalid_json"}

    with LLM("smollm2", threads=1, max_context=256, cache_bytes=64 << 20, progress=False) as llm:
        for row, given in list(zip(found, rows(30), strict=False))[:4]:
            decision = llm.decide_prefix(given["text"], PREFIX, ["write", "skip"])
            assert (row["decision"], row["mass"]) == (decision.value, decision.mass)
            assert tuple(row["probabilities"].values()) == decision.probabilities
            begin = PREFIX + row["decision"]
            ids = [
                *llm.tokenizer.encode(given["text"]),
                *llm.tokenizer.encode_inside(PREFIX),
                *llm.tokenizer.encode_inside(row["decision"]),
            ]
            ungated = llm.generate([ids], SamplingParams(temperature=0, max_tokens=NEW))[0]
            assert row["text"] == (begin + ungated.text if row["decision"] == "write" else "")
            assert (row["finish_reason"] == "gate") == (row["decision"] == "skip")


def test_a_question_and_a_threshold_that_closes(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        '{"text": "Ships float."}\n{"messages": [{"role": "user", "content": "x"}]}\n'
    )
    question = {"type": "predicate", "instructions": "Ships?"}
    gate = {"question": question, "continue_if": [True], "threshold": {"false": 0.0}}
    (tmp_path / "gate.json").write_text(json.dumps(gate))
    asked = ["--gate", str(tmp_path / "gate.json"), "--system", "Hi."]
    done = finished([*COMMAND, str(source), "-o", str(out), *asked, *ENGINE])
    assert done.returncode == 0, done.stderr
    for row in results(out):
        assert (row["decision"], row["text"], row["finish_reason"]) == (False, "", "gate")
        assert row["source"] == "labels"
        assert list(row["probabilities"]) == ["true", "false"]
        assert math.isclose(sum(row["probabilities"].values()), 1.0)


def test_what_no_row_could_be_served_with_is_refused_before_a_model_is_loaded(
    tmp_path: Path,
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"text": "x"}\n')
    gate = tmp_path / "gate.json"
    gate.write_text('{"continue_if": "a", "prefix": "x"}')
    for more, complaint in (
        (["--prefix", "x", "--options", "a,b"], "continue_if"),
        (["--continue-if", "a"], "question, a branch or a prefix"),
        (["--continue-if", "a", "--prefix", "x", "--question", "y"], "give prefix and options"),
        (["--continue-if", "a", "--branch", "judge"], "NAME=FOLDER"),
        ([*DECISION, "--threshold", "skip"], "OPTION=PROBABILITY"),
        ([*DECISION, "--options", '["a", 1]'], "list of strings"),
        ([*DECISION, "--gate", str(gate)], "all that is to be decided"),
        (["--gate", str(gate)], "continue_if: Input should be a valid"),
        ([*DECISION, "--concurrency", "-1"], "greater than or equal to 0"),
        ([*DECISION, "-o", str(source)], "in.jsonl exists; choose another output"),
        ([*DECISION, "-o", str(tmp_path / "no" / "out")], "there is no folder"),
        ([*DECISION, "--gate", str(tmp_path)], "is a directory"),
    ):
        done = CliRunner().invoke(app, ["batch", "decide", str(source), "-o", str(out), *more])
        assert done.exit_code != 0, more
        said = " ".join(f"{done.exception} {done.stderr}".replace("│", " ").split())
        assert complaint in said, said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gate.json", "in.jsonl"]


def test_an_option_that_is_not_there_is_refused_before_any_row(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "x"}\n')
    wrong = finished(command(source, tmp_path / "out.jsonl", "--threshold", "later=0.5"))
    assert wrong.returncode == 2
    assert "'later' is none of the options" in wrong.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]
