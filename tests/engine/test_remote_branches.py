"""Branches of an engine in a process of its own: loaded, replaced, lost and found again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from pathlib import Path

import pytest

from lockstep import messages
from lockstep.branch import BranchError, read_branch
from lockstep.engine.client import EngineClient, EngineState, EngineUnavailable
from lockstep.types import FinishReason, Request, RequestError, SamplingParams, SequenceOutput
from tests.branch_fake import make_branch
from tests.server.support import fake_client


def ask(name: str, branch: str) -> Request:
    params = SamplingParams(max_tokens=0, seed=0)
    return Request(name, (11, 12, 13, 14, 15), params, branch=branch, branch_from=3)


async def decided(client: EngineClient, branch: str) -> tuple[float, ...]:
    queue = await client.submit(ask(f"ask {branch}", branch))
    output = await queue.get()
    assert isinstance(output, SequenceOutput)
    assert output.finish is FinishReason.LENGTH
    return output.scores


async def die_and_come_back(client: EngineClient) -> None:
    restarts = client.restarts
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    while client.restarts == restarts or client.state is not EngineState.READY:
        await asyncio.sleep(0.05)


async def test_branches_over_the_life_of_a_process(tmp_path: Path) -> None:
    first = make_branch(tmp_path, "first")
    client = fake_client("judged", branches={"judge": first})
    try:
        await client.start()
        assert client.branches == {"judge": read_branch(first)}
        assert len(await decided(client, "judge")) == 3
        wide = make_branch(tmp_path, "wide", options=("a", "b", "c", "d"))
        loaded = await client.load_branch("wide", wide)
        assert loaded == client.branches["wide"] == read_branch(wide)
        await client.load_branch("judge", wide)
        assert len(await decided(client, "judge")) == 4
        with pytest.raises(BranchError, match="No such file"):
            await client.load_branch("judge", str(tmp_path / "none"))
        with pytest.raises(BranchError, match="trained on other weights"):
            await client.load_branch("judge", make_branch(tmp_path, "wrong", base="x"))
        assert len(await decided(client, "judge")) == 4
        await client.unload_branch("wide")
        with pytest.raises(BranchError, match="'wide' is not loaded"):
            await client.unload_branch("wide")
        with pytest.raises(RequestError, match="there are judge") as refused:
            await client.submit(ask("late", "wide"))
        assert refused.value.code == "branch_not_found"
        await die_and_come_back(client)
        assert client.branches == {"judge": read_branch(wide)}
        assert len(await decided(client, "judge")) == 4
    finally:
        await client.close()
    with pytest.raises(EngineUnavailable):
        await client.load_branch("judge", first)


async def test_what_is_lost_meanwhile_is_refused_and_the_rest_is_back(tmp_path: Path) -> None:
    kept, changed, gone = (make_branch(tmp_path, name) for name in ("kept", "changed", "gone"))
    client = fake_client("judged", branches={"kept": kept})
    try:
        await client.start()
        await client.load_branch("changed", changed)
        await client.load_branch("gone", gone)
        shutil.rmtree(gone)
        make_branch(tmp_path, "changed", fork=0)  # would decide otherwise
        await die_and_come_back(client)
        assert set(client.branches) == {"kept"}
        assert await decided(client, "kept")
        for name in ("changed", "gone"):
            with pytest.raises(RequestError, match="not loaded"):
                await client.submit(ask("r", name))
    finally:
        await client.close()


async def test_there_is_room_for_what_was_unloaded_when_the_engine_died(tmp_path: Path) -> None:
    """A context branch needs a tail, which is laid out at the start."""
    judge = make_branch(tmp_path, adapt="context")
    client = fake_client("judged", branches={"judge": judge})
    try:
        await client.start()
        for _ in range(2):
            await client.unload_branch("judge")
            await die_and_come_back(client)
            assert client.branches == {}
            await client.load_branch("judge", judge)
            assert await decided(client, "judge")
    finally:
        await client.close()


async def test_a_change_counts_although_nobody_waits_for_it(tmp_path: Path) -> None:
    client = fake_client("judged")
    try:
        await client.start()
        change = asyncio.create_task(client.load_branch("judge", make_branch(tmp_path)))
        await asyncio.sleep(0)
        change.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await change
        while not client.branches:
            await asyncio.sleep(0.01)
        await die_and_come_back(client)
        assert await decided(client, "judge")
    finally:
        await client.close()


async def test_a_change_under_way_fails_with_the_process(tmp_path: Path) -> None:
    client = fake_client("judged-slow", branches={})
    try:
        await client.start()
        assert client.pid is not None
        os.kill(client.pid, signal.SIGSTOP)
        change = asyncio.create_task(client.load_branch("judge", make_branch(tmp_path)))
        await asyncio.sleep(0.1)
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineUnavailable):
            await change
        assert not client.branches
    finally:
        await client.close()


async def test_a_branch_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    wrong = make_branch(tmp_path, base="other")
    with pytest.raises(BranchError, match="trained on other weights"):
        await fake_client("judged", branches={"judge": wrong}).start()


def test_messages_keep_a_branch_as_it_is(tmp_path: Path) -> None:
    branch = read_branch(
        make_branch(
            tmp_path,
            thresholds={"refuse": 0.25},
            calibration={"ece": 0.01, "bins": [1, 2]},
            training={"seed": 3},
        )
    )
    reply = messages.BranchReply(ticket=3, branch=branch)
    assert messages.decode_from_engine(messages.encode(reply)) == reply
    order = messages.LoadBranch(ticket=4, name="judge", folder="/x")
    assert messages.decode_to_engine(messages.encode(order)) == order
