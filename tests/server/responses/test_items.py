"""Items go out and come back unchanged, and read as the conversation that they are."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from lockstep.server.responses.items import TextOrItems, messages_of, read
from lockstep.server.responses.objects import (
    AnyItem,
    FunctionCall,
    FunctionCallOutput,
    InputText,
    Message,
    OutputText,
    Reasoning,
    ReasoningText,
    Refusal,
    SummaryText,
    pack,
    unpack,
)
from lockstep.types import RequestError

INPUT: TypeAdapter[Any] = TypeAdapter(TextOrItems)
TEXT = st.text(st.characters(codec="utf-8"), max_size=10)
IDS = st.text("abcdef0123456789_", min_size=1, max_size=12)
STATUS = st.sampled_from(["in_progress", "completed", "incomplete"])


def tuples(of: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(of, max_size=3).map(tuple)


ITEMS = st.one_of(
    st.builds(
        Message,
        id=IDS,
        status=STATUS,
        role=st.sampled_from(["user", "system", "developer"]),
        content=tuples(st.builds(InputText, text=TEXT)),
    ),
    st.builds(
        Message,
        id=IDS,
        status=STATUS,
        role=st.just("assistant"),
        content=tuples(st.builds(OutputText, text=TEXT) | st.builds(Refusal, refusal=TEXT)),
        phase=st.sampled_from(["commentary", "final_answer"]) | st.just(msgspec.UNSET),
    ),
    st.builds(FunctionCall, id=IDS, status=STATUS, call_id=IDS, name=TEXT, arguments=TEXT),
    st.builds(
        FunctionCallOutput,
        id=IDS,
        status=STATUS,
        call_id=IDS,
        output=TEXT | tuples(st.builds(InputText, text=TEXT)),
    ),
    st.builds(
        Reasoning,
        id=IDS,
        status=STATUS,
        summary=tuples(st.builds(SummaryText, text=TEXT)),
        content=tuples(st.builds(ReasoningText, text=TEXT)),
        encrypted_content=st.none() | TEXT,
    ),
)


def read_json(value: Any) -> tuple[AnyItem, ...]:
    return read(INPUT.validate_python(value), lambda _: None)


@settings(max_examples=150, deadline=None)
@given(st.lists(ITEMS, max_size=5))
def test_a_client_can_send_back_what_it_was_given(items: list[AnyItem]) -> None:
    assert unpack(pack(items)) == tuple(items)
    assert read_json(json.loads(msgspec.json.encode(items))) == tuple(items)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def call(call_id: str, arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "add", "arguments": arguments}


def result(call_id: str, output: Any = "3") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def thought(text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content}


def chat_call(call_id: str, arguments: str = "{}") -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def answer(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {
        "type": "message",
        "role": "assistant",
        "id": "msg_1",
        "status": "completed",
        "content": content,
    }


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([user("hi")], [{"role": "user", "content": "hi"}]),
        (
            [{"role": "developer", "content": [{"type": "input_text", "text": "be nice"}]}],
            [{"role": "system", "content": "be nice"}],
        ),
        ([user("a"), user("b")], [user("a"), user("b")]),
        (
            [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
            [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
        ),
        (
            [
                user("1+2?"),
                thought("hm"),
                answer("let me see"),
                call("c1"),
                call("c2"),
                answer(" now"),
                result("c2"),
                result("c1"),
            ],
            [
                user("1+2?"),
                {
                    "role": "assistant",
                    "reasoning_content": "hm",
                    "content": "let me see now",
                    "tool_calls": [chat_call("c1"), chat_call("c2")],
                },
                {"role": "tool", "tool_call_id": "c2", "content": "3"},
                {"role": "tool", "tool_call_id": "c1", "content": "3"},
            ],
        ),
        (
            [
                call("c1"),
                result("c1"),
                call("c2"),
                result("c2", [{"type": "input_text", "text": "4"}]),
            ],
            [
                {"role": "assistant", "tool_calls": [chat_call("c1")]},
                {"role": "tool", "tool_call_id": "c1", "content": "3"},
                {"role": "assistant", "tool_calls": [chat_call("c2")]},
                {"role": "tool", "tool_call_id": "c2", "content": "4"},
            ],
        ),
        (  # the answer and the reasoning of two turns stay apart
            [thought("hm"), answer("a"), thought("oh"), answer("b")],
            [
                {"role": "assistant", "reasoning_content": "hm", "content": "a"},
                {"role": "assistant", "reasoning_content": "oh", "content": "b"},
            ],
        ),
        (  # there is nothing of it that could be given back
            [{"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}],
            [],
        ),
    ],
)
def test_items_read_as_chat_messages(items: Any, expected: Any) -> None:
    assert messages_of(None, read_json(items)) == expected


def test_instructions_stand_first() -> None:
    messages = messages_of("Be brief.", read_json([user("hi")]))
    assert messages == [{"role": "system", "content": "Be brief."}, user("hi")]


@pytest.mark.parametrize(
    ("items", "complaint"),
    [
        ([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "input_image"),
        ([{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}], "input_file"),
        ([call("c1"), result("c1", [{"type": "input_image", "file_id": "x"}])], "input_image"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "text must be a string"),
        ([{"role": "user", "content": [3]}], "must be an object"),
        ([{"role": "user", "content": [{"text": "x"}]}], "None"),
        ([{"type": "web_search_call", "id": "ws_1"}], "web_search_call"),
        ([result("nobody")], "nobody"),
        ([call("c1"), result("c1"), result("c1")], "c1"),
        ([call("c1")], "c1"),
        ([call("c1"), user("never mind"), result("c1")], "c1"),
        ([call("c1"), call("c1"), result("c1")], "two calls 'c1'"),
        ([call("c1"), call("c2"), result("c2"), call("c3")], "c1"),
        ([{"type": "item_reference", "id": "msg_gone"}], "msg_gone"),
        ([{"role": "user", "content": "x", "surprise": 1}], "surprise"),
        ([{**call("c1"), "namespace": "other"}], "namespace"),
    ],
)
def test_what_cannot_be_read_is_named(items: Any, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint) as caught:
        messages_of(None, read_json(items))
    assert caught.value.field == "input"


@pytest.mark.parametrize(
    "items",
    [
        3,
        None,
        [3],
        [{"role": "tool", "content": "x"}],
        [{"role": "user", "content": 3}],
        [{"role": "user"}],
        [{"role": "user", "content": "x", "id": ""}],
        [{"role": "user", "content": "x", "id": "x" * 1000}],
        [{"type": "function_call", "name": "f", "arguments": "{}"}],
        [{**call("c1"), "arguments": {"a": 1}}],
    ],
)
def test_malformed_items_are_refused(items: Any) -> None:
    with pytest.raises(ValidationError):
        INPUT.validate_python(items)


def test_a_long_body_is_read_at_once() -> None:
    """Whatever is wrong with it: the server's loop stands still meanwhile."""
    part = {"type": "input_text", "text": "x"}
    bodies: list[Any] = [
        [{"role": "user", "content": [part] * 100_000}],
        [{"role": "user", "content": [3] * 1_000_000}],
        [{"role": "user", "content": [{"type": "input_text"}] * 100_000}],
        [{"type": "reasoning", "summary": [{"type": "summary_text"}] * 100_000}],
        [3] * 1_000_000,
        [{"role": "user"}] * 8000,
    ]
    for body in bodies:
        start = time.process_time()
        with contextlib.suppress(ValidationError, RequestError):
            messages_of(None, read_json(body))
        assert time.process_time() - start < 0.5


def test_what_parse_adds_is_taken_and_dropped() -> None:
    parsed = answer("{}")
    parsed["content"][0]["parsed"] = {"a": 1}
    (message, function_call) = read_json([parsed, {**call("c1"), "parsed_arguments": {"a": 1}}])
    assert isinstance(message, Message)
    assert message.content == (OutputText(text="{}"),)
    assert isinstance(function_call, FunctionCall)
