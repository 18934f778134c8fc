"""The command line as a person meets it: in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from tests.server.support import alive, wait_until

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "NO_COLOR": "1"}
COMMAND = [sys.executable, "-m", "lockstep"]
REAL = ["--threads", "1", "--cache-mb", "64"]


def run(*words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words],
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        timeout=60,
        env=ENVIRONMENT,
        check=False,
    )


def test_help_names_every_command_and_loads_nothing_heavy() -> None:
    done = run("--help")
    assert done.returncode == 0
    for command in ("chat", "generate", "serve", "models", "doctor", "check-model"):
        assert command in done.stdout
    script = (
        "import sys, time, resource\n"
        "from lockstep.cli.main import app\n"
        "from typer.testing import CliRunner\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_utime)\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'fastapi', 'zmq', 'jinja2'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)\n"
    )
    light = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert light.returncode == 0, light.stderr
    assert float(light.stdout) < 0.6  # CPU seconds; typer, rich and the interpreter itself


def test_engine_options_are_the_same_in_every_command() -> None:
    from lockstep.cli.main import app
    from lockstep.cli.options import ENGINE, SAMPLING

    def options(command: str, names: Iterable[str]) -> list[object]:
        found: Any = get_command(app)
        for word in command.split():
            found = found.commands[word]
        by_name = {each.name: each for each in found.params}
        return [(by_name[name].opts, by_name[name].help) for name in names]

    engine = options("serve", ENGINE.parameters)
    for command in ("generate", "chat", "batch run", "batch decide", "branch train"):
        assert options(command, ENGINE.parameters) == engine, command
    sampling = options("generate", SAMPLING.parameters)
    for command in ("chat", "batch decide"):
        assert options(command, SAMPLING.parameters) == sampling, command


@pytest.mark.parametrize("command", ["chat", "generate", "serve", "models", "doctor"])
def test_every_command_explains_itself(command: str) -> None:
    done = run(command, "--help")
    assert done.returncode == 0
    assert "Usage" in done.stdout


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["generate", "no-such-model", "--prompt", "x"], "no-such-model"),
        (["generate", "smollm2", "--prompt", "x", "--temperature", "-1"], "temperature"),
        (["generate", "smollm2", "--prompt", "x", "--min-p", "nan"], "min_p"),
        (["generate", "smollm2", "--prompt", "x", "--dtype", "float8"], "dtype must be one of"),
        (["generate", "smollm2", "--prompt", "x", "--threads", "-1"], "threads"),
        (["generate", "smollm2", "--prompt", "x", "--device", "cuda:7"], "cuda"),
        (["generate", "smollm2", "--file", "/no/such/file"], "/no/such/file"),
        (["generate", "smollm2", "--lines"], "no prompt"),
        (["generate", "smollm2", "--max-tokens", "many", "--prompt", "x"], "max-tokens"),
        (["generate", "smollm2", "--no-such-option"], "no-such-option"),
        (
            ["generate", "smollm2", "--prompt", "x", "--regex", "a", "--json-schema", "-"],
            "not both",
        ),
        (["serve", "no-such-model", "--port", "0"], "no-such-model"),
        (["serve", "smollm2", "--port", "99999"], "port"),
        (["chat", "no-such-model"], "no-such-model"),
        (["dance"], "dance"),
    ],
)
def test_a_users_mistake_is_told_without_a_traceback(words: list[str], text: str) -> None:
    done = run(*words)
    assert done.returncode == 2, done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_version_and_models() -> None:
    assert run("--version").stdout.startswith("lockstep ")
    table = run("models")
    assert "smollm2" in table.stdout
    listed = json.loads(run("models", "--json").stdout)
    assert {model["name"] for model in listed} >= {"smollm2", "gemma3-270m"}
    assert all(isinstance(model["installed"], bool) for model in listed)


def test_doctor_finds_this_machine_able() -> None:
    done = run("doctor", "--json")
    findings = {finding["what"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == 0
    assert findings["torch"]["verdict"] == "good"
    assert findings["backend torch"]["verdict"] == "good"
    assert "cores usable" in findings["CPU"]["detail"]
    assert {"Python", "memory", "GPU", "HTTP server", "model smollm2"} <= set(findings)
    shown = run("doctor")
    assert "backend native" in shown.stdout


def test_generate_takes_options_files_and_stdin_and_writes_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("The sky is\n\nGrass is\n", encoding="utf-8")
    words = ["--prompt", "Snow is", "--file", str(file), "--file", "-", "--lines", "--json"]
    words += ["--temperature", "0", "--max-tokens", "4", "--logprobs", "1"]
    done = run("generate", "smollm2", *words, *REAL, stdin="Coal is\n")
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["prompt"] for record in records] == [
        "Snow is",
        "The sky is",
        "Grass is",
        "Coal is",
    ]
    for record in records:
        assert record["text"]
        assert len(record["token_ids"]) == len(record["logprobs"]) <= 4
        assert record["finish_reason"] in ("length", "stop")


def test_generate_chats_in_plain_text() -> None:
    question = "What is the capital of France? Answer briefly."
    done = run(
        "generate", "smollm2", "--chat", "--temperature", "0", "-n", "12", *REAL, stdin=question
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_generate_keeps_to_a_schema_or_tells_what_is_wrong_with_it(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"]}
    path.write_text(json.dumps({**schema, "additionalProperties": False}))
    words = ["generate", "smollm2", "--prompt", "n:", "--json-schema", str(path), *REAL]
    done = run(*words, "--seed", "1", "-n", "40")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["n"] == 7
    path.write_text('{"properties": {"foo": "bar"}}')
    done = run(*words)
    assert done.returncode == 2
    assert "/properties/foo" in done.stderr
    assert "Traceback" not in done.stderr


def test_chat_keeps_the_conversation_until_reset_and_survives_ctrl_c() -> None:
    process = subprocess.Popen(
        [*COMMAND, "chat", "smollm2", "--temperature", "0", "--max-tokens", "2000", *REAL],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("Write a very long story about the sea.\n")
    process.stdin.flush()
    started = process.stdout.read(8)
    assert len(started) == 8
    process.send_signal(signal.SIGINT)
    out, err = process.communicate("/help\n/reset\n\nSay hi.\n/exit\nnever read\n", timeout=60)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert "stopped, " in err
    assert "The conversation is forgotten." in err
    rates = re.findall(r"(\d+) tokens, .* first after .*, (\d+) prompt tokens from the cache", err)
    assert len(rates) == 2
    assert out.strip()


def test_serve_answers_and_ends_on_sigterm() -> None:
    process = subprocess.Popen(
        [*COMMAND, "serve", "smollm2", "--port", "0", "--served-name", "small", *REAL],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    while "serving" not in line:
        assert line, "it ended without serving"
        line = process.stderr.readline()
    match = re.search(r"http://127\.0\.0\.1:\d+", line)
    assert match is not None
    url = match.group()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    reply = httpx.post(
        f"{url}/v1/completions",
        json={"model": "small", "prompt": "Hi", "max_tokens": 2},
        timeout=30,
    )
    assert reply.json()["usage"]["completion_tokens"] <= 2
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    assert "libtorch" not in maps
    process.terminate()
    began = time.monotonic()
    _, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    assert time.monotonic() - began < 10
    assert "Traceback" not in err
    for child in children:
        wait_until(lambda child=child: not alive(int(child)))  # type: ignore[misc]


def test_serve_leaves_the_number_of_sequences_to_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import lockstep.cli.serve as module
    from lockstep.async_llm import AsyncLLM
    from lockstep.cli.main import app

    made: list[AsyncLLM] = []

    async def keep(llm: AsyncLLM, config: object) -> None:
        made.append(llm)

    monkeypatch.setattr(module, "_serve", keep)
    for words in ([], ["--max-sequences", "7"]):
        assert CliRunner().invoke(app, ["serve", "smollm2", *words]).exit_code == 0
    schedulers = [llm.client.config.scheduler for llm in made]
    assert [scheduler.max_sequences for scheduler in schedulers] == [0, 7]
    assert schedulers[0].resolved("cuda").max_sequences > 64


def test_serve_on_a_taken_port_says_so() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("serve", "smollm2", "--port", str(port), *REAL)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "in use" in done.stderr
    assert "--port" in done.stderr


def test_serve_on_an_address_of_another_machine_says_so() -> None:
    from lockstep.config import ServerConfig
    from lockstep.server.serve import listen

    with pytest.raises(OSError, match=r"192\.0\.2\.1.*--host"):
        listen(ServerConfig(host="192.0.2.1", port=0))
