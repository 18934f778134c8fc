"""Clients that stall, knock in crowds, or speak odd HTTP."""

from __future__ import annotations

import gzip
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.world import Served, served
from tests.server.support import wait_until

WORDS = "one two three four five six seven eight nine ten " * 30
SHORT = {"model": "parrot", "prompt": "hello there you", "max_tokens": 5}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    with served(folder, keep_alive_seconds=4, stall_seconds=2, max_output_tokens=400) as running:
        yield running


def connect(server: Served) -> socket.socket:
    """A connection with a small buffer, so that what is not read soon holds up the server."""
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(15)
    client.connect((host, int(port)))
    return client


def request(body: dict[str, Any], *headers: str, version: str = "1.1") -> bytes:
    return raw_request(json.dumps(body).encode(), *headers, version=version)


def raw_request(content: bytes, *headers: str, version: str = "1.1") -> bytes:
    lines = [
        f"POST /v1/completions HTTP/{version}",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def read_to_end(client: socket.socket) -> bytes:
    """Everything until the server closes; one that was reset has ended, too."""
    found = b""
    try:
        while piece := client.recv(65536):
            found += piece
    except ConnectionError:
        pass
    return found


def read_reply(client: socket.socket) -> tuple[int, bytes]:
    """One reply that says its length."""
    found = b""
    while b"\r\n\r\n" not in found:
        found += client.recv(65536)
    head, _, body = found.partition(b"\r\n\r\n")
    (length,) = (int(x.split(b":")[1]) for x in head.lower().split(b"\r\n") if b"length:" in x)
    while len(body) < length:
        body += client.recv(65536)
    return int(head.split()[1]), body


def trickle(client: socket.socket, content: bytes) -> int:
    """Bytes that could be sent at five a second."""
    for sent, byte in enumerate(content):
        try:
            client.sendall(bytes([byte]))
        except OSError:
            return sent
        time.sleep(0.2)
    raise AssertionError("the server has taken it all")


@pytest.mark.slow
def test_a_client_that_stands_still_is_cut_off(server: Served) -> None:
    sent = {
        "nothing": b"",
        "half a head": b"GET /health HT",
        "half a body": raw_request(b"{}", "X: y")[:-1],
    }
    clients = {}
    for name, content in sent.items():
        clients[name] = connect(server)
        clients[name].sendall(content)
    trickling = connect(server)  # a byte now and then is no excuse for a head
    began = time.monotonic()
    assert trickle(trickling, b"GET /health HTTP/1.1\r\nX: " + b"a" * 100) > 10
    assert 3.0 < time.monotonic() - began < 12.0
    for client in clients.values():
        assert read_to_end(client) == b""
    slow = connect(server)  # but for a body it is enough
    content = request(SHORT)
    slow.sendall(content[:-4])
    for byte in content[-4:]:
        time.sleep(1.0)
        slow.sendall(bytes([byte]))
    assert read_reply(slow)[0] == 200


@pytest.mark.slow
def test_clients_that_do_not_read_hold_up_nobody_and_are_cut_off(server: Served) -> None:
    before = server.memory()
    many = 80  # what the system's own buffers take in does not stand still
    body = {**SHORT, "prompt": WORDS, "max_tokens": 300, "n": 4, "logprobs": 5, "stream": True}
    clients = [connect(server)]
    for client in clients:
        client.sendall(request(body) * many)
    wait_until(lambda: server.metrics()["http_requests_in_flight"] == 2, 20)  # its own, too
    assert server.post("/v1/completions", SHORT).status_code == 200
    # Between two requests of a connection there is none for a moment: look more than once.
    wait_until(lambda: all(server.metrics()["http_requests_in_flight"] == 1 for _ in range(20)), 60)
    assert server.memory() - before < 32e6
    for client in clients:
        assert read_to_end(client).count(b"[DONE]") < many
    accepted, accounted = server.counted()
    assert accepted == accounted
    assert server.metrics()["requests_in_flight"] == 0


@pytest.mark.slow
def test_a_crowd_beyond_the_file_limit_leaves_room_for_the_rest(tmp_path: Path) -> None:
    with served(tmp_path, files=160) as server:
        crowd = [connect(server) for _ in range(120)]
        replies = []
        for client in crowd:
            try:
                client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                replies.append(read_reply(client))
            except OSError:
                replies.append((0, b""))
        served_ones = [
            client for client, (status, _) in zip(crowd, replies, strict=True) if status == 200
        ]
        refused = [body for status, body in replies if status == 503]
        assert len(served_ones) == 32
        assert refused
        assert {json.loads(body)["error"]["code"] for body in refused} == {"too_many_connections"}
        os.kill(server.engine, signal.SIGKILL)  # starting it again takes files
        served_ones[0].close()

        def back() -> bool:
            client = served_ones[1]
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            health = json.loads(read_reply(client)[1])
            return bool(health["engine"] == "ready" and health["restarts"] == 1)

        wait_until(back, 30)
        assert not server.said("out of system resource")
        for client in crowd:
            client.close()
        wait_until(lambda: server.post("/v1/completions", SHORT).status_code == 200)


def test_a_thousand_idle_connections_cost_nothing(server: Served) -> None:
    crowd = [connect(server) for _ in range(1000)]
    assert server.post("/v1/completions", SHORT).status_code == 200
    before = server.cpu_seconds()
    time.sleep(1.5)
    assert server.cpu_seconds() - before < 0.2
    for client in crowd:
        client.close()


def test_one_connection_goes_on_after_errors_and_takes_requests_ahead(server: Served) -> None:
    client = connect(server)
    for content, status in (
        (raw_request(b"{"), 400),
        (request({**SHORT, "model": "other"}), 404),
        (raw_request(gzip.compress(json.dumps(SHORT).encode()), "Content-Encoding: gzip"), 415),
        (request(SHORT, "Content-Encoding: identity"), 200),
        (b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"DELETE /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (b"OPTIONS /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (request(SHORT), 200),
    ):
        client.sendall(content)
        found, body = read_reply(client)
        assert found == status
        assert ("error" in json.loads(body)) == (status != 200)
    client.sendall(b"HEAD /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert client.recv(65536).endswith(b"\r\n\r\n")  # no body
    last = request({**SHORT, "stream": True}, "Connection: close")
    client.sendall(request(SHORT) * 3 + last)
    replies = read_to_end(client)
    assert replies.count(b"HTTP/1.1 200 OK") == 4
    assert replies.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_old_and_odd_clients(server: Served) -> None:
    old = connect(server)  # 1.0 knows no chunks: the stream ends with the connection
    old.sendall(request({**SHORT, "stream": True}, version="1.0"))
    head, _, body = read_to_end(old).partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")

    careful = connect(server)
    content = request(SHORT, "Expect: 100-continue")
    head, _, body = content.partition(b"\r\n\r\n")
    careful.sendall(head + b"\r\n\r\n")
    assert careful.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
    careful.sendall(body)
    assert read_reply(careful)[0] == 200

    chunked = connect(server)
    content = json.dumps(SHORT).encode()
    chunked.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    for byte in content:
        chunked.sendall(b"1\r\n%c\r\n" % byte)
    chunked.sendall(b"0\r\n\r\n")
    assert read_reply(chunked)[0] == 200


@pytest.mark.parametrize(
    "content",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"GET /health HTTP/1.1\r\nX: " + b"a" * 70_000,
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    ],
    ids=["tls", "endless header", "negative length", "two hosts"],
)
def test_what_is_no_http_is_told_so_in_the_shape_of_all_errors(
    server: Served, content: bytes
) -> None:
    client = connect(server)
    client.sendall(content)
    status, body = read_reply(client)
    assert status == 400
    assert json.loads(body)["error"]["code"] == "invalid_http"
    assert read_to_end(client) == b""


def test_clients_that_leave_are_no_errors_in_the_log(server: Served) -> None:
    long = {**SHORT, "prompt": WORDS, "max_tokens": 200}
    for body in (long, {**long, "stream": True}):
        client = connect(server)
        client.sendall(request(body))
        client.close()
        half = connect(server)
        half.sendall(request(body))
        half.shutdown(socket.SHUT_WR)  # asks to be read no further: gone, as for most servers
        read_to_end(half)
    partial = connect(server)
    partial.sendall(request(long)[:-10])
    partial.close()
    wait_until(lambda: server.metrics()["http_requests_in_flight"] == 1, 20)
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert not [each for each in server.log if each["level"] not in ("info", "warning")]
    left = [each for each in server.log if each.get("status") == 499]
    assert len(left) >= 5
    assert not [each for each in left if "error" in each]


@pytest.mark.parametrize(
    ("content", "headers", "status", "code"),
    [
        (b"x" * 8_000_000, (), b"413", b"request_too_large"),
        (b"x" * 3_000_000, ("Content-Encoding: gzip",), b"415", b"unsupported_content_encoding"),
    ],
)
def test_an_answer_to_a_body_that_nobody_wants_is_not_taken_back(
    server: Served, content: bytes, headers: tuple[str, ...], status: bytes, code: bytes
) -> None:
    """Closing with bytes unread would reset the connection, and the client lose the answer."""
    for _ in range(5):
        with connect(server) as client:
            client.sendall(raw_request(content, "Connection: close", *headers))
            found = b""
            while piece := client.recv(65536):  # raises when the connection is reset
                found += piece
        assert found.split()[1] == status
        assert code in found
    started = time.monotonic()
    with connect(server) as client:
        client.sendall(raw_request(content, "Connection: close", *headers)[: len(content) // 2])
        assert read_to_end(client).split()[1] == status
        assert time.monotonic() - started < 10
    wait_until(lambda: server.get("/health").status_code == 200)
