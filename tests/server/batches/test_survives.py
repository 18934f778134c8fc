"""A server killed with SIGKILL, one that is told to stop, two on one directory; and memory."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.batches.parrot_process import ServerProcess
from tests.server.support import wait_until

URL = "/v1/completions"


def lines(count: int, model: str, **body: Any) -> bytes:
    rows = (
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": URL,
            "body": {"model": model, "prompt": f"{number} one two", "max_tokens": 30, **body},
        }
        for number in range(count)
    )
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@contextmanager
def running(
    model: str, folder: Path, **settings: int
) -> Iterator[tuple[ServerProcess, openai.OpenAI]]:
    server = ServerProcess(model, folder, **settings)
    try:
        with openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30
        ) as client:
            yield server, client
    finally:
        if server.process.poll() is None:
            server.kill()


def completed(client: openai.OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    return counts.completed if counts is not None else 0


def check(client: openai.OpenAI, batch_id: str, count: int) -> None:
    wait_until(lambda: client.batches.retrieve(batch_id).status == "completed", 60)
    batch = client.batches.retrieve(batch_id)
    rows = client.files.content(batch.output_file_id or "").text.splitlines()
    found = [json.loads(row) for row in rows]
    assert [row["custom_id"] for row in found] == [f"line-{number}" for number in range(count)]
    for number, row in enumerate(found):
        assert row["response"]["body"]["choices"][0]["text"] == f"{number} one two"
    assert batch.error_file_id is None


@pytest.mark.slow
def test_killed_again_and_again_no_line_is_lost_and_none_is_twice(tmp_path: Path) -> None:
    with running("slow", tmp_path, batch_concurrency=6) as (server, client):
        file = client.files.create(file=lines(60, "slow"), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")
        wait_until(lambda: completed(client, batch.id) >= 10)
        server.kill()
    journal = tmp_path / "journals" / batch.id
    kept = journal.read_bytes().count(b"\n")
    assert 10 <= kept < 60
    with running("slow", tmp_path, batch_concurrency=6) as (server, client):
        wait_until(lambda: completed(client, batch.id) >= kept + 10)
        assert server.stop() == 0, server.said
    again = journal.read_bytes().count(b"\n")
    assert kept + 10 <= again < 60
    with running("slow", tmp_path) as (server, client):
        wait_until(lambda: completed(client, batch.id) >= again)
        check(client, batch.id, 60)
        assert client.files.retrieve(file.id).bytes == file.bytes


def test_two_servers_cannot_share_a_directory(tmp_path: Path) -> None:
    with running("parrot", tmp_path) as (first, client):
        second = ServerProcess("parrot", tmp_path)
        assert second.url == ""
        assert second.close() == 1
        (said,) = second.said.strip().splitlines()
        assert re.match(
            rf"error: data_dir .* in use by another server \(process {first.process.pid}\)", said
        )
        client.batches.list()  # the first one does not mind


@pytest.mark.slow
def test_memory_does_not_grow_with_the_lines(tmp_path: Path) -> None:
    """Ten times the lines and 20 MB more of them; the server's peak stays."""
    with running("parrot", tmp_path) as (server, client):
        peaks = []
        for count in (500, 5000):
            data = lines(count, "parrot", user="x" * 4000)
            Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")  # the peak starts anew
            file = client.files.create(file=data, purpose="batch")
            began = time.monotonic()
            batch = client.batches.create(
                input_file_id=file.id, endpoint=URL, completion_window="24h"
            )
            check(client, batch.id, count)
            print(f"{count / (time.monotonic() - began):.0f} lines/s")
            status = Path(f"/proc/{server.process.pid}/status").read_text()
            (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", status)
            peaks.append(int(peak) / 1024)
        print(f"peaks: {peaks} MiB")
        assert peaks[1] - peaks[0] < 8
