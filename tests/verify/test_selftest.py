"""The self-test passes where the contract holds, fails where a point breaks, and says which."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lockstep.cli.main import app
from lockstep.config import ModelOptions
from lockstep.engine.loop import Engine
from lockstep.kernels.cpu.native import NativeBackend
from lockstep.types import Request
from lockstep.verify.ledger import check, past_runs
from lockstep.verify.outcome import compared
from lockstep.verify.schedules import World
from lockstep.verify.selftest import reason_of, self_test, verdict_of
from tests.model.tiny import build_oracle, save

POINTS = [
    "loads",
    "the same again, alone",
    "in a crowd",
    "in another order of arrival",
    "in chunks of at most 7 tokens",
    "in chunks of at most 64 tokens",
    "in chunks of at most 512 tokens",
    "on a cached prefix",
    "preempted and begun again in a small pool",
    "equal seeds, asked at once",
    "other seeds draw otherwise",
    "on 2 threads",
    "on 3 threads",
    "control: sums that follow the batch are caught",
]


def outcomes(name: str, **more: Any) -> dict[str, bool | None]:
    found = list(self_test(ModelOptions(name, threads=1, **more)))
    assert len({one.point for one in found}) == len(found)
    return {one.point: one.passed for one in found}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_point_holds_on_a_small_model(model: str, dtype: str) -> None:
    assert outcomes(model, dtype=dtype) == dict.fromkeys(POINTS, True)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_what_cannot_be_examined_is_said_and_fails_nothing(tmp_path: Path, backend: Any) -> None:
    """A short context, and a backend that promises nothing about threads. The vocabulary is odd,
    and a penalised request with two choices has two rows in a step."""
    save(build_oracle("llama", max_position_embeddings=64, num_hidden_layers=1), tmp_path)
    found = list(self_test(ModelOptions(str(tmp_path), threads=1, backend=backend)))
    skipped = [one.point for one in found if one.passed is None]
    assert skipped[0] == "preempted and begun again in a small pool"
    assert skipped[1:] == (["on another number of threads"] if backend == "torch" else [])
    assert verdict_of(found) == "pass"
    assert reason_of(found).endswith(f"{len(skipped)} could not be examined here")


def test_sums_that_follow_the_batch_fail_the_points_where_rows_are_shared(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = World.__init__
    faults = ExitStack()

    def broken(self: World, *given: Any) -> None:
        made(self, *given)
        faults.enter_context(self.sums_that_follow_the_batch())

    monkeypatch.setattr(World, "__init__", broken)
    monkeypatch.setattr(
        "lockstep.verify.selftest._Examination.control",
        lambda self: compared("control", self.expected, self.expected),
    )
    found = outcomes(model, dtype="float32")
    assert found["the same again, alone"] is True
    for point in ("in a crowd", "in chunks of at most 7 tokens", "on a cached prefix"):
        assert found[point] is False, point


@pytest.mark.parametrize(
    ("point", "fault"),
    [
        ("equal seeds, asked at once", "slot"),
        ("on a cached prefix", "hit"),
        ("other seeds draw otherwise", "deaf"),
    ],
)
def test_c03_c11_each_planted_fault_fails_its_point(
    model: str, monkeypatch: pytest.MonkeyPatch, point: str, fault: str
) -> None:
    """C11: a number of the slot in the seed. C03: an answer that knows a hit. Seeds unheard."""
    submit = Engine.submit
    count = 0

    def faulty(self: Engine, request: Request) -> None:
        nonlocal count
        sampling = request.sampling
        if fault == "slot" and request.id.endswith((" a", " b")):
            sampling = replace(sampling, seed=(sampling.seed or 0) + count)
        if fault == "hit" and request.id == "drawn" and self.stats().pages_cached:
            sampling = replace(sampling, temperature=sampling.temperature * 1.5)
        if fault == "deaf" and sampling.temperature > 0:
            sampling = replace(sampling, seed=1)
        count += 1
        submit(self, replace(request, sampling=sampling))

    monkeypatch.setattr(Engine, "submit", faulty)
    found = outcomes(model)
    assert found[point] is False
    assert found["in a crowd"] is True


def test_c01_a_norm_that_takes_another_tree_from_256_rows_on_is_caught(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = NativeBackend.rms_norm

    def by_rows(self: Any, x: Any, weight: Any, eps: float, *rest: Any) -> Any:
        return whole(self, x, weight, eps * 1.5 if x.shape[0] >= 256 else eps, *rest)

    monkeypatch.setattr(NativeBackend, "rms_norm", by_rows)
    found = outcomes(model, dtype="float32")
    assert found["in chunks of at most 64 tokens"] is False
    assert found["the same again, alone"] is True


def test_a_control_that_is_not_caught_fails_the_test(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(World, "sums_that_follow_the_batch", lambda self: nullcontext())
    found = list(self_test(ModelOptions(model, threads=1)))
    assert found[-1].passed is False
    assert "proves nothing" in found[-1].detail
    assert verdict_of(found) == "fail"


def test_the_command_tells_records_and_reports(model: str, tmp_path: Path) -> None:
    ledger, page = tmp_path / "ledger.jsonl", tmp_path / "report.html"
    words = ["verify", "self", model, "--threads", "1", "--ledger", str(ledger)]
    done = CliRunner().invoke(app, [*words, "--report", str(page)])
    assert done.exit_code == 0, done.output
    assert "PASS" in done.output
    assert "Not covered by this test" in done.output
    assert "speculation" in page.read_text()
    assert "name them with --branch" in page.read_text()
    (past,) = past_runs(check(ledger).records)
    assert (past.command, past.verdict) == ("self", "pass")
    assert past.figures["in a crowd"][0] is True
    with pytest.raises(Exception, match="no-such"):
        CliRunner().invoke(app, ["verify", "self", "no-such", *words[3:]], catch_exceptions=False)
    assert past_runs(check(ledger).records)[1].verdict == "error"
