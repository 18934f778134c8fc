"""Reasoning and function calls in responses, over a model that says what it is told to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseReasoningItem
from pydantic import BaseModel

from tests.server.responses.support import obedient_llm
from tests.server.support import ServerThread


class GetWeather(BaseModel):
    """The weather of a city."""

    city: str
    days: int = 1


TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
    "strict": False,
}
ARGUMENTS = {"city": 'Zürich "old" \\ 🙂', "days": 2}
WRITTEN = json.dumps({"name": "get_weather", "arguments": ARGUMENTS}, ensure_ascii=False)
CALL = f"<tool_call>\n{WRITTEN}\n</tool_call>"
THOUGHT = "<think>\nThe user wants the weather.\n</think>\n\n"


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        ServerThread(obedient_llm, reasoning_parser="think", tool_parser="hermes") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


def ask(client: openai.OpenAI, says: str, **fields: Any) -> Response:
    """A whole response that was also streamed, to the same effect."""
    request = {"model": "obedient", "input": f">>>{says}", **fields}
    whole = client.responses.create(**request)
    Response.model_validate(whole.to_dict())
    with client.responses.stream(**request) as stream:
        for event in stream:
            last = event
    assert bare(last.response) == bare(whole)  # type: ignore[union-attr]
    return whole


def bare(response: Any) -> dict[str, Any]:
    """What does not differ from one time to the next."""
    body: dict[str, Any] = json.loads(response.to_json())
    for name in ("id", "created_at", "completed_at"):
        del body[name]
    body["usage"].pop("input_tokens_details")
    for item in body["output"]:
        item.pop("id")
        item.pop("call_id", None)
        item.pop("parsed_arguments", None)
        for part in item.get("content", []):
            part.pop("parsed", None)
    return body


def test_reasoning_is_an_item_of_its_own(client: openai.OpenAI) -> None:
    response = ask(client, THOUGHT + "It rains.")
    reasoning, message = response.output
    assert isinstance(reasoning, ResponseReasoningItem)
    assert reasoning.content is not None
    assert [part.text for part in reasoning.content] == ["The user wants the weather."]
    assert reasoning.summary == []
    assert message.type == "message"
    assert response.output_text == "It rains."
    assert response.usage is not None
    spent = response.usage.output_tokens_details.reasoning_tokens
    assert 0 < spent < response.usage.output_tokens


def test_reasoning_that_is_cut_off_is_incomplete(client: openai.OpenAI) -> None:
    response = ask(client, THOUGHT + "It rains.", max_output_tokens=6)
    (reasoning,) = response.output
    assert isinstance(reasoning, ResponseReasoningItem)
    assert reasoning.status == response.status == "incomplete"
    assert response.output_text == ""
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == 6


def test_calls_are_items_with_arguments_that_parse(client: openai.OpenAI) -> None:
    response = ask(client, f"{THOUGHT}Let me look.\n{CALL}\n{CALL}", tools=[TOOL])
    assert [item.type for item in response.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert response.status == "completed"
    assert response.output_text == "Let me look."
    calls = [item for item in response.output if isinstance(item, ResponseFunctionToolCall)]
    for call in calls:
        assert call.name == "get_weather"
        assert json.loads(call.arguments) == ARGUMENTS
        assert call.status == "completed"
    assert len({call.call_id for call in calls} | {call.id for call in calls}) == 4
    said = response.tools[0].to_dict()
    assert {key: said[key] for key in TOOL} == TOOL


def test_without_tools_a_call_is_text(client: openai.OpenAI) -> None:
    assert ask(client, CALL).output_text == CALL
    response = ask(client, CALL, tools=[TOOL], tool_choice="none")
    assert [item.type for item in response.output] == ["message"]


def test_results_go_back_by_chain_or_whole(client: openai.OpenAI) -> None:
    first = ask(client, THOUGHT + CALL, tools=[TOOL])
    call = first.output[-1]
    assert isinstance(call, ResponseFunctionToolCall)
    result: Any = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": [{"type": "input_text", "text": "rain >>>It rains."}],
    }
    chained = ask(client, "", input=[result], previous_response_id=first.id, tools=[TOOL])
    whole = ask(
        client,
        "",
        input=[{"role": "user", "content": f">>>{THOUGHT}{CALL}"}, *first.output, result],
        tools=[TOOL],
    )
    assert chained.output_text == whole.output_text
    assert "It rains." in chained.output_text
    assert chained.usage is not None
    assert whole.usage is not None
    assert chained.usage.input_tokens == whole.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="has no function_call_output"):
        ask(client, "never mind", previous_response_id=first.id, tools=[TOOL])


def test_a_chat_and_a_response_read_the_same(client: openai.OpenAI) -> None:
    """One conversation in either form renders to one prompt."""
    function = {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)}
    chat = client.chat.completions.create(
        model="obedient",
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": "Let me look.",
                "tool_calls": [{"id": "call_1", "type": "function", "function": function}],  # type: ignore[typeddict-item]
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
            {"role": "user", "content": ">>>So it rains."},
        ],
        tools=[
            {
                "type": "function",
                "function": {k: TOOL[k] for k in ("name", "description", "parameters")},
            }
        ],
    )
    response = ask(
        client,
        "",
        instructions="Be brief.",
        input=[
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "Let me look."},
            {"type": "function_call", "call_id": "call_1", **function},
            {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
            {"role": "user", "content": ">>>So it rains."},
        ],
        tools=[TOOL],
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.usage is not None
    assert chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens


def test_only_allowed_functions_are_called(client: openai.OpenAI) -> None:
    other = {**TOOL, "name": "other"}
    choice: Any = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "other"}],
    }
    response = ask(client, CALL, tools=[TOOL, other], tool_choice=choice)
    assert [item.type for item in response.output] == ["message"]
    assert json.loads(response.to_json())["tool_choice"] == choice


def test_the_client_parses_arguments(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(GetWeather)
    call = CALL.replace("get_weather", "GetWeather")
    function: Any = {"type": "function", **tool["function"], "strict": False}
    response = client.responses.parse(model="obedient", input=f">>>{call}", tools=[function])
    (item,) = response.output
    assert item.type == "function_call"
    again = client.responses.create(  # what was parsed can be sent back as it is
        model="obedient",
        input=[
            *response.output,
            {"type": "function_call_output", "call_id": item.call_id, "output": ">>>fine"},
        ],
        tools=[function],
    )
    assert again.output_text.startswith("fine")
