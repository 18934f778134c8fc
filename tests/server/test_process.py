"""The engine process: start-up, failures, death, restart, and who ends whom."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from lockstep.async_llm import AsyncLLM
from lockstep.config import ConfigError
from lockstep.engine.client import EngineStartError, EngineState, EngineUnavailable
from lockstep.llm import GenerationError
from lockstep.server import create_app
from lockstep.types import FinishReason, ModelError, RequestError, SamplingParams
from tests.server.support import ServerThread, alive, fake_client, fake_llm, wait_until

TOKENS = SamplingParams(max_tokens=40)
WORDS = "one two three four five six seven eight nine ten " * 4
CRASH = 14  # see tests.server.support.make_engine
HANG = 15
FAIL = 13


async def test_progress_then_ready_then_answers() -> None:
    seen: list[tuple[str, float]] = []
    llm = fake_llm()
    info = await llm.start(lambda stage, done: seen.append((stage, done)))
    assert ("loading", 0.5) in seen
    assert info.vocab_size == 49152
    assert (await llm.generate("hello there")).text == "hello there"
    await llm.close()
    await llm.close()
    with pytest.raises(EngineUnavailable, match="closed"):
        await llm.generate("x")


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("refuses", ModelError, "model.norm.weight is missing"),
        ("raises", EngineStartError, "RuntimeError: no such device"),
        ("dies", EngineStartError, "killed by SIGKILL.* while loading"),
    ],
)
async def test_a_failed_start_says_why(name: str, error: type[Exception], text: str) -> None:
    client = fake_client(name)
    with pytest.raises(error, match=text):
        await client.start()
    assert client.state is EngineState.CLOSED


async def test_a_config_error_keeps_its_kind() -> None:
    client = fake_client("parrot", max_context=100_000)
    with pytest.raises(ConfigError, match="100000"):
        await client.start()


async def test_private_directory_and_no_leftovers() -> None:
    client = fake_client()
    await client.start()
    (folder,) = [path for path in (client._directory,) if path is not None]
    assert folder.stat().st_mode & 0o777 == 0o700
    pid = client.pid
    assert pid is not None
    await client.close()
    assert not folder.exists()
    assert not alive(pid)


async def test_the_engine_ignores_ctrl_c_and_has_a_name() -> None:
    llm = fake_llm()
    await llm.start()
    pid = llm.client.pid
    assert pid is not None
    os.kill(pid, signal.SIGINT)
    assert (await llm.generate("still here")).text == "still here"
    assert llm.client.restarts == 0
    assert Path(f"/proc/{pid}/comm").read_text().strip() == "lockstep-engine"
    await llm.close()


async def test_death_fails_what_was_in_flight_and_the_engine_comes_back() -> None:
    llm = fake_llm("slow")
    await llm.start()
    tasks = [asyncio.create_task(llm.generate(WORDS, TOKENS)) for _ in range(3)]
    while llm.stats().generated_tokens < 6:
        await asyncio.sleep(0.01)
    assert llm.client.pid is not None
    os.kill(llm.client.pid, signal.SIGKILL)
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
    for result in results:
        assert isinstance(result, EngineUnavailable)
        assert "SIGKILL" in str(result)
        assert result.retry_after is not None
    with pytest.raises(EngineUnavailable, match="restarting"):
        await llm.generate("too early")
    while llm.client.state is not EngineState.READY:
        await asyncio.sleep(0.02)
    assert llm.client.restarts == 1
    assert (await llm.generate("back again")).text == "back again"
    await llm.close()


async def test_a_request_that_kills_the_engine_fails_alone_the_second_time() -> None:
    llm = fake_llm("kills")
    await llm.start()
    with pytest.raises(EngineUnavailable):
        await llm.generate([CRASH, 500, 501])
    while llm.client.state is not EngineState.READY:
        await asyncio.sleep(0.02)
    assert (await llm.generate("fine")).text == "fine"
    await llm.close()


async def test_a_defect_in_reading_fails_what_was_in_flight_and_recovers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever goes wrong while reports are read, nobody waits for ever."""
    llm = fake_llm()
    await llm.start()
    client = llm.client

    def broken(report: object) -> None:
        monkeypatch.undo()
        raise KeyError("a defect")

    monkeypatch.setattr(client, "_deliver", broken)
    with pytest.raises(EngineUnavailable, match="a defect"):
        await asyncio.wait_for(llm.generate("hello"), 10)
    while client.state is not EngineState.READY:
        await asyncio.sleep(0.02)
    assert (await llm.generate("hello again")).text == "hello again"
    await llm.close()


async def test_a_message_that_cannot_be_sent_leaves_nothing_behind() -> None:
    llm = fake_llm()
    await llm.start()
    request = llm.builder.build([1, 2, 3], TOKENS)
    with pytest.raises(OverflowError):
        await llm.client.submit(replace(request, priority=2**80))
    assert not llm.client._queues
    assert (await llm.generate("still here")).text == "still here"
    await llm.close()


async def test_a_silent_engine_with_work_is_restarted() -> None:
    llm = fake_llm("hangs", hang_seconds=1.0)
    await llm.start()
    await asyncio.sleep(1.5)  # idle silence is no hang: heartbeats tell
    assert llm.client.restarts == 0
    with pytest.raises(EngineUnavailable, match="said nothing"):
        await asyncio.wait_for(llm.generate([HANG, 500]), 10)
    while llm.client.state is not EngineState.READY:
        await asyncio.sleep(0.02)
    assert (await llm.generate("fine")).text == "fine"
    await llm.close()


async def test_a_failing_step_ends_its_own_request_only() -> None:
    llm = fake_llm("fails")
    await llm.start()
    with pytest.raises(GenerationError, match="told to fail") as caught:
        await llm.generate([FAIL, 500, 501])
    assert caught.value.completions[0].finish_reason is FinishReason.ERROR
    assert (await llm.generate("fine")).text == "fine"
    assert llm.client.restarts == 0
    assert llm.stats().failed == 1
    await llm.close()


async def test_cancelling_a_task_cancels_the_sequence() -> None:
    llm = fake_llm("slow")
    await llm.start()
    task = asyncio.create_task(llm.generate(WORDS, TOKENS))
    while not llm.stats().generated_tokens:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async for delta in llm.stream(WORDS, TOKENS):
        assert delta.text
        break  # leaving the loop cancels as well, once the generator is collected
    for _ in range(100):
        await asyncio.sleep(0.02)
        if llm.stats().cancelled == 2:
            break
    assert llm.stats().cancelled == 2
    assert llm.stats().pages_used == 0
    await llm.close()


async def test_the_queue_limit_is_told_with_its_code() -> None:
    llm = fake_llm("slow", max_queue=1, max_sequences=1)
    await llm.start()
    tasks = [asyncio.create_task(llm.generate(WORDS, TOKENS)) for _ in range(6)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [result for result in results if isinstance(result, RequestError)]
    assert refused
    assert {error.code for error in refused} == {"queue_full"}
    assert len(refused) < 6
    await llm.close()


def test_a_parent_that_is_killed_leaves_no_orphan(repository: Path) -> None:
    script = (
        "import asyncio\n"
        "from tests.server.support import fake_client\n"
        "async def main():\n"
        "    client = fake_client()\n"
        "    await client.start()\n"
        "    print(client.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=repository, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not alive(child), 5.0)


def test_the_server_says_503_while_the_engine_is_away() -> None:
    with ServerThread(lambda: fake_llm("slow")) as server:
        ask = {"model": "slow", "prompt": WORDS, "max_tokens": 40}
        pid = server.llm.client.pid
        assert pid is not None
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json={**ask, "stream": True}, timeout=20
        ) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            os.kill(pid, signal.SIGKILL)
            rest = list(lines)
        assert any('"error"' in line and "SIGKILL" in line for line in rest)
        assert "data: [DONE]" in rest
        away = httpx.post(f"{server.url}/v1/completions", json=ask, timeout=20)
        ready = httpx.get(f"{server.url}/ready")
        for reply in (away, ready):
            assert reply.status_code == 503
            assert int(reply.headers["retry-after"]) >= 1
            assert reply.json()["error"]["code"] == "engine_unavailable"
        assert httpx.get(f"{server.url}/health").json()["engine"] == "restarting"
        wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 200)
        back = httpx.post(f"{server.url}/v1/completions", json={**ask, "prompt": "back"})
        assert back.json()["choices"][0]["text"] == "back"


async def test_before_the_engine_is_ready_every_route_says_503() -> None:
    app = create_app(AsyncLLM.from_client(fake_client()))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        chat = {"model": "parrot", "messages": [{"role": "user", "content": "x"}]}
        replies = [
            await http.get("/ready"),
            await http.get("/stats"),
            await http.get("/v1/models"),
            await http.post("/v1/completions", json={"model": "parrot", "prompt": "x"}),
            await http.post("/v1/chat/completions", json=chat),
            # Nobody knows yet whether there is such a branch.
            await http.post("/v1/classify", json={"model": "judge", "input": "x"}),
        ]
        assert (await http.get("/health")).status_code == 200
    for reply in replies:
        assert reply.status_code == 503
        assert int(reply.headers["retry-after"]) >= 1
        assert "not started yet" in reply.json()["error"]["message"]


def test_the_server_process_imports_no_torch(repository: Path) -> None:
    script = (
        "import sys\n"
        "import lockstep.server, lockstep.server.serve, lockstep.async_llm, lockstep.llm\n"
        "import lockstep.engine.client, lockstep.cli.main\n"
        "from lockstep.weights import open_checkpoint\n"
        "open_checkpoint('smollm2').tokenizer()\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], cwd=repository, check=False)
    assert done.returncode == 0
    assert time.monotonic() - began < 20
