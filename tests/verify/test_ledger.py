"""The chain shows edits, deletions, insertions, reorderings; a lost end only with an anchor."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.verify.canonical import canonical_bytes
from lockstep.verify.ledger import (
    GENESIS,
    Ledger,
    LedgerError,
    check,
    details_folder,
    past_runs,
    seal,
)
from lockstep.verify.ledger_report import report_of
from lockstep.verify.report import html

RECORDS = 6


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Three runs, whole."""
    path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    for index, verdict in enumerate(("pass", "fail", "undecidable")):
        with Ledger(path).run("compare", rule=f"{index:064d}", subject="é \ud800") as run:
            run.finish(verdict, {"requests": 10, "cross": {"count": 1, "low": 0.0, "high": 0.5}})
    assert not check(path).problems
    return path.read_bytes()


def problems(content: bytes, folder: Path, expected: str = "") -> tuple[str, ...]:
    path = folder / "ledger.jsonl"
    path.write_bytes(content)
    return check(path, expected).problems


def lines_of(content: bytes) -> list[bytes]:
    return content.splitlines(keepends=True)


@given(st.data())
def test_any_change_of_a_byte_is_seen(
    written: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(written) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda b: b != written[place]))
    changed = written[:place] + bytes([byte]) + written[place + 1 :]
    assert problems(changed, tmp_path_factory.mktemp("x"))


@given(st.data())
def test_any_deletion_reordering_or_repetition_of_lines_is_seen(
    written: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    lines = lines_of(written)
    chosen = data.draw(st.lists(st.integers(0, RECORDS - 1), min_size=1, max_size=RECORDS + 1))
    folder = tmp_path_factory.mktemp("x")
    found = problems(b"".join(lines[index] for index in chosen), folder)
    if chosen == list(range(len(chosen))):
        assert not found, "only its end is cut off"
    else:
        assert found


@pytest.mark.parametrize("kept", range(RECORDS))
def test_a_cut_off_end_is_seen_with_a_hash_kept_elsewhere(
    written: bytes, tmp_path: Path, kept: int
) -> None:
    lines = lines_of(written)
    head = json.loads(lines[-1])["hash"]
    assert not problems(written, tmp_path, head)
    cut = b"".join(lines[:kept])
    assert not problems(cut, tmp_path), "a chain alone cannot say"
    assert "cut off" in problems(cut, tmp_path, head)[-1]
    early = json.loads(lines[0])["hash"]
    assert not problems(written, tmp_path, early), "a longer chain holds its earlier heads"


def test_a_chain_written_anew_is_seen_with_a_hash_kept_elsewhere(
    written: bytes, tmp_path: Path
) -> None:
    records = [json.loads(line) for line in lines_of(written)]
    records[3]["verdict"] = "pass"
    previous = GENESIS
    for record in records:
        record["previous"] = previous
        previous = record["hash"] = seal(record)
    forged = b"".join(canonical_bytes(record) + b"\n" for record in records)
    assert not problems(forged, tmp_path), "a chain alone cannot say"
    head = json.loads(lines_of(written)[-1])["hash"]
    assert "written anew" in problems(forged, tmp_path, head)[-1]


def test_the_first_broken_place_is_named(written: bytes, tmp_path: Path) -> None:
    lines = lines_of(written)
    edited = [*lines]
    edited[3] = edited[3].replace(b'"verdict":"fail"', b'"verdict":"pass"')
    assert problems(b"".join(edited), tmp_path) == ("line 4: it was changed after it was written",)
    assert problems(b"".join(lines[:1] + lines[2:]), tmp_path)[0].startswith(
        "line 2: record 2 stands at place 1"
    )
    spaced = [*lines]
    spaced[2] = b" " + spaced[2]
    assert problems(b"".join(spaced), tmp_path) == ("line 3: it was changed after it was written",)
    assert problems(b"[]\n", tmp_path) == ("line 1 is no record",)
    assert problems(b"", tmp_path) == ()


def test_failed_and_unfinished_runs_stay_on_record(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    with pytest.raises(KeyboardInterrupt), ledger.run("compare", rule="r", subject="one"):
        raise KeyboardInterrupt
    with ledger.run("compare", rule="r", subject="two"):
        pass
    with ledger.run("noise", rule="r", subject="three") as run:
        run.finish("fail", {"requests": 3})
    ledger.append("run.started", {"run": "x", "command": "c", "subject": "s", "rule": "r"})  # died
    runs = past_runs(check(path).records)
    assert [run.verdict for run in runs] == ["error", "error", "fail", ""]
    assert runs[0].reason.startswith("KeyboardInterrupt")
    assert runs[0].started["versions"]["lockstep"]
    assert runs[0].started["hardware"]["machine"]
    text = html(report_of(path, check(path)))
    assert "no end" in text
    assert text.count("KeyboardInterrupt") == 1


def test_details_lie_beside_it_and_are_sealed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path).run("compare", rule="r", subject="s") as run:
        run.finish("pass", {}, details={"text": "é \ud800"})
    assert not check(path).problems
    (file,) = details_folder(path).iterdir()
    file.write_bytes(file.read_bytes().replace(b"text", b"tixt"))
    assert check(path).problems == (f"record 1: its details {file} were changed",)
    file.unlink()
    assert check(path).problems == (f"record 1: its details {file} are gone",)


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_line_that_a_crash_left_incomplete_is_cut_off_and_told_of(
    written: bytes, tmp_path: Path, cut: int
) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(written[:-cut])
    assert "incomplete" in check(path).problems[0]
    Ledger(path).append("note", {})
    checked = check(path)
    assert not checked.problems
    kinds = [record["kind"] for record in checked.records]
    assert kinds[-2:] == ["repaired", "note"]
    assert path.read_bytes().startswith(b"".join(lines_of(written)[:-1]))
    path.write_bytes(written[:30])
    Ledger(path).append("note", {})
    assert [record["kind"] for record in check(path).records] == ["repaired", "note"]


def test_nothing_is_added_to_what_is_no_ledger(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    for content in (b"some text\n", b'{"hash": 1}\n', b"[1]\n"):
        path.write_bytes(content)
        with pytest.raises(LedgerError, match="nothing was added"):
            Ledger(path).append("note", {})
        assert path.read_bytes() == content


def test_long_records_are_continued(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "deep" / "ledger.jsonl")
    for size in (10, 200_000, 70_000, 10):
        ledger.append("note", {"text": "x" * size})
    assert len(check(ledger.path).records) == 4
    assert not check(ledger.path).problems


def _write(path: Path, count: int) -> None:
    for index in range(count):
        Ledger(path).append("note", {"index": index})


def test_several_processes_write_one_chain(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(path, 20)) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)
    checked = check(path)
    assert not checked.problems
    assert len(checked.records) == 60
