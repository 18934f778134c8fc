"""Function calls and reasoning over HTTP, for a model that writes what the user's message says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.async_llm import AsyncLLM
from lockstep.text import Tokenizer
from tests.server.support import ServerThread, fake_client, fake_llm, smollm2_tokenizer
from tests.text.test_chat import STRICT
from tests.text.tools.formats import write

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
LOOK = {"type": "function", "function": {"name": "look", "parameters": SCHEMA, "strict": True}}
NOW = {"type": "function", "function": {"name": "now", "description": "The time."}}
TOOLS = [LOOK, NOW]
PARIS = write("hermes", [("look", {"city": "Paris", "days": 3})])


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    with ServerThread(lambda: fake_llm("speaks"), reasoning_parser="think") as server:
        yield server


@pytest.fixture(scope="module")
def speaks(server: ServerThread) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def say(client: openai.OpenAI, text: str | list[Any], **fields: Any) -> Any:
    messages = [user(text)] if isinstance(text, str) else text
    return client.chat.completions.create(model="speaks", messages=messages, **fields)


def streamed(client: openai.OpenAI, text: str, **fields: Any) -> dict[str, Any]:
    """What the client's own accumulation of a stream makes of it."""
    with client.chat.completions.stream(
        model="speaks",
        messages=[user(text)],  # type: ignore[list-item]
        **fields,
    ) as stream:
        stream.until_done()
        (choice,) = stream.get_final_completion().choices
    calls = choice.message.tool_calls or []
    return {
        "content": choice.message.content or "",
        "calls": [(call.function.name, call.function.arguments) for call in calls],
        "reason": choice.finish_reason,
        "thought": getattr(choice.message, "reasoning_content", None),
    }


def whole(reply: Any) -> dict[str, Any]:
    (choice,) = reply.choices
    calls = choice.message.tool_calls or []
    return {
        "content": choice.message.content or "",
        "calls": [(call.function.name, call.function.arguments) for call in calls],
        "reason": choice.finish_reason,
        "thought": getattr(choice.message, "reasoning_content", None),
    }


@pytest.mark.parametrize(
    ("text", "content", "calls", "reason"),
    [
        (PARIS, "", [("look", '{"city": "Paris", "days": 3}')], "tool_calls"),
        (
            f"Well.\n{PARIS}\n{PARIS}",
            "Well.",
            [("look", '{"city": "Paris", "days": 3}')] * 2,
            "tool_calls",
        ),
        ("Hello.", "Hello.", [], "stop"),
        (write("hermes", [("now", {})]), "", [("now", "{}")], "tool_calls"),
    ],
)
def test_calls_at_will(
    speaks: openai.OpenAI, text: str, content: str, calls: list[Any], reason: str
) -> None:
    reply = whole(say(speaks, text, tools=TOOLS))
    assert (reply["content"], reply["calls"], reply["reason"]) == (content, calls, reason)
    assert streamed(speaks, text, tools=TOOLS) == reply


def test_a37_what_breaks_off_is_content(speaks: openai.OpenAI) -> None:
    for text in ('<tool_call>{"name": "now", "argu', '<tool_call>{"name": "other"}</tool_call>'):
        reply = whole(say(speaks, text, tools=[NOW]))
        assert reply == {"content": text, "calls": [], "reason": "stop", "thought": None}
        assert streamed(speaks, text, tools=[NOW]) == reply


def test_a_call_cut_off_by_max_tokens_or_a_stop(speaks: openai.OpenAI) -> None:
    short = whole(
        say(speaks, write("hermes", [("now", {"a": "b" * 40})]), tools=[NOW], max_tokens=16)
    )
    assert short["reason"] == "length"
    assert not short["calls"]
    stopped = whole(say(speaks, PARIS, tools=TOOLS, stop=["days"]))
    assert stopped["reason"] == "stop"
    assert not stopped["calls"]
    assert stopped["content"].endswith('"city": "Paris", "')


def test_none_tells_the_model_of_no_function(speaks: openai.OpenAI) -> None:
    without = say(speaks, PARIS)
    none = say(speaks, PARIS, tools=TOOLS, tool_choice="none")
    told = say(speaks, PARIS, tools=TOOLS)
    assert whole(none)["content"] == whole(without)["content"] == PARIS
    assert none.usage.prompt_tokens == without.usage.prompt_tokens < told.usage.prompt_tokens


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"look", "now"}),
        ({"type": "function", "function": {"name": "look"}}, {"look"}),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "look"}}],
                },
            },
            {"look"},
        ),
    ],
)
def test_a_required_call_is_kept_by_a_grammar(
    speaks: openai.OpenAI, choice: Any, names: set[str]
) -> None:
    """The model would rather write something else; its draws are then any that are allowed."""
    complete = 0
    for seed in range(6):
        fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "seed": seed}
        fields["parallel_tool_calls"] = False
        reply = whole(say(speaks, "Hello.", **fields))
        assert reply["content"] == ""
        if reply["reason"] == "length":
            continue  # white space to the context's end
        assert streamed(speaks, "Hello.", **fields) == reply
        assert reply["reason"] == "tool_calls"
        ((name, arguments),) = reply["calls"]
        assert name in names
        if name == "look":
            jsonschema.validate(json.loads(arguments), SCHEMA)
        complete += 1
    assert complete >= 3


def test_required_arguments_are_streamed_as_they_are_written(speaks: openai.OpenAI) -> None:
    stream = say(speaks, PARIS, tools=[LOOK], tool_choice="required", stream=True)
    parts = [
        call.function.arguments
        for chunk in stream
        for choice in chunk.choices
        for call in choice.delta.tool_calls or []
    ]
    assert "".join(parts) == '{"city": "Paris", "days": 3}'
    assert len([part for part in parts if part]) > 1  # how many, the load decides


def test_strict_functions_hold_calls_at_will(speaks: openai.OpenAI) -> None:
    text = PARIS.replace("3", "77")
    ((_, arguments),) = whole(say(speaks, text, tools=TOOLS, parallel_tool_calls=False))["calls"]
    jsonschema.validate(json.loads(arguments), SCHEMA)
    loose = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
    ((_, arguments),) = whole(say(speaks, text, tools=[loose]))["calls"]
    assert json.loads(arguments)["days"] == 77


def test_a_schema_that_cannot_be_kept(speaks: openai.OpenAI) -> None:
    """Known here (uniqueItems) or to the grammar library only (a pattern that looks ahead)."""
    for schema in ({"type": "array", "uniqueItems": True}, {"type": "string", "pattern": "(?!a)b"}):
        own = {"name": "now", "parameters": {"type": "object", "properties": {"a": schema}}}
        loose = {"type": "function", "function": own}
        reply = whole(
            say(speaks, write("hermes", [("now", {"a": 1})]), tools=[loose], tool_choice="required")
        )
        assert reply["calls"] == [("now", '{"a": 1}')]
        strict = {"type": "function", "function": {**own, "strict": True}}
        for choice in ("auto", "required"):
            with pytest.raises(openai.BadRequestError) as caught:
                say(speaks, "x", tools=[strict], tool_choice=choice)
            assert caught.value.param == "tools"


def test_parallel_tool_calls_false_is_one_call(speaks: openai.OpenAI) -> None:
    text = f"{write('hermes', [('now', {})])}\n{write('hermes', [('now', {})])}"
    assert len(whole(say(speaks, text, tools=[NOW]))["calls"]) == 2
    reply = whole(say(speaks, text, tools=[NOW], parallel_tool_calls=False))
    assert reply["calls"] == [("now", "{}")]


def test_calls_or_a_response_format(speaks: openai.OpenAI) -> None:
    form = {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": {"enum": ["yes", "no"]}},
    }
    fields: dict[str, Any] = {"tools": TOOLS, "response_format": form}
    assert whole(say(speaks, '"no"', **fields))["content"] == '"no"'
    assert whole(say(speaks, PARIS, **fields))["calls"]


def test_a_conversation_with_calls_and_results(speaks: openai.OpenAI) -> None:
    first = say(speaks, PARIS, tools=TOOLS).choices[0].message
    (call,) = first.tool_calls
    assert call.id.startswith("call_")
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    talk = [user(PARIS), first.model_dump(exclude_none=True), result]
    reply = whole(say(speaks, talk, tools=TOOLS))
    assert reply["content"] == "<tool_response>\nsunny\n</tool_response>"
    assert whole(say(speaks, [*talk, user("And?")], tools=TOOLS))["content"].endswith("\nAnd?")
    for wrong in (talk[:2], [*talk, result], [user("x"), result]):
        with pytest.raises(openai.BadRequestError) as caught:
            say(speaks, wrong, tools=TOOLS)
        assert caught.value.param == "messages"
        assert call.id in str(caught.value)


def test_several_choices_each_with_their_calls(speaks: openai.OpenAI) -> None:
    reply = say(speaks, PARIS, tools=TOOLS, n=3)
    ids = [choice.message.tool_calls[0].id for choice in reply.choices]
    assert len(set(ids)) == 3
    assert all(choice.finish_reason == "tool_calls" for choice in reply.choices)


def test_reasoning_stands_apart(speaks: openai.OpenAI) -> None:
    text = f"<think>\nHm, 3?\n</think>\n\n{PARIS}"
    reply = say(speaks, text, tools=TOOLS)
    assert whole(reply)["thought"] == "Hm, 3?"
    assert whole(reply)["calls"]
    assert reply.usage.completion_tokens_details.reasoning_tokens > 0
    assert streamed(speaks, text, tools=TOOLS) == whole(reply)
    talk = [user("x"), {**reply.choices[0].message.model_dump(exclude_none=True)}]
    talk.append({"role": "tool", "tool_call_id": talk[1]["tool_calls"][0]["id"], "content": "y"})
    assert whole(say(speaks, talk))["content"]


def test_a_thought_before_a_response_format(speaks: openai.OpenAI) -> None:
    reply = whole(
        say(speaks, '<think>Hm.</think>{"a": 1}', response_format={"type": "json_object"})
    )
    assert (reply["thought"], reply["content"]) == ("Hm.", '{"a": 1}')


@pytest.mark.parametrize("effort", ["high", "never", "none"])
def test_an_effort_that_the_template_does_not_take(speaks: openai.OpenAI, effort: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        say(speaks, "x", reasoning_effort=effort)
    assert caught.value.param == "reasoning_effort"


def strict_llm() -> AsyncLLM:
    """A model whose template has no system role and wants turns to alternate."""
    template = STRICT.replace("<start_of_turn>", "<|im_start|>").replace(
        "<end_of_turn>", "<|im_end|>"
    )
    tokenizer = Tokenizer(
        smollm2_tokenizer()._backend,
        eos_ids=[2],
        chat_template=template,
        template_variables={"bos_token": ""},
    )
    return AsyncLLM.from_client(fake_client("speaks"), tokenizer)


def test_a45_a_template_without_a_system_role() -> None:
    system, assistant = {"role": "system", "content": "S"}, {"role": "assistant", "content": "A"}
    with ServerThread(strict_llm) as server, httpx.Client(base_url=server.url) as http:

        def post(messages: list[Any], **fields: Any) -> httpx.Response:
            body = {"model": "speaks", "messages": messages, **fields}
            return http.post("/v1/chat/completions", json=body)

        for messages, complaint in (
            ([system], "System role not supported"),
            ([system, user("x")], "System role not supported"),
            ([user("x"), user("y")], "roles must alternate"),
        ):
            for fields in ({}, {"tools": TOOLS}, {"stream": True}):
                response = post(messages, **fields)
                assert response.status_code == 400
                error = response.json()["error"]
                assert complaint in error["message"]
                assert (error["param"], error["code"]) == ("messages", "chat_template_error")
        assert post([user("x"), assistant, user("y")]).status_code == 200
        assert post([user("x"), assistant], max_tokens=1).status_code == 200
        told = post([user("x")], tools=TOOLS)  # functions stand in the user's first message
        content = told.json()["choices"][0]["message"]["content"]
        assert content.startswith("You can call functions.")
        assert content.endswith("\n\nx")


markup = st.lists(
    st.sampled_from(
        [
            "<tool_call>",
            "</tool_call>",
            '{"name": "now"',
            "}",
            "\n",
            "é",
            "<think>",
            "</think>",
            " x",
            ', "arguments": {',
            '"a": "\\u00e9"',
        ]
    ),
    max_size=8,
).map("".join)


@given(text=markup, stop=st.sampled_from([None, ["x"], ["</tool_call>"]]))
@settings(max_examples=40, deadline=None)
def test_whatever_it_writes_streams_to_the_whole(
    speaks: openai.OpenAI, text: str, stop: list[str] | None
) -> None:
    text = f".{text}." if not text.strip() else text.strip()
    fields: dict[str, Any] = {"tools": [NOW], "stop": stop}
    assert streamed(speaks, text, **fields) == whole(say(speaks, text, **fields))
