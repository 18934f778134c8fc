"""Files and batches as OpenAI's client uses them, over a real server and engine process."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from lockstep.server.batches import routes
from tests.server.support import ServerThread, fake_llm, wait_until

ENDED = ("completed", "failed", "cancelled", "expired")
COMPLETIONS = "/v1/completions"


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    body = {"model": "parrot", "max_tokens": 40, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(*lines: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def upload(client: openai.OpenAI, data: bytes, name: str = "in.jsonl") -> str:
    return client.files.create(file=(name, data), purpose="batch").id


def start(client: openai.OpenAI, data: bytes, endpoint: Any = COMPLETIONS, **extra: Any) -> Batch:
    return client.batches.create(
        input_file_id=upload(client, data), endpoint=endpoint, completion_window="24h", **extra
    )


def finish(client: openai.OpenAI, batch_id: str, seconds: float = 30) -> Batch:
    batch = client.batches.retrieve(batch_id)

    def ended() -> bool:
        nonlocal batch
        batch = client.batches.retrieve(batch_id)
        return batch.status in ENDED

    wait_until(ended, seconds)
    return batch


def content(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(text) for text in client.files.content(file_id).text.splitlines()]


def connect(server: ServerThread, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=30)


# --- files ---------------------------------------------------------------------------------


def test_a_file_is_uploaded_listed_read_and_deleted(client: openai.OpenAI) -> None:
    data = bytes(range(256)) * 300 + "é\r\n--boundary\r\n".encode()
    made = client.files.create(file=("../../ä b.jsonl", data), purpose="batch")
    assert made.bytes == len(data)
    assert made.filename == "ä b.jsonl"
    assert (made.object, made.purpose, made.status) == ("file", "batch", "processed")
    assert abs(made.created_at - time.time()) < 5
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == data
    assert made in list(client.files.list(purpose="batch"))
    assert made not in list(client.files.list(purpose="batch_output"))
    deleted = client.files.delete(made.id)
    assert (deleted.id, deleted.deleted) == (made.id, True)
    with pytest.raises(openai.NotFoundError) as caught:
        client.files.retrieve(made.id)
    assert caught.value.code == "file_not_found"
    for ask in (client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)


def test_files_come_in_pages(client: openai.OpenAI) -> None:
    made = [upload(client, b"x", f"{number}.jsonl") for number in range(5)]
    newest_first = [each.id for each in client.files.list(limit=2)]  # the client turns the pages
    assert [each for each in newest_first if each in made] == made[::-1]
    oldest_first = [each.id for each in client.files.list(limit=3, order="asc", after=made[1])]
    assert [each for each in oldest_first if each in made] == made[2:]
    page = client.files.list(limit=1)
    assert page.has_next_page()


def test_a_file_may_expire(client: openai.OpenAI) -> None:
    made = client.files.create(
        file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert made.expires_at == made.created_at + 3600
    with pytest.raises(openai.BadRequestError) as caught:
        client.files.create(
            file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 5}
        )
    assert caught.value.param == "expires_after[seconds]"


@pytest.mark.parametrize(
    ("files", "data", "param"),
    [
        ({"file": ("f", b"x")}, {"purpose": "fine-tune"}, "purpose"),
        ({"file": ("f", b"x")}, {}, "purpose"),
        ({"other": ("f", b"x")}, {"purpose": "batch"}, "file"),
        ({"file": ("f", b"x")}, {"purpose": "batch", "colour": "red"}, "colour"),
        ({"file": ("f", b"x")}, {"purpose": "batch" * 2000}, "purpose"),
        ([("file", ("f", b"x")), ("file", ("g", b"y"))], {"purpose": "batch"}, "file"),
        ({f"part{n}": ("f", b"x") for n in range(40)}, {}, "file"),
    ],
)
def test_a_wrong_form_is_told(http: httpx.Client, files: Any, data: Any, param: str) -> None:
    response = http.post("/v1/files", files=files, data=data)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/json", b'{"purpose": "batch"}'),
        ("multipart/form-data", b"--x\r\n\r\n--x--"),
        ("multipart/form-data; boundary=x", b""),
        (
            "multipart/form-data; boundary=x",
            b"--x\r\nContent-Disposition: form-data\r\n\r\na\r\n--x--",
        ),
        ("multipart/form-data; boundary=x", b"--y\r\n\r\na\r\n--y--\r\n"),
        ("multipart/form-data; boundary=" + "x" * 500, b"--x"),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nhalf',
        ),
    ],
)
def test_a_broken_form_is_a_400_and_leaves_nothing(
    parrot_server: ServerThread, http: httpx.Client, kind: str, body: bytes
) -> None:
    before = http.get("/v1/files").json()
    response = http.post("/v1/files", content=body, headers={"Content-Type": kind})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "file"
    assert http.get("/v1/files").json() == before


def test_an_upload_has_a_limit_of_its_own_and_leaves_nothing(tmp_path: Path) -> None:
    """Larger than a request body may be, and 413 above its own limit, announced or not."""
    limit = 300_000
    with (
        ServerThread(
            fake_llm, data_dir=str(tmp_path), max_body_bytes=2000, max_file_bytes=limit
        ) as server,
        connect(server) as client,
    ):
        assert client.files.create(file=b"x" * limit, purpose="batch").bytes == limit
        for size in (limit + 1, 3 * limit):
            with pytest.raises(openai.APIStatusError) as caught:
                client.files.create(file=b"x" * size, purpose="batch")
            assert caught.value.status_code == 413

        def chunks() -> Iterator[bytes]:
            yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
            for _ in range(100):
                yield b"y" * 10_000

        headers = {"Content-Type": "multipart/form-data; boundary=x"}
        response = httpx.post(f"{server.url}/v1/files", content=chunks(), headers=headers)
        assert response.status_code == 413
        assert list((tmp_path / "tmp").iterdir()) == []
        assert len(list((tmp_path / "files").iterdir())) == 1


def test_a_client_that_leaves_in_the_middle_of_an_upload_leaves_nothing(tmp_path: Path) -> None:
    with ServerThread(fake_llm, data_dir=str(tmp_path)) as server:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
        connection.putrequest("POST", "/v1/files")
        connection.putheader("Content-Type", "multipart/form-data; boundary=x")
        connection.putheader("Content-Length", "5000000")
        connection.endheaders()
        connection.send(b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\n' + b"y" * 3000)
        wait_until(lambda: any((tmp_path / "tmp").iterdir()))
        connection.close()
        wait_until(lambda: not any((tmp_path / "tmp").iterdir()))
        assert httpx.get(f"{server.url}/v1/files").json()["data"] == []


def test_a_disk_without_room_is_a_507(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "RESERVE_BYTES", 1 << 62)
    with pytest.raises(openai.InternalServerError) as caught:
        upload(client, b"x")
    assert caught.value.status_code == 507
    assert caught.value.code == "storage_unavailable"


@pytest.mark.parametrize("file_id", ["..", "%2e%2e%2findex.sqlite3", "file-..%2f..", "x" * 3000])
def test_ids_cannot_leave_the_directory(http: httpx.Client, file_id: str) -> None:
    for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content"):
        assert http.get(path).status_code == 404
    assert http.get(f"/v1/batches/{file_id}").status_code == 404


# --- batches -------------------------------------------------------------------------------


def test_a_batch_answers_every_line(client: openai.OpenAI) -> None:
    good = [line(f"r{number}", prompt=f"say {number} é") for number in range(30)]
    bad = [
        line("wrong", prompt="x", temperature=-1),
        line("other model", prompt="x", model="gpt"),
        line("streamed", prompt="x", stream=True),
        {**line("get", prompt="x"), "method": "GET"},
        line("r3", prompt="again"),
    ]
    batch = start(client, jsonl(*good, *bad) + b"{broken\n", metadata={"team": "search"})
    assert batch.object == "batch"
    assert batch.status == "validating"
    assert batch.expires_at == batch.created_at + 24 * 3600
    batch = finish(client, batch.id)
    assert batch.status == "completed"
    assert batch.metadata == {"team": "search"}
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 36, "completed": 30, "failed": 6}
    rows = content(client, batch.output_file_id)
    assert [row["custom_id"] for row in rows] == [each["custom_id"] for each in good]
    for number, row in enumerate(rows):
        assert row["error"] is None
        assert row["response"]["status_code"] == 200
        assert row["response"]["body"]["choices"][0]["text"] == f"say {number} é"
    direct = client.completions.create(model="parrot", prompt="say 3 é", max_tokens=40)
    body = rows[3]["response"]["body"]
    assert body["choices"][0] == direct.model_dump()["choices"][0]
    errors = {row["custom_id"]: row for row in content(client, batch.error_file_id)}
    assert errors["wrong"]["response"]["status_code"] == 400
    assert errors["wrong"]["response"]["body"]["error"]["param"] == "temperature"
    assert errors["other model"]["response"]["status_code"] == 404
    assert errors["streamed"]["error"]["code"] == "unsupported_parameter"
    assert errors["get"]["error"]["code"] == "invalid_method"
    assert errors["r3"]["error"]["code"] == "duplicate_custom_id"
    assert errors[None]["error"]["line"] == 36
    assert batch.usage is not None
    assert batch.usage.output_tokens == sum(
        row["response"]["body"]["usage"]["completion_tokens"] for row in rows
    )
    found = next(each for each in client.batches.list() if each.id == batch.id)
    assert found == batch
    output = client.files.retrieve(batch.output_file_id or "")
    assert output.purpose == "batch_output"
    assert output.filename == f"{batch.id}_output.jsonl"


def test_chat_in_a_batch(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "hello there"}]
    url = "/v1/chat/completions"
    batch = start(client, jsonl(line("c", url, messages=messages)), endpoint=url)
    batch = finish(client, batch.id)
    (row,) = content(client, batch.output_file_id)
    direct = client.chat.completions.create(model="parrot", messages=messages, max_tokens=40)  # type: ignore[arg-type]
    text = direct.choices[0].message.content
    assert row["response"]["body"]["choices"][0]["message"]["content"] == text
    assert batch.error_file_id is None
    assert batch.model == "parrot"


def test_every_route_with_a_json_body_is_an_endpoint(
    parrot_server: ServerThread, http: httpx.Client
) -> None:
    response = http.post(
        "/v1/batches",
        json={"input_file_id": "f", "endpoint": "/v1/none", "completion_window": "24h"},
    )
    told = response.json()["error"]["message"]
    paths = http.get("/openapi.json").json()["paths"]
    posts = {path for path, methods in paths.items() if "post" in methods}
    for path in posts:
        batchable = path.startswith("/v1/") and "{" not in path
        batchable = batchable and path not in ("/v1/files", "/v1/batches")
        assert (f" {path}," in told) == batchable, path


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"endpoint": "/v1/files"}, "endpoint"),
        ({"endpoint": "/v1/batches"}, "endpoint"),
        ({"endpoint": None}, "endpoint"),
        ({"completion_window": "never"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"metadata": {"k": 1}}, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: ""}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
        ({"unknown": 1}, "unknown"),
        ({"input_file_id": 5}, "input_file_id"),
        ({"input_file_id": "\ud800"}, "input_file_id"),
        ({"endpoint": "\ud800"}, "endpoint"),
        ({"completion_window": "\ud800"}, "completion_window"),
        ({"completion_window": "٣h"}, "completion_window"),
        ({"metadata": {"k": "\ud800"}}, "metadata"),
        ({"metadata": {"\ud800": "v"}}, "metadata"),
        ({"\ud800": 1}, None),
    ],
)
def test_a_wrong_batch_names_the_field(
    client: openai.OpenAI, http: httpx.Client, changes: dict[str, Any], param: str | None
) -> None:
    body = {
        "input_file_id": upload(client, jsonl(line("a", prompt="x"))),
        "endpoint": COMPLETIONS,
        "completion_window": "24h",
        **changes,
    }
    response = http.post(
        "/v1/batches", content=json.dumps(body), headers={"Content-Type": "application/json"}
    )
    assert response.status_code in (400, 404), response.text
    assert response.json()["error"]["param"] == param


def test_an_input_that_is_not_there_is_a_404(client: openai.OpenAI) -> None:
    for file_id in ("file-0123456789abcdef01234567", "../index.sqlite3"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.batches.create(
                input_file_id=file_id, endpoint=COMPLETIONS, completion_window="24h"
            )
        assert caught.value.param == "input_file_id"


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("files?limit=0", "limit"),
        ("files?limit=10001", "limit"),
        ("files?order=up", "order"),
        ("files?after=x", "after"),
        ("batches?limit=101", "limit"),
        ("batches?after=file-0", "after"),
    ],
)
def test_a_wrong_query_names_the_field(http: httpx.Client, query: str, param: str) -> None:
    response = http.get(f"/v1/{query}")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_batches_come_in_pages(client: openai.OpenAI) -> None:
    made = [start(client, jsonl(line("a", prompt="x"))).id for _ in range(5)]
    found = [each.id for each in client.batches.list(limit=2)]
    assert [each for each in found if each in made] == made[::-1]
    assert client.batches.list(after=made[2], limit=1).data[0].id == made[1]
    for batch_id in made:
        assert finish(client, batch_id).status == "completed"


def test_a_file_without_requests_fails_the_batch(client: openai.OpenAI) -> None:
    batch = finish(client, start(client, b'{"custom_id": "a"}\nnothing\n').id)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert [(each.code, each.line) for each in batch.errors.data or []] == [
        ("missing_parameter", 1),
        ("invalid_json", 2),
    ]
    with pytest.raises(openai.BadRequestError) as caught:
        client.batches.cancel(batch.id)
    assert caught.value.code == "batch_not_cancellable"


# --- beside other work ---------------------------------------------------------------------


WORDS = "one two three four five six seven eight nine ten " * 3


@pytest.fixture(scope="module")
def slow_server() -> Iterator[ServerThread]:
    """A parrot that takes 30 ms a step and four sequences at once."""
    with ServerThread(lambda: fake_llm("slow", max_sequences=4)) as server:
        yield server


@pytest.fixture
def slow(slow_server: ServerThread) -> Iterator[openai.OpenAI]:
    with connect(slow_server) as client:
        yield client


@pytest.mark.parametrize("priority", [0, -(2**31 - 1)])
def test_clients_come_before_a_batch_whatever_it_says(
    slow_server: ServerThread, slow: openai.OpenAI, priority: int
) -> None:
    body = {"prompt": WORDS * 4, "max_tokens": 100, "model": "slow", "priority": priority}
    batch = start(slow, jsonl(*(line(str(number), **body) for number in range(60))))
    wait_until(lambda: slow_server.llm.stats().running == 4)  # for three seconds to come
    for _ in range(3):
        began = time.monotonic()
        slow.completions.create(model="slow", prompt="hello", max_tokens=3)
        assert time.monotonic() - began < 0.8, "a few steps, whatever runs and waits"
    now = slow.batches.retrieve(batch.id)
    assert now.status == "in_progress"
    assert now.request_counts is not None
    assert now.request_counts.total == 60
    with pytest.raises(openai.BadRequestError) as caught:
        slow.files.delete(batch.input_file_id)
    assert caught.value.code == "file_in_use"
    assert slow.batches.cancel(batch.id).status == "cancelling"
    batch = finish(slow, batch.id, 10)
    assert batch.status == "cancelled"
    wait_until(lambda: slow_server.llm.stats().running == 0)
    done, left = content(slow, batch.output_file_id), content(slow, batch.error_file_id)
    assert len(done) + len(left) == 60
    assert {row["error"]["code"] for row in left} == {"batch_cancelled"}


def test_a_short_batch_does_not_wait_for_a_long_one(slow: openai.OpenAI) -> None:
    many = [line(str(number), prompt=WORDS, model="slow") for number in range(80)]
    long = start(slow, jsonl(*many))
    wait_until(lambda: _completed(slow, long.id) >= 1)
    short = start(slow, jsonl(line("a", prompt="hello", model="slow")))
    assert finish(slow, short.id, 5).status == "completed"
    assert slow.batches.retrieve(long.id).status == "in_progress"
    slow.batches.cancel(long.id)
    finish(slow, long.id)


def test_the_window_ends(slow: openai.OpenAI) -> None:
    many = [line(str(number), prompt=WORDS, model="slow") for number in range(80)]
    batch = slow.batches.create(
        input_file_id=upload(slow, jsonl(*many)),
        endpoint=COMPLETIONS,
        completion_window="2s",  # type: ignore[arg-type]
        output_expires_after={"anchor": "created_at", "seconds": 3600},
    )
    batch = finish(slow, batch.id, 10)
    assert batch.status == "expired"
    rows = content(slow, batch.error_file_id)
    assert rows[-1]["error"]["code"] == "batch_expired"
    assert len(rows) + len(content(slow, batch.output_file_id)) == 80
    kept = slow.files.retrieve(batch.error_file_id or "")
    assert kept.expires_at == kept.created_at + 3600


def _completed(client: openai.OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    return counts.completed if counts is not None else 0


# --- whose -----------------------------------------------------------------------------------


def test_keys_see_their_own_files_and_batches_only(tmp_path: Path) -> None:
    keys = ("first-key", "second-key")
    with ServerThread(fake_llm, data_dir=str(tmp_path), api_keys=keys) as server:
        with connect(server, keys[0]) as mine, connect(server, keys[1]) as other:
            batch = finish(mine, start(mine, jsonl(line("a", prompt="x"))).id)
            assert batch.status == "completed"
            files = [batch.input_file_id, batch.output_file_id or ""]
            assert [each.id for each in mine.files.list()] == files[::-1]
            assert list(other.files.list()) == []
            assert list(other.batches.list()) == []
            for file_id in files:
                for ask in (other.files.retrieve, other.files.content, other.files.delete):
                    with pytest.raises(openai.NotFoundError):
                        ask(file_id)
            for ask_batch in (other.batches.retrieve, other.batches.cancel):
                with pytest.raises(openai.NotFoundError):
                    ask_batch(batch.id)
            with pytest.raises(openai.NotFoundError):
                other.batches.create(
                    input_file_id=files[0], endpoint=COMPLETIONS, completion_window="24h"
                )
            assert len(content(mine, batch.output_file_id)) == 1
        with connect(server, "no-key") as nobody, pytest.raises(openai.AuthenticationError):
            nobody.files.list()


def test_a_response_of_a_line_is_its_keys_own() -> None:
    keys = ("first-key", "second-key")
    body = {"model": "parrot", "input": "one two"}
    row = {"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": body}
    with (
        ServerThread(fake_llm, api_keys=keys) as server,
        connect(server, keys[0]) as mine,
        connect(server, keys[1]) as other,
    ):
        batch = finish(mine, start(mine, jsonl(row), endpoint="/v1/responses").id)
        (answer,) = content(mine, batch.output_file_id)
        response_id = answer["response"]["body"]["id"]
        assert mine.responses.retrieve(response_id).id == response_id
        with pytest.raises(openai.NotFoundError):
            other.responses.retrieve(response_id)


# --- faults of the engine --------------------------------------------------------------------


@pytest.mark.slow
def test_the_engine_is_killed_under_a_batch_and_no_line_is_lost() -> None:
    with (
        ServerThread(lambda: fake_llm("slow"), batch_concurrency=10) as server,
        connect(server) as client,
    ):
        many = [
            line(str(number), prompt=f"{number} one two three", model="slow")
            for number in range(100)
        ]
        batch = start(client, jsonl(*many))
        for kills, done in enumerate((1, 40)):
            wait_until(lambda kills=kills: server.llm.client.restarts == kills)
            wait_until(lambda done=done: _completed(client, batch.id) >= done)
            pid = server.llm.client.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        batch = finish(client, batch.id, 60)
        assert server.llm.client.restarts == 2
        assert batch.status == "completed"
        rows = content(client, batch.output_file_id)
        assert [row["custom_id"] for row in rows] == [str(number) for number in range(100)]
        assert all(
            row["response"]["body"]["choices"][0]["text"] == f"{number} one two three"
            for number, row in enumerate(rows)
        )
        assert batch.error_file_id is None


@pytest.mark.slow
def test_a_line_that_kills_the_engine_gets_an_error_and_the_others_their_answer() -> None:
    with ServerThread(lambda: fake_llm("kills")) as server, connect(server) as client:
        lines = [line(str(number), prompt=f"say {number}", model="kills") for number in range(20)]
        lines.insert(7, line("poison", prompt=[14, 500], model="kills"))
        batch = finish(client, start(client, jsonl(*lines)).id, 60)
        assert batch.status == "completed"
        (row,) = content(client, batch.error_file_id)
        assert row["custom_id"] == "poison"
        assert row["response"]["status_code"] == 503
        assert len(content(client, batch.output_file_id)) == 20
        wait_until(lambda: server.llm.client.restarts == 4)
