"""A server that is killed, told to stop, or cannot start, and a crowd that waits for it."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from lockstep.config import ConfigError, ServerConfig
from lockstep.server import create_app
from lockstep.server.batches.runner import Batches
from lockstep.server.serve import make_server
from tests.faults.world import Asking, Served, join, served
from tests.server.support import alive, fake_llm, wait_until

pytestmark = pytest.mark.slow

WORDS = "one two three four five six seven eight nine ten " * 12
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
    },
}
CHAT = {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 150}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": WORDS, "max_tokens": 150}),
    ("/v1/responses", {"input": WORDS, "max_output_tokens": 150}),
    ("/v1/chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": "required"}),
    ("/v1/chat/completions", {**CHAT, "n": 3, "logprobs": True, "top_logprobs": 1}),
]
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"input": [WORDS] * 20}),
    ("/v1/score", {"context": WORDS, "options": [" yes", " no"]}),
    (
        "/v1/decisions",
        {"input": WORDS, "questions": [{"type": "predicate", "instructions": "Yes?"}]},
    ),
]


def crowd(server: Served, name: str, rounds: int) -> list[Asking]:
    """Every call, whole and streamed, and those that cannot be streamed."""
    bodies = [(path, {**body, "stream": bool(i % 2)}) for path, body in CALLS for i in range(2)]
    return [
        Asking(server.url, path, {**body, "model": name})
        for _ in range(rounds)
        for path, body in bodies + OTHERS
    ]


def start_batch(server: Served, name: str, lines: int) -> str:
    rows = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": name, "prompt": WORDS, "max_tokens": 20 + number % 7},
        }
        for number in range(lines)
    ]
    content = "\n".join(map(json.dumps, rows)).encode()
    file = httpx.post(
        f"{server.url}/v1/files", files={"file": ("a", content)}, data={"purpose": "batch"}
    ).json()
    made = server.post(
        "/v1/batches",
        {
            "input_file_id": file["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        },
    ).json()
    return str(made["id"])


def end_of_batch(server: Served, batch: str) -> list[dict[str, Any]]:
    """Its rows, once it has completed."""

    def ended() -> bool:
        return bool(server.get(f"/v1/batches/{batch}").json()["status"] == "completed")

    wait_until(ended, 60)
    found = server.get(f"/v1/batches/{batch}").json()
    assert found["error_file_id"] is None
    text = server.get(f"/v1/files/{found['output_file_id']}/content").text
    return [json.loads(line) for line in text.splitlines()]


def test_the_engine_is_killed_under_a_mixed_crowd(tmp_path: Path) -> None:
    with served(tmp_path, "slow") as server:
        batch = start_batch(server, "slow", 40)
        asking = crowd(server, "slow", 5)
        wait_until(lambda: server.metrics()["num_requests_running"] > 10, 30)
        time.sleep(0.5)
        killed = server.engine
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: server.get("/ready").status_code == 503)
        assert server.metrics()["engine_up"] == 0
        assert server.get("/health").json()["engine"] == "restarting"
        join(asking)
        for one in asking:
            error = one.error()
            if one.status == 200 and not one.streamed:
                assert error is None  # it had ended before
            else:
                assert one.status == (200 if one.streamed and len(one.lines) > 1 else 503)
                assert error is not None
                assert "SIGKILL" in error["message"] or "restarting" in error["message"]
        broken = [one for one in asking if one.streamed and len(one.lines) > 1]
        assert {one.path for one in broken} == {path for path, _ in CALLS}
        wait_until(lambda: server.get("/ready").status_code == 200, 30)
        assert server.metrics()["engine_restarts_total"] == 1
        assert server.post("/v1/completions", {"model": "slow", "prompt": "hi"}).status_code == 200
        rows = end_of_batch(server, batch)
        assert [row["custom_id"] for row in rows] == [f"line-{n}" for n in range(40)]
        metrics = server.metrics()
        assert metrics["requests_in_flight"] == 0
        assert metrics["num_requests_running"] == metrics["num_requests_waiting"] == 0
        assert metrics['requests_outcome_total{outcome="lost"}'] > 0
        assert metrics['requests_outcome_total{outcome="failed"}'] == 0
        accepted, accounted = server.counted()
        assert accepted == accounted
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert not alive(killed)
        assert server.leftovers() == []


def test_a_server_that_is_killed_leaves_no_engine_behind(tmp_path: Path) -> None:
    with served(tmp_path, "slow") as server:
        engine = server.engine
        asking = crowd(server, "slow", 1)
        wait_until(lambda: server.metrics()["num_requests_running"] > 3)
        os.kill(engine, signal.SIGSTOP)  # one that somebody has stopped ends, too
        server.signal(signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
        wait_until(lambda: not alive(engine))
        for one in asking:
            one.join(10)
            assert not one.is_alive()
        # Sockets go with the engine; files of a server without a directory with the next server.
        (data,) = [name for name in server.leftovers() if "/" not in name]
        assert data.startswith("lockstep-data-")
    foreign = server.temporary / "lockstep-data-of-somebody"
    foreign.mkdir()
    with served(tmp_path) as second:
        assert data not in second.leftovers()
        assert foreign.exists()


def test_servers_leave_each_others_temporary_data_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first, second = (Batches(create_app(fake_llm())) for _ in range(2))
    first.open()
    second.open()
    assert len(list(tmp_path.glob("lockstep-data-*/index.sqlite3"))) == 2


def test_a_terminal_that_closes_stops_the_server_kindly(tmp_path: Path) -> None:
    """SIGHUP reaches both processes."""
    with served(tmp_path, "slow") as server:
        body = {"model": "slow", "prompt": WORDS, "max_tokens": 60, "stream": True}
        asking = Asking(server.url, "/v1/completions", body)
        wait_until(lambda: server.metrics()["num_requests_running"] == 1)
        os.kill(server.engine, signal.SIGHUP)
        server.signal(signal.SIGHUP)
        join([asking])
        assert asking.error() is None
        assert server.wait() == 0
        assert server.leftovers() == []


def test_told_to_stop_while_the_model_loads(tmp_path: Path) -> None:
    server = Served(tmp_path, "sleeps")
    try:
        wait_until(lambda: bool(server.engines()), 30)
        (engine,) = server.engines()
        wait_until(lambda: Path(f"/proc/{engine}/comm").read_text().startswith("lockstep"), 30)
        began = time.monotonic()
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert time.monotonic() - began < 8.0
        assert not alive(engine)
        assert server.leftovers() == []
        assert not [each for each in server.log if each["level"] in ("error", "none")]
    finally:
        server.end()


def test_an_engine_that_cannot_start_again_is_tried_with_patience(tmp_path: Path) -> None:
    with served(tmp_path, "fragile") as server:
        broken = server.temporary / "broken"
        broken.touch()
        os.kill(server.engine, signal.SIGKILL)
        wait_until(lambda: len(server.said("next try in")) == 2, 40)
        assert [text[-10:] for text in server.said("next try in")] == ["try in 1 s", "try in 2 s"]
        assert all("RuntimeError: no such device" in text for text in server.said("next try in"))
        ready = server.get("/ready")
        assert ready.status_code == 503
        assert int(ready.headers["retry-after"]) >= 1
        assert ready.json()["error"]["code"] == "engine_unavailable"
        assert server.get("/health").status_code == 200
        broken.unlink()
        wait_until(lambda: server.get("/ready").status_code == 200, 30)
        assert server.metrics()["engine_restarts_total"] == 1
        broken.touch()  # told to stop while there is no engine
        os.kill(server.engine, signal.SIGKILL)
        wait_until(lambda: len(server.said("next try in")) == 3, 40)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


def test_a_drain_ends_clients_that_do_not_read(tmp_path: Path) -> None:
    body = {"model": "parrot", "prompt": WORDS * 3, "max_tokens": 360, "n": 4, "logprobs": 5}
    content = json.dumps({**body, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
    with served(tmp_path, drain_seconds=1) as server:
        host, port = server.url.removeprefix("http://").split(":")
        stuck = socket.socket()
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect((host, int(port)))
        request = head.encode() + b"Content-Type: application/json\r\n\r\n" + content
        stuck.sendall(request * 15)
        asleep = socket.create_connection((host, int(port)))  # half a body
        asleep.sendall(request[:-1])
        wait_until(lambda: server.metrics()["http_requests_in_flight"] == 3)
        time.sleep(2)
        began = time.monotonic()
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert time.monotonic() - began < 10.0
        assert server.leftovers() == []
        stuck.close()
        asleep.close()


def test_where_files_cannot_live_nothing_starts_and_nothing_is_lost(tmp_path: Path) -> None:
    mine = tmp_path / "project"
    (mine / "files").mkdir(parents=True)
    (mine / "files" / "thesis.txt").write_text("all of it")
    taken = tmp_path / "taken"
    taken.write_text("")
    for folder, complaint in (
        (mine, "holds a folder 'files' that is not a server's"),
        (taken, "cannot be used"),
        (Path("/proc/nowhere"), "cannot be used"),
    ):
        with pytest.raises(ConfigError, match=f"data_dir '{folder}' {complaint}"):
            make_server(fake_llm(), ServerConfig(data_dir=str(folder)))
    assert (mine / "files" / "thesis.txt").read_text() == "all of it"
    assert [path.name for path in mine.iterdir()] == ["files"]
