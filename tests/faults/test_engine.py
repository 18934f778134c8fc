"""An engine process that is stopped, hangs, or cannot start again."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from lockstep.engine.client import EngineState
from lockstep.types import FinishReason, RequestError, SamplingParams
from tests.faults.world import Asking, join, served
from tests.server.support import alive, fake_llm, wait_until

WORDS = "one two three four five six seven eight nine ten " * 30


def ask(url: str, stream: bool) -> Asking:
    body = {"model": "slow", "prompt": WORDS, "max_tokens": 200, "stream": stream}
    return Asking(url, "/v1/completions", body)


@pytest.mark.slow
def test_a_stopped_engine_is_replaced_and_a_stopped_server_blames_nobody(tmp_path: Path) -> None:
    with served(tmp_path, "slow", hang_seconds=2.0) as server:
        stopped = server.engine
        crowd = [ask(server.url, stream) for stream in (False, True)]
        wait_until(lambda: server.metrics()["num_requests_running"] == 2)
        os.kill(stopped, signal.SIGSTOP)
        wait_until(lambda: server.get("/ready").status_code == 503)
        assert server.metrics()["engine_up"] == 0
        join(crowd)
        assert [asking.status for asking in crowd] == [503, 200]
        for asking in crowd:
            error = asking.error()
            assert error is not None
            assert "said nothing for 2 s" in error["message"]
        wait_until(lambda: server.get("/ready").status_code == 200, 30)
        assert not alive(stopped)
        assert server.metrics()["engine_restarts_total"] == 1

        engine = server.engine
        asking = ask(server.url, True)
        wait_until(lambda: server.metrics()["num_requests_running"] == 1)
        server.signal(signal.SIGSTOP)
        time.sleep(3.0)
        server.signal(signal.SIGCONT)
        join([asking])
        assert asking.error() is None
        assert server.engine == engine


async def test_a_long_prompt_is_no_hang() -> None:
    """Its steps report nothing for longer than the watchdog waits, but the engine lives."""
    llm = fake_llm("slow", hang_seconds=2.0, max_chunk_tokens=4, max_step_tokens=4)
    await llm.start()
    began = time.monotonic()
    prompt = list(range(1000, 1400))
    completion = await llm.generate(prompt, SamplingParams(max_tokens=1))
    assert time.monotonic() - began > 3.0  # a hundred steps of 30 ms
    assert completion.finish_reason is FinishReason.LENGTH
    assert llm.client.restarts == 0
    await llm.close()


@pytest.mark.slow
async def test_an_engine_that_hangs_while_it_starts_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = fake_llm()
    await llm.start()
    client = llm.client
    monkeypatch.setattr("lockstep.engine.client.START_SECONDS", 2.0)
    monkeypatch.setattr(client, "_hang_seconds", 2.0)
    first = client.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    while client.pid in (first, None):
        await asyncio.sleep(0.002)
    second = client.pid
    os.kill(second, signal.SIGSTOP)
    while client.pid == second:
        await asyncio.sleep(0.02)
    monkeypatch.undo()
    assert client.restarts == 0
    while client.restarts == 0:
        await asyncio.sleep(0.02)
    assert not alive(second)
    assert (await llm.generate("back again")).text == "back again"
    await llm.close()


async def test_whatever_fails_at_a_restart_it_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not only what this program raises: no file descriptor left is an error of zmq's own."""
    llm = fake_llm()
    await llm.start()
    client = llm.client
    assert client._context is not None
    opened: list[object] = []

    def broken(kind: int) -> object:
        monkeypatch.undo()
        opened.append(kind)
        raise RuntimeError("too many open files")

    monkeypatch.setattr(client._context, "socket", broken)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    while not opened or client.state is not EngineState.READY:
        await asyncio.sleep(0.02)
    assert (await llm.generate("back again")).text == "back again"
    assert client._directory is not None
    assert len(list(client._directory.iterdir())) == 1  # the sockets of the dead are gone
    await llm.close()


async def test_an_id_that_is_in_use_is_refused_and_harms_nobody() -> None:
    llm = fake_llm("slow")
    await llm.start()
    ids = llm.builder.encode(WORDS)[:40]
    request = llm.builder.build(ids, SamplingParams(max_tokens=40), request_id="mine")
    (first,) = await llm.submit([request])
    other = llm.builder.build(ids, SamplingParams(max_tokens=40), request_id="other")
    for several in ([request], [other, request]):
        with pytest.raises(RequestError, match="'mine' is in use"):
            await llm.submit(several)
    completion = await asyncio.wait_for(first.completion(), 20)
    assert completion.finish_reason is not None
    assert len(completion.token_ids) == 40
    assert not llm.client._queues
    await llm.close()
