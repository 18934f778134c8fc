"""Request ids, logs, CORS, TLS, traces and /admin, over a real server."""

from __future__ import annotations

import io
import json
import logging
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from lockstep import logs
from lockstep.config import ConfigError, ServerConfig
from lockstep.server import tracing
from lockstep.server.serve import make_server
from tests.server.support import ServerThread, fake_llm, wait_until

ASK = {"model": "parrot", "prompt": "hello there", "max_tokens": 5}
WORDS = "one two three four five six seven eight nine ten " * 30
BOSS = {"authorization": "Bearer boss"}


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """What the log's handler writes, as JSON."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.JsonFormatter())
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield stream
    root.removeHandler(handler)
    root.setLevel(level)


def entries(stream: io.StringIO, logger: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    return [line for line in lines if line["logger"] == logger]


# --- request ids and logs -----------------------------------------------------------------


@pytest.mark.parametrize("given", ["abc-123", "a" * 128, "trace:1/2=x+y_z."])
def test_a_plain_request_id_is_kept_and_comes_back(http: httpx.Client, given: str) -> None:
    for reply in (
        http.post("/v1/completions", json=ASK, headers={"x-request-id": given}),
        http.post("/v1/completions", json={**ASK, "stream": True}, headers={"x-request-id": given}),
        http.get("/nothing", headers={"x-request-id": given}),
        http.post("/v1/completions", content="{", headers={"x-request-id": given}),
    ):
        assert reply.headers["x-request-id"] == given


@pytest.mark.parametrize("given", [None, "", "a" * 129, "two words", "é", 'x"y', "a\tb"])
def test_others_are_replaced(http: httpx.Client, given: str | None) -> None:
    headers = {} if given is None else {b"x-request-id": given.encode()}
    replies = [http.post("/v1/completions", json=ASK, headers=headers) for _ in range(2)]
    found = [reply.headers["x-request-id"] for reply in replies]
    assert all(each.startswith("req-") and len(each) == 36 for each in found)
    assert found[0] != found[1]


def test_a_line_a_request_with_times_and_tokens(written: io.StringIO) -> None:
    with ServerThread(lambda: fake_llm("slow"), api_keys=("k",)) as server:
        body = {"model": "slow", "prompt": "one two three four", "max_tokens": 9}
        headers = {"authorization": "Bearer k", "x-request-id": "mine"}
        for stream in (False, True):
            httpx.post(
                f"{server.url}/v1/completions", json={**body, "stream": stream}, headers=headers
            )
        httpx.post(f"{server.url}/v1/completions", json={**body, "n": 0}, headers=headers)
        httpx.post(f"{server.url}/v1/completions", json=body)
        httpx.get(f"{server.url}/health")
        long = {**body, "prompt": WORDS, "max_tokens": 300, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=long, headers=headers) as s:
            next(s.iter_lines())  # and hang up
        wait_until(lambda: len(entries(written, "lockstep.access")) == 5)
    whole, streamed, refused, unknown, left = entries(written, "lockstep.access")
    assert (left["status"], left["finish"]) == (200, "cancelled")
    assert left["generated_tokens"] < 100
    for line in (whole, streamed):
        assert line["request_id"] == "mine"
        assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
        assert (line["key"], line["client"]) == ("env-1", "127.0.0.1")
        assert (line["prompt_tokens"], line["generated_tokens"]) == (4, 5)
        assert line["finish"] == "stop"
        # Five steps of 30 ms.
        assert 0.028 < line["first_token_seconds"] < line["seconds"]
        assert line["seconds"] > 5 * 0.028
    assert (refused["status"], refused["error"]) == (400, "invalid_value")
    assert "prompt_tokens" not in refused
    assert (unknown["status"], unknown["error"]) == (401, "missing_api_key")
    assert "key" not in unknown


def test_no_text_of_clients_in_the_log_unless_asked(written: io.StringIO) -> None:
    secret = "Rumpelstilzchen"
    bodies: list[dict[str, Any]] = [
        {"prompt": secret},
        {"prompt": secret, "stream": True},
        {"prompt": [secret, secret], "n": 2},
        {"prompt": secret, "temperature": secret},
        {"prompt": secret, "stop": [secret] * 999},
        {"prompt": secret, secret: 1},
        {"prompt": [13, 500], "user": secret},
    ]
    with ServerThread(lambda: fake_llm("fails")) as server:
        for body in bodies:
            httpx.post(f"{server.url}/v1/completions", json={"model": "fails", **body})
        chat = [{"role": "user", "content": secret}]
        httpx.post(f"{server.url}/v1/chat/completions", json={"model": "fails", "messages": chat})
        httpx.post(f"{server.url}/v1/completions", content=f'{{"prompt": "{secret}')
        wait_until(lambda: len(entries(written, "lockstep.access")) == len(bodies) + 2)
    assert secret not in written.getvalue()
    with ServerThread(lambda: fake_llm("fails"), log_prompts=True) as server:
        body = {"model": "fails", "prompt": f"say {secret}", "max_tokens": 40, "n": 2}
        httpx.post(f"{server.url}/v1/completions", json=body, headers={"x-request-id": "one"})
        wait_until(lambda: bool(entries(written, "lockstep.prompts")))
    (line,) = entries(written, "lockstep.prompts")
    assert line["prompt"] == f"say {secret}"
    assert line["answers"] == [f"say {secret}"] * 2
    assert (line["request_id"], line["outcome"]) == ("one", "completed")


def test_a_client_cannot_forge_a_line_of_the_console_log(
    capsys: pytest.CaptureFixture[str],
) -> None:
    formatter = logs.ConsoleFormatter()
    record = logging.LogRecord(
        "lockstep.access", logging.INFO, "", 0, "GET /a\nb\x1b[31m 200", (), None
    )
    record.fields = {"path": '/a\n2026 INFO all="well"', "n": 3}
    line = formatter.format(record)
    assert "\n" not in line
    assert "\x1b" not in line
    assert r'path="/a\n2026 INFO all=\"well\""' in line
    assert line.endswith(" n=3")
    assert "\n" not in logs.JsonFormatter().format(record)


def test_both_processes_write_one_format(repository: Path) -> None:
    script = (
        "import asyncio, logging\n"
        "from lockstep import logs\n"
        "from tests.server.support import fake_client\n"
        "logs.configure('json')\n"
        "async def main():\n"
        "    try:\n"
        "        await fake_client('raises').start()\n"
        "    except Exception:\n"
        "        logging.getLogger('lockstep.server').exception('as told')\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=repository, check=True
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["logger"] for line in lines] == ["lockstep.engine", "lockstep.server"]
    assert all("no such device" in line["exception"] for line in lines)


# --- browsers -----------------------------------------------------------------------------


def test_cors_is_off_by_default(http: httpx.Client) -> None:
    headers = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    assert http.options("/v1/completions", headers=headers).status_code == 405
    reply = http.post("/v1/completions", json=ASK, headers=headers)
    assert "access-control-allow-origin" not in reply.headers


def test_cors_for_the_origins_that_are_named() -> None:
    good = "https://good.example"
    with ServerThread(fake_llm, cors_origins=(good,), api_keys=("k",)) as server:
        asked = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        url = f"{server.url}/v1/completions"
        before = httpx.options(url, headers={"origin": good, **asked})
        assert before.status_code == 200
        assert before.headers["access-control-allow-origin"] == good
        assert "authorization" in before.headers["access-control-allow-headers"]
        for headers, status in (({"authorization": "Bearer k"}, 200), ({}, 401)):
            reply = httpx.post(url, json=ASK, headers={"origin": good, **headers})
            assert reply.status_code == status
            assert reply.headers["access-control-allow-origin"] == good  # a page can read errors
            assert "x-request-id" in reply.headers["access-control-expose-headers"]
        other = {"origin": "https://good.example.evil"}
        assert httpx.options(url, headers={**other, **asked}).status_code == 400
        reply = httpx.post(url, json=ASK, headers={**other, "authorization": "Bearer k"})
        assert "access-control-allow-origin" not in reply.headers
    for origin in ("good.example", "*.example", "null"):
        with pytest.raises(ConfigError, match="cors_origins"):
            ServerConfig(cors_origins=(origin,))


# --- TLS ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def test_tls_and_client_certificates(authority: trustme.CA, tmp_path: Path) -> None:
    certificate = authority.issue_cert("127.0.0.1")
    files = {name: str(tmp_path / f"{name}.pem") for name in ("cert", "key", "ca")}
    certificate.cert_chain_pems[0].write_to_path(files["cert"])
    certificate.private_key_pem.write_to_path(files["key"])
    authority.cert_pem.write_to_path(files["ca"])
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    with ServerThread(fake_llm, tls_cert=files["cert"], tls_key=files["key"]) as server:
        assert server.url.startswith("https://127.0.0.1:")
        reply = httpx.post(f"{server.url}/v1/completions", json=ASK, verify=trusting)
        assert reply.json()["choices"][0]["text"] == "hello there"
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{server.url}/health")
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url.replace("https", "http") + "/health")
    both = {"tls_cert": files["cert"], "tls_key": files["key"], "tls_client_ca": files["ca"]}
    with ServerThread(fake_llm, **both) as server:
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{server.url}/health", verify=trusting)
        known = ssl.create_default_context()
        authority.configure_trust(known)
        authority.issue_cert("client@example.org").configure_cert(known)
        assert httpx.get(f"{server.url}/health", verify=known).status_code == 200
    for settings in (
        {"tls_cert": files["cert"]},
        {"tls_key": files["key"]},
        {"tls_client_ca": files["ca"]},
        {"tls_cert": files["cert"], "tls_key": str(tmp_path / "none.pem")},
        {"tls_cert": files["cert"], "tls_key": files["ca"]},
    ):
        with pytest.raises(ConfigError):
            make_server(fake_llm(), ServerConfig(**settings))


# --- traces -------------------------------------------------------------------------------


def test_spans_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    original = tracing.Tracer
    monkeypatch.setattr(
        "lockstep.server.operations.Tracer", lambda endpoint: original(endpoint, exporter)
    )
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with ServerThread(lambda: fake_llm("slow"), otlp_endpoint="http://nowhere.invalid") as server:
        body = {"model": "slow", "prompt": "one two three four", "max_tokens": 9}
        httpx.post(
            f"{server.url}/v1/completions",
            json=body,
            headers={"traceparent": parent, "x-request-id": "mine"},
        )
        httpx.post(f"{server.url}/v1/completions", json={**body, "n": 0})
    spans: dict[str, list[ReadableSpan]] = {}
    for span in exporter.get_finished_spans():
        spans.setdefault(span.name, []).append(span)
    good, bad = spans["POST /v1/completions"]
    assert good.context is not None
    assert good.parent is not None
    assert format(good.context.trace_id, "032x") == parent.split("-")[1]
    assert format(good.parent.span_id, "016x") == parent.split("-")[2]
    assert good.attributes is not None
    assert good.attributes["http.response.status_code"] == 200
    assert good.attributes["lockstep.request_id"] == "mine"
    assert bad.attributes is not None
    assert bad.parent is None
    assert bad.attributes["error.type"] == "invalid_value"
    (queue,), (prefill,), (decode,) = spans["queue"], spans["prefill"], spans["decode"]
    ends = [good.start_time]
    for span in (queue, prefill, decode):
        assert span.parent is not None
        assert span.parent.span_id == good.context.span_id
        assert span.start_time is not None
        assert span.end_time is not None
        assert ends[-1] is not None
        assert span.start_time >= ends[-1] - 1_000_000
        assert span.end_time >= span.start_time
        ends.append(span.end_time)
        assert span.attributes is not None
        assert span.attributes["gen_ai.usage.output_tokens"] == 5
        assert not any("one two" in str(each) for each in span.attributes.values())
    assert good.end_time is not None
    assert ends[-1] is not None
    assert good.end_time >= ends[-1]
    assert decode.end_time is not None
    assert decode.start_time is not None
    assert decode.end_time - decode.start_time > 4 * 28_000_000


def test_traces_name_the_extra_that_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"\.\[otel\]"):
        make_server(fake_llm(), ServerConfig(otlp_endpoint="http://127.0.0.1:4318"))


# --- /admin -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def operated() -> Iterator[ServerThread]:
    with ServerThread(lambda: fake_llm("slow"), admin_keys=("boss",)) as server:
        yield server


def test_what_runs_is_listed_and_can_be_ended(operated: ServerThread) -> None:
    http = httpx.Client(base_url=operated.url, headers=BOSS, timeout=30)
    replies: dict[str, httpx.Response] = {}

    def ask(name: str, **more: Any) -> threading.Thread:
        def run() -> None:
            body = {"model": "slow", "prompt": WORDS, "max_tokens": 400, **more}
            replies[name] = httpx.post(
                f"{operated.url}/v1/completions",
                json=body,
                headers={**BOSS, "x-request-id": name},
                timeout=30,
            )

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    threads = [
        ask("whole"),
        ask("streamed", stream=True),
        ask("two", prompt=[WORDS, WORDS]),
        ask("short", prompt="one two three four five six seven eight"),
    ]
    wait_until(lambda: operated.llm.stats().running == 5)
    listed = http.get("/admin/requests").json()["data"]
    assert sorted(each["request_id"] for each in listed) == [
        "short",
        "streamed",
        "two",
        "two",
        "whole",
    ]
    whole = next(each for each in listed if each["request_id"] == "whole")
    assert whole["path"] == "/v1/completions"
    assert whole["key"] == "admin-1"
    assert whole["prompt_tokens"] > 290
    wait_until(
        lambda: all(each["generated_tokens"] for each in http.get("/admin/requests").json()["data"])
    )
    assert http.post("/admin/cancel/nobody").status_code == 404
    answer = whole["id"].rpartition("-")[0]  # the id that the client's reply has
    assert http.post(f"/admin/cancel/{answer}").json() == {"cancelled": [whole["id"]]}
    assert len(http.post("/admin/cancel/two").json()["cancelled"]) == 2
    streamed = next(each["id"] for each in listed if each["request_id"] == "streamed")
    assert http.post(f"/admin/cancel/{streamed}").json() == {"cancelled": [streamed]}
    for thread in threads:
        thread.join(20)
    for name in ("whole", "two"):
        assert replies[name].status_code == 400
        error = replies[name].json()["error"]
        assert error["code"] == "request_cancelled"
        assert "operator" in error["message"]
    assert replies["streamed"].status_code == 200
    *_, last, done = [line for line in replies["streamed"].text.split("\n") if line]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_cancelled"
    assert done == "data: [DONE]"
    assert replies["short"].json()["choices"][0]["finish_reason"] == "stop", "others go on"
    wait_until(lambda: operated.llm.stats().pages_used == 0)
    assert http.get("/admin/requests").json()["data"] == []


def test_the_cache_is_counted_and_flushed(operated: ServerThread) -> None:
    http = httpx.Client(base_url=operated.url, headers=BOSS, timeout=30)
    body = {"model": "slow", "prompt": WORDS, "max_tokens": 1}
    http.post("/v1/completions", json=body)
    http.post("/v1/completions", json=body)
    wait_until(lambda: operated.llm.stats().running == 0)
    stats = http.get("/admin/cache").json()
    assert stats["hits"] > 0
    assert stats["hit_rate"] == stats["hits"] / stats["queries"]
    assert stats["pages_cached"] > 0
    assert stats["pages_used"] + stats["pages_cached"] + stats["pages_free"] == stats["pages_total"]
    assert http.post("/admin/cache/flush").json() == {"flushed": True}
    reply = http.post("/v1/completions", json=body).json()
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_remote_address_in_a_message_is_never_fetched(http: httpx.Client) -> None:
    """There is nothing here that could fetch; whatever shape it comes in, it is a 400."""
    hits: list[str] = []

    class Listener(threading.Thread):
        def __init__(self) -> None:
            super().__init__(daemon=True)
            import socket

            self.socket = socket.create_server(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}/x.png"
            self.start()

        def run(self) -> None:
            while True:
                connection, address = self.socket.accept()
                hits.append(str(address))
                connection.close()

    listener = Listener()
    for part in (
        {"type": "image_url", "image_url": {"url": listener.url}},
        {"type": "image_url", "image_url": listener.url},
        {"type": "input_image", "image_url": listener.url},
        {"type": "file", "file": {"file_data": listener.url}},
        {"type": "input_audio", "input_audio": {"data": listener.url, "format": "wav"}},
        {"type": "video_url", "video_url": {"url": listener.url}},
    ):
        messages = [{"role": "user", "content": [{"type": "text", "text": "what is it?"}, part]}]
        body = {"model": "parrot", "messages": messages}
        reply = http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 400, part
        assert reply.json()["error"]["param"] == "messages"
    assert not hits
