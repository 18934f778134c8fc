"""`lockstep serve` and `lockstep keys` as an operator meets them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner, Result

from lockstep.cli.main import app
from lockstep.config import ConfigError
from lockstep.server.auth import read_keys
from tests.cli.test_cli import COMMAND, ENVIRONMENT


def invoke(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_a_key_is_printed_alone_so_that_it_can_be_piped(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    made = invoke("keys", "new", "alice", "--file", str(path), "--max-concurrent", "4")
    assert made.exit_code == 0
    assert made.stdout.startswith("sk-lockstep-")
    assert made.stdout.count("\n") == 1
    assert str(path) in made.stderr
    assert invoke("keys", "new", "boss", "--admin", "-f", str(path)).exit_code == 0
    alice, boss = read_keys(path)
    assert (alice.max_concurrent, alice.admin, boss.admin) == (4, False, True)
    listed = invoke("keys", "list", "-f", str(path)).stdout
    assert "alice" in listed
    assert "boss" in listed
    assert made.stdout.strip() not in listed
    again = invoke("keys", "new", "alice", "-f", str(path))
    assert again.exit_code != 0
    assert len(read_keys(path)) == 2


def test_a_missing_keys_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lockstep keys new NAME --file"):
        read_keys(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("port = 'x", "cannot be read"),
        ("porto = 1", "porto"),
        ("[port]\na = 1", "not a table"),
        ("port = 99999", "--port"),
    ],
)
def test_a_wrong_settings_file_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "lockstep.toml"
    path.write_text(text)
    done = invoke("serve", "smollm2", "--config", str(path))
    assert done.exit_code == 2
    assert complaint in done.output
    assert invoke("serve", "--config", str(tmp_path / "none.toml")).exit_code == 2


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (["judge"], "NAME=FOLDER"),
        (["=judge"], "NAME=FOLDER"),
        (["judge="], "NAME=FOLDER"),
        (["a=x", "a=y"], "named twice"),
    ],
)
def test_a_branch_is_a_name_and_a_folder(given: list[str], complaint: str) -> None:
    done = invoke("serve", "smollm2", *(part for one in given for part in ("--branch", one)))
    assert done.exit_code == 2
    assert complaint in done.output


def test_a_server_from_a_settings_file(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    secret = invoke("keys", "new", "alice", "-f", str(keys)).stdout.strip()
    path = tmp_path / "lockstep.toml"
    path.write_text(
        f'keys-file = "{keys}"\nthreads = 1\ncache-mb = 64\nport = 1\nlog-format = "json"\n'
        'served-name = "small"\nmax-output-tokens = 3\n'
    )
    server = subprocess.Popen(
        [*COMMAND, "serve", "smollm2", "--config", str(path), "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env={**ENVIRONMENT, "LOCKSTEP_ADMIN_KEYS": "boss"},
    )
    try:
        assert server.stderr is not None
        for line in server.stderr:
            message = json.loads(line)["message"]
            if message.startswith("serving small at "):
                break
        url = message.split()[3].removesuffix("/v1")
        assert not url.endswith(":1"), "the command line wins over the file"
        (child,) = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        assert b"boss" not in Path(f"/proc/{child}/environ").read_bytes()
        body = {"model": "small", "messages": [{"role": "user", "content": "Count to ten."}]}
        key = {"authorization": f"Bearer {secret}"}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, headers=key, timeout=30).json()
        assert reply["usage"]["completion_tokens"] <= 3
        assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 401
        live = httpx.get(f"{url}/admin/requests", headers={"authorization": "Bearer boss"})
        assert live.json()["data"] == []
        os.kill(server.pid, signal.SIGTERM)
        assert server.wait(20) == 0
        last = server.stderr.read()
        assert '"level": "error"' not in last
        assert "Traceback" not in last
    finally:
        if server.poll() is None:
            server.kill()
        server.communicate()
