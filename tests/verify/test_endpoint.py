"""What is asked of a server, and what is read from its reply, whatever it replies."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.types import RequestError
from lockstep.verify.canonical import canonical_json, digest
from lockstep.verify.endpoint import Endpoint, EndpointError, LocalEndpoint, ProbeRequest, api_base
from lockstep.verify.probe import ToolCall, Usage
from lockstep.verify.reply import read
from tests.server.support import ServerThread, fake_llm
from tests.verify.servers import Vendor, vendor

CHAT = ({"role": "user", "content": "hello there"},)


async def test_a_prompt_and_a_conversation_are_read_alike() -> None:
    app = vendor(lambda prompt: ["red", "two"])
    async with app.endpoint(api_key="sesame", extra={"top_k": 1}) as endpoint:
        plain = await endpoint.ask(ProbeRequest(prompt="x", logprobs=1))
        chat = await endpoint.ask(ProbeRequest(messages=CHAT, logprobs=2, seed=3, top_p=0.5))
    for found in (plain, chat):
        assert found.ok
        assert (found.text, found.tokens) == ("red two", ("red", "two"))
        assert found.logprobs == (-0.1, pytest.approx(-0.7))
        assert (found.finish, found.fingerprint) == ("stop", "vendor-1")
        assert found.usage == Usage(3, 2)
        assert found.seconds > 0
    assert plain.top == ((("red", -0.1),), (("two", pytest.approx(-0.7)),))
    assert app.bodies[0] == {
        "model": "model",
        "prompt": "x",
        "max_tokens": 64,
        "temperature": 0.0,
        "logprobs": 1,
        "top_k": 1,
    }
    assert app.bodies[1]["messages"] == list(CHAT)
    assert (app.bodies[1]["logprobs"], app.bodies[1]["top_logprobs"]) == (True, 2)
    assert (app.bodies[1]["seed"], app.bodies[1]["top_p"]) == (3, 0.5)
    assert all(headers["authorization"] == "Bearer sesame" for headers in app.headers)


async def test_lockstep_itself_is_read_and_so_is_its_refusal() -> None:
    with ServerThread(fake_llm) as server:
        async with Endpoint(server.url) as endpoint:
            ids = ProbeRequest(prompt="red €", logprobs=2, extra={"return_token_ids": True})
            found = await endpoint.ask(ids)
            refused = await endpoint.ask(ProbeRequest(prompt="x", extra={"no_such": 1}))
            silent = await endpoint.ask(
                ProbeRequest(messages=CHAT, extra={"return_token_ids": True})
            )
    assert found.text == "red €"
    assert len(found.tokens) == len(found.logprobs) == len(found.top) == len(found.token_ids)
    assert found.usage is not None
    assert found.usage.cached_tokens == 0
    assert not refused.ok
    assert refused.error == "status 400: unknown parameter: no_such"
    assert silent.tokens == tuple(f"token_id:{token}" for token in silent.token_ids) != ()


async def test_calls_keep_their_text_and_know_whether_it_parses() -> None:
    calls = [
        {"function": {"name": "look", "arguments": '{"at": 1}'}},
        {"function": {"name": "look", "arguments": '{"at": '}},
        {"function": {"name": "look", "arguments": "[1]"}},
        {"function": {"name": "look", "arguments": {"at": 1}}},
    ]

    def respond(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        message = {"content": None, "tool_calls": calls}
        return 200, {"choices": [{"message": message, "finish_reason": "tool_calls"}]}

    async with Vendor(respond).endpoint() as endpoint:
        found = await endpoint.ask(ProbeRequest(messages=CHAT, tools=({"type": "function"},)))
    assert found.ok
    assert found.text == ""
    assert [call.parses for call in found.tool_calls] == [True, False, False, True]
    assert found.tool_calls[0] == ToolCall("look", '{"at": 1}')


@pytest.mark.parametrize(
    ("status", "value", "error"),
    [
        (500, {"error": {"message": "the device\nis gone"}}, "status 500: the device is gone"),
        (429, {"error": "slow down"}, "status 429: slow down"),
        (502, b"<html>Bad gateway</html>", "status 502: <html>Bad gateway</html>"),
        (404, b"", "status 404: "),
        (200, b"not json", "unreadable: not JSON"),
        (200, {"choices": []}, "unreadable: choices is empty"),
        (200, {"choices": [{"text": 3}]}, "unreadable: the answer's text is 3"),
        (200, [1], "unreadable: choices is None"),
        (200, {"choices": [{"text": "x", "logprobs": {"tokens": ["x"], "token_logprobs": []}}]},
         "unreadable: 1 tokens with 0 logprobs"),
        (200, {"choices": [{"text": "x", "logprobs": {"tokens": ["x"], "token_logprobs": ["y"]}}]},
         "unreadable: a logprob is 'y'"),
    ],
)  # fmt: skip
async def test_what_went_wrong_is_in_the_reading(status: int, value: Any, error: str) -> None:
    async with Vendor(lambda path, body: (status, value)).endpoint(model="m") as endpoint:
        found = await endpoint.ask(ProbeRequest(prompt="x"))
    assert not found.ok
    assert found.error.startswith(error)


async def test_a_slow_server_and_an_absent_one_are_readings() -> None:
    slow = vendor()
    slow.delay = 5.0
    async with slow.endpoint(timeout=0.05) as endpoint:
        assert (await endpoint.ask(ProbeRequest(prompt="x"))).error == "timeout"
    async with Endpoint("http://127.0.0.1:9", "m") as endpoint:
        assert (await endpoint.ask(ProbeRequest(prompt="x"))).error.startswith("unreachable: Conn")


async def test_the_only_model_is_found_and_several_must_be_chosen_from() -> None:
    app = vendor()
    async with app.endpoint() as endpoint:
        await asyncio.gather(*(endpoint.ask(ProbeRequest(prompt=f"{i}")) for i in range(5)))
    assert {body["model"] for body in app.bodies} == {"model"}
    assert len(app.headers) == 6, "asked for models once"
    app.adapters = [{"id": "judge", "parent": "model"}]
    async with app.endpoint() as endpoint:
        assert await endpoint.model() == "model"
    app.models = ("one", "two")
    async with app.endpoint() as endpoint:
        with pytest.raises(EndpointError, match="serves one, two: name one model"):
            await endpoint.model()
        assert "name one model" in (await endpoint.ask(ProbeRequest(prompt="x"))).error


async def test_no_more_requests_at_once_than_connections() -> None:
    running = most = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    transport = httpx.ASGITransport(app=app)
    async with Endpoint("http://x", "m", connections=3, transport=transport) as endpoint:
        await asyncio.gather(*(endpoint.ask(ProbeRequest(prompt="x")) for _ in range(12)))
    assert most == 3


def test_urls() -> None:
    assert api_base("http://host:1") == "http://host:1/v1"
    assert api_base("https://host/") == "https://host/v1"
    assert api_base("https://host/openai/v1/") == "https://host/openai/v1"
    for bad in ("host:8000", "ftp://host", "", "http://"):
        with pytest.raises(EndpointError, match="no url"):
            api_base(bad)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "messages"),
        ({"prompt": "x", "messages": CHAT}, "messages"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "temperature": float("nan")}, "temperature"),
        ({"prompt": "x", "top_p": 1.5}, "top_p"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
        ({"prompt": "x", "tools": ({},)}, "tools"),
        ({"prompt": "x", "extra": {"model": "other"}}, "extra"),
    ],
)
def test_a_request_that_makes_no_sense_names_its_field(fields: Any, name: str) -> None:
    with pytest.raises(RequestError) as caught:
        ProbeRequest(**fields)
    assert caught.value.field == name


def test_equal_requests_have_one_canonical_form_and_others_another() -> None:
    one = ProbeRequest(prompt="x", temperature=0)
    assert digest(one.canonical()) == digest(ProbeRequest(prompt="x", temperature=0.0).canonical())
    others = [
        ProbeRequest(prompt="x", max_tokens=1),
        ProbeRequest(prompt="y"),
        ProbeRequest(prompt="x", seed=1),
        ProbeRequest(prompt="x", extra={"top_k": 1}),
        ProbeRequest(messages=({"role": "user", "content": "x"},)),
    ]
    assert len({digest(each.canonical()) for each in [one, *others]}) == 6
    assert canonical_json({"b": 1, "a": ["é", None]}) == '{"a":["é",null],"b":1}'
    with pytest.raises(ValueError, match="JSON"):
        canonical_json(float("nan"))
    with pytest.raises(TypeError, match="must be a string"):
        canonical_json({"a": [{1: 2}]})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["token", "logprob", "top_logprobs", "bytes", "content", "tokens",
                         "token_logprobs", "function", "arguments", "cached_tokens"]),
        inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(JSON, JSON, JSON, st.booleans())
def test_no_reply_raises(message: Any, logprobs: Any, other: Any, chat: bool) -> None:
    choice = {"message": message, "text": "x", "logprobs": logprobs, "token_ids": other}
    for body in (
        {"choices": [choice], "usage": other},
        {"choices": [{**choice, "message": {"content": "x", "tool_calls": other}}]},
        message,
    ):
        found = read(json.dumps(body).encode(), chat=chat, seconds=0.0)
        assert found.ok == (found.error == "")


async def test_a_local_model_answers_the_same_way(llm: Any) -> None:
    local = LocalEndpoint(llm)
    found, chat, refused, tools = await asyncio.gather(
        local.ask(ProbeRequest(prompt="The capital of France is", max_tokens=3, logprobs=2)),
        local.ask(ProbeRequest(messages=CHAT, max_tokens=2)),
        local.ask(ProbeRequest(prompt="x", stop=("",))),
        local.ask(ProbeRequest(messages=CHAT, tools=({"type": "function"},))),
    )
    assert found.ok
    assert found.tokens[0] == " Paris"
    assert len(found.logprobs) == len(found.top) == len(found.token_ids) == 3
    assert found.top[0][0] == (" Paris", found.logprobs[0])
    assert found.fingerprint == llm.info.fingerprint
    assert found.finish == "length"
    assert chat.ok
    assert len(chat.tokens) == 2
    assert chat.logprobs == ()
    assert refused.error.startswith("status 400: ")
    assert tools.error.startswith("status 400: a local model takes no tools")
