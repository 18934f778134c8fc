"""What becomes of every function call that a model begins is counted, once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from lockstep.server.metrics import MAX_TOOL_NAMES, OTHER, ToolCalls
from tests.server.support import ServerThread, fake_llm, wait_until
from tests.server.test_metrics import scrape, value
from tests.text.tools.formats import write

NAME = "speaks-slow"
NOW = {"type": "function", "function": {"name": "now"}}
GOOD = write("hermes", [("now", {})])
NAMED_BAD = '<tool_call>{"name": "now", "arguments": {]}</tool_call>'
UNNAMED_BAD = '<tool_call>{"name": "other"}</tool_call>'


@pytest.fixture
def server() -> Iterator[ServerThread]:
    with ServerThread(lambda: fake_llm(NAME)) as server:
        yield server


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": NAME,
        "messages": [{"role": "user", "content": text}],
        "tools": [NOW],
        **fields,
    }


def say(server: ServerThread, texts: list[str], **fields: Any) -> None:
    async def main() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            route = "/v1/chat/completions"
            posts = [client.post(route, json=body(text, **fields)) for text in texts]
            for reply in await asyncio.gather(*posts):
                assert reply.status_code == 200, reply.text

    asyncio.run(main())


def leave(server: ServerThread) -> None:
    """Read a beginning of a call and go away."""
    text = write("hermes", [("now", {"a": "b " * 100})])
    before = generated(server)
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json=body(text, stream=True), timeout=60
    ) as reply:
        for _ in reply.iter_lines():
            wait_until(lambda: generated(server) > before + 20)
            break


def generated(server: ServerThread) -> float:
    return value(scrape(server.url), "lockstep:generation_tokens_total")


def calls(server: ServerThread, **labels: str) -> float:
    return value(scrape(server.url), "lockstep:tool_calls_total", **labels)


def test_j01_malformed_calls_are_counted_by_parser_tool_and_model(server: ServerThread) -> None:
    say(server, [GOOD] * 10 + [NAMED_BAD] * 6 + [UNNAMED_BAD] * 4 + ["no call at all"] * 3)
    labels = {"parser": "hermes", "model_name": NAME}
    assert calls(server, result="ok", tool="now", **labels) == 10
    assert calls(server, result="malformed", tool="now", **labels) == 6
    assert calls(server, result="malformed", tool="", **labels) == 4
    assert calls(server) == 20


def test_j05_ok_malformed_and_aborted_add_up(server: ServerThread) -> None:
    say(server, [GOOD] * 5 + [NAMED_BAD] * 2)
    say(server, ['<tool_call>{"name": "now", "argu'])  # the model ends by itself
    say(server, [write("hermes", [("now", {"a": "b" * 60})])], max_tokens=16)
    leave(server)
    wait_until(lambda: calls(server, result="aborted") == 2)
    assert calls(server, result="ok") == 5
    assert calls(server, result="malformed") == 3
    assert calls(server) == 10


def test_several_calls_and_streams_count_each_once(server: ServerThread) -> None:
    say(server, [f"{GOOD}\n{GOOD}\n{NAMED_BAD}"], stream=True)
    assert (calls(server, result="ok"), calls(server, result="malformed")) == (2, 1)


def test_clients_cannot_fill_the_table() -> None:
    counted = ToolCalls()
    for index in range(3 * MAX_TOOL_NAMES):
        counted.count("hermes", f"tool{index}", "ok")
    assert sum(counted.counts.values()) == 3 * MAX_TOOL_NAMES
    assert len({tool for _, tool, _ in counted.counts}) == MAX_TOOL_NAMES + 1
    assert counted.counts["hermes", OTHER, "ok"] == 2 * MAX_TOOL_NAMES
