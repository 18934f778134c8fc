"""A started model as what decides about rows: each source, and an engine killed underneath."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from lockstep.decide_rows import Rows, Run, Summary, decide_file
from lockstep.decide_rows import model as decider_module
from lockstep.decide_rows.model import Decider
from lockstep.decisions import Choice
from lockstep.decisions.asking import GateArguments
from lockstep.places import Places
from lockstep.requests import LONG_TEXT
from lockstep.types import RequestError, SamplingParams
from tests.branch_fake import make_branch
from tests.decide_rows.support import results, written
from tests.server.support import fake_llm

WRITES = SamplingParams(temperature=0.0, max_tokens=6, seed=0)


def decide(
    folder: Path, rows: list[object], gate: GateArguments, *, kill: bool = False
) -> tuple[Summary, list[dict[str, Any]]]:
    """The rows through a scripted engine in a process of its own."""
    source, out = written(folder / "in.jsonl", rows), folder / "out.jsonl"

    async def whole() -> Summary:
        judge = make_branch(folder, "judge")
        async with fake_llm("judged-speaks", branches={"judge": judge}) as llm:
            decider = Decider(llm, gate, WRITES)
            decider.check()
            run = Run(Rows(source), out, "", decider, decider.ready, Places(8))
            killed = not kill

            def progress(part: float, totals: Any) -> None:
                nonlocal killed
                if not killed and totals.rows > 5:
                    killed = True
                    assert llm.client.pid is not None
                    os.kill(llm.client.pid, signal.SIGKILL)

            summary = await decide_file(run, progress)
            assert killed
            return summary

    return asyncio.run(whole()), results(out)


def test_a_branch_decides_and_the_trunk_writes(tmp_path: Path) -> None:
    texts = ["answer answer", "search search", "refuse refuse refuse"]
    rows: list[object] = [{"text": text} for text in texts]
    summary, found = decide(tmp_path, rows, {"branch": "judge", "continue_if": ["answer"]})
    assert [row["decision"] for row in found] == ["answer", "search", "refuse"]
    assert [row["finish_reason"] == "gate" for row in found] == [False, True, True]
    assert [bool(row["text"]) for row in found] == [True, False, False]
    assert {row["source"] for row in found} == {"judge"}
    assert summary.totals.wrote == 1


def test_an_engine_that_dies_costs_no_row(tmp_path: Path) -> None:
    rows: list[object] = [{"id": i, "text": f"row {i}"} for i in range(60)]
    gate: GateArguments = {"prefix": "> ", "options": ["a", "b"], "continue_if": ["a", "b"]}
    _, found = decide(tmp_path, rows, gate, kill=True)
    assert [row["id"] for row in found] == list(range(60))
    assert all(row["text"].startswith(f"> {row['decision']}") for row in found)


def test_what_fits_no_row_is_refused_before_the_first(tmp_path: Path) -> None:
    gates: list[tuple[GateArguments, str]] = [
        ({"branch": "nobody", "continue_if": ["answer"]}, "branch"),
        ({"branch": "judge", "continue_if": ["write"]}, "continue_if[0]"),
        ({"question": Choice("?", ["a", "b"]), "continue_if": ["c"]}, "continue_if[0]"),
        ({"prefix": "", "options": ["a b", "a b c"], "continue_if": ["a b"]}, "options[1]"),
    ]

    async def fields() -> list[str]:
        found = []
        judge = make_branch(tmp_path, "judge")
        async with fake_llm("judged-speaks", branches={"judge": judge}) as llm:
            for gate, _ in gates:
                with pytest.raises(RequestError) as caught:
                    Decider(llm, gate, WRITES).check()
                found.append(caught.value.field)
        return found

    assert asyncio.run(fields()) == [field for _, field in gates]


def test_a_long_row_is_read_beside_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long rows are read in another thread, one at a time; short ones are not kept waiting."""
    long = "answer " * (LONG_TEXT // 7 + 1)
    rows: list[object] = [{"text": long}, {"text": long}, {"text": "answer"}]
    here, at_work, most = threading.get_ident(), 0, 0
    threads: list[tuple[int, bool]] = []
    read = decider_module.gated_requests

    def watched(builder: Any, branches: Any, given: Any, *more: Any) -> Any:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        threads.append((len(given), threading.get_ident() == here))
        try:
            return read(builder, branches, given, *more)
        finally:
            at_work -= 1

    monkeypatch.setattr(decider_module, "gated_requests", watched)
    gate: GateArguments = {"prefix": "> ", "options": ["a", "b"], "continue_if": ["a", "b"]}
    _, found = decide(tmp_path, rows, gate)
    assert [row.get("error", {}).get("code") for row in found] == [
        "context_length_exceeded",
        "context_length_exceeded",
        None,
    ]
    assert {on_loop for length, on_loop in threads if length > LONG_TEXT // 2} == {False}
    assert (6, True) in threads
    assert most <= 2  # a long row, and a short one beside it
