"""Whatever is wrong, the error names it in one shape, with a code, and under the request's id."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from lockstep.config import ConfigError
from lockstep.server.status import Throughput
from lockstep.settings import engine_config
from tests.server.support import ServerThread, fake_llm

JSON = {"Content-Type": "application/json"}


def pieces(size: int) -> Iterator[bytes]:
    """A body without a declared length."""
    yield b'{"model": "parrot", "prompt": "'
    for _ in range(size // 1000):
        yield b"x" * 1000
    yield b'"}'


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        (b"", 400, "invalid_type"),
        (b"[" * 50_000, 400, "invalid_json"),
        (b'{"a":' * 15_000, 400, "invalid_json"),
        (b'{"model": "parrot", "prompt": "\xff\xfe"}', 400, "invalid_json"),
        (b'{"model": "parrot", "prompt": "x", "seed": 1' + b"0" * 5000 + b"}", 400, "invalid_json"),
        (b'{"model": "parrot", "prompt": "' + b"x" * 200_000 + b'"}', 413, "request_too_large"),
        (pieces(200_000), 413, "request_too_large"),
    ],
    ids=["cut", "empty", "lists", "objects", "no utf-8", "huge integer", "declared", "chunked"],
)
def test_unreadable_bodies_have_a_code(
    http: httpx.Client, content: bytes | Iterator[bytes], status: int, code: str
) -> None:
    reply = http.post("/v1/completions", content=content, headers=JSON)
    assert reply.status_code == status
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert len(error["message"]) < 300
    assert reply.headers["x-request-id"]


def test_paths_and_methods_have_a_code(http: httpx.Client) -> None:
    for method, path, status, code in (
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("GET", "/page/../../etc/passwd", 404, "not_found"),
    ):
        reply = http.request(method, path)
        assert reply.status_code == status, path
        assert reply.json()["error"]["code"] == code
    assert http.head("/health").status_code == 200
    assert http.head("/ready").status_code == 200


def test_a_defect_of_ours_is_a_500_with_a_code_and_the_request_id(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: Throughput, now: float, count: int) -> float:
        raise KeyError("a defect")

    monkeypatch.setattr(Throughput, "sample", broken)
    reply = http.get("/stats", headers={"x-request-id": "mine"})
    assert reply.status_code == 500
    assert reply.headers["x-request-id"] == "mine"
    assert reply.json()["error"]["code"] == "internal_error"
    assert "defect" not in reply.text, "clients learn nothing of the inside"
    assert any("GET /stats failed" in record.message for record in caplog.records)
    monkeypatch.undo()
    assert http.get("/stats").status_code == 200


def test_settings_are_named_as_they_were_given() -> None:
    with pytest.raises(ConfigError, match="cache_bytes must be at least 0, got -5"):
        engine_config("parrot", cache_bytes=-5)


def test_nothing_of_a_shared_process_leaks_between_requests() -> None:
    """The error of one call does not stand in the account of the next on the same connection."""
    with ServerThread(fake_llm) as server, httpx.Client(base_url=server.url) as client:
        for index in range(20):
            body = {"model": "parrot", "prompt": f"guest {index}", "max_tokens": 20}
            if index % 2:
                body["temperature"] = -1
            reply = client.post("/v1/completions", json=body)
            assert reply.status_code == (400 if index % 2 else 200)
        text = client.get("/metrics").text
    assert 'lockstep:http_errors_total{code="invalid_value"} 10.0' in text
    assert json.dumps("queue_full") not in text
