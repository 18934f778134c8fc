"""Progress where nobody sees a bar."""

from __future__ import annotations

import pytest

from lockstep import progress


def test_a_log_gets_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress.command_progress("asking", 200) as advance:
        for done in range(200):
            now = float(done)
            advance(done, f"{done} of 200")
    assert capsys.readouterr().err.splitlines() == [
        f"{done} of 200 ({done / 2:.0f}%)" for done in range(30, 200, 30)
    ]


def test_short_work_is_silent_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.command_progress("loading", 1.0) as advance:
        advance(0.5, "loading")
    assert capsys.readouterr().err == ""
