"""`lockstep batch run` on the real SmolLM2, as a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_a_file_in_a_file_out(tmp_path: Path) -> None:
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "smollm2", "prompt": "The sea is", "max_tokens": 4, "temperature": 0},
        }
        for number in range(3)
    ]
    rows[1]["body"] = {"model": "smollm2", "prompt": "x", "temperature": -1}
    file.write_text("\n".join(json.dumps(row) for row in rows))
    command = [sys.executable, "-m", "lockstep.cli.main", "batch", "run", str(file), "-o", str(out)]
    done = subprocess.run([*command, "--threads", "1"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert "2 answers, 1 errors" in done.stderr
    found = [json.loads(line)["response"] for line in out.read_text().splitlines()]
    assert [row["status_code"] for row in found] == [200, 400, 200]
    assert found[0]["body"]["choices"] == found[2]["body"]["choices"]
    again = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert again.returncode == 2
    assert "exists" in again.stderr
