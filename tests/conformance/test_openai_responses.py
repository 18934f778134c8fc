"""OpenAI's own client on `/v1/responses`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field

MODEL: Any = {"model": "smollm2", "temperature": 0}
BRIEF: Any = {**MODEL, "instructions": "Be brief.", "max_output_tokens": 12}


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=100_000_000)
    capital: bool | None


WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as made:
        yield made


def test_streamed_and_whole_are_the_same_answer(client: openai.OpenAI) -> None:
    whole = client.responses.create(input="Name three rivers.", **BRIEF)
    with client.responses.stream(input="Name three rivers.", **BRIEF) as stream:
        last = list(stream)[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.output_text == whole.output_text != ""
    assert client.responses.retrieve(whole.id) == whole


def test_a_chain_reads_the_prefix_cache_and_equals_the_whole(client: openai.OpenAI) -> None:
    first = client.responses.create(input="Name a river.", **BRIEF)
    second = client.responses.create(
        input="In which country is it?", previous_response_id=first.id, **BRIEF
    )
    items: Any = [
        {"role": "user", "content": "Name a river."},
        *first.output,
        {"role": "user", "content": "In which country is it?"},
    ]
    whole = client.responses.create(input=items, **BRIEF)
    assert second.output_text == whole.output_text
    assert first.usage is not None
    assert second.usage is not None
    assert whole.usage is not None
    assert second.usage.input_tokens == whole.usage.input_tokens
    # The first turn's prompt is in the cache, and what it wrote up to its last page.
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens
    chat = client.chat.completions.create(
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Name a river."},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "In which country is it?"},
        ],
        max_tokens=12,
        **MODEL,
    )
    assert chat.choices[0].message.content == second.output_text


def test_parse_gives_the_model(client: openai.OpenAI) -> None:
    fields: Any = {
        "input": "Describe Paris.",
        "text_format": City,
        "max_output_tokens": 120,
        **MODEL,
    }
    whole = client.responses.parse(**fields)
    assert whole.status == "completed"
    assert isinstance(whole.output_parsed, City)
    with client.responses.stream(**fields) as stream:
        assert stream.get_final_response().output_parsed == whole.output_parsed


def test_json_objects(client: openai.OpenAI) -> None:
    response = client.responses.create(
        input="Give the JSON object of a cat.",
        text={"format": {"type": "json_object"}},
        max_output_tokens=30,
        **MODEL,
    )
    assert response.output_text.startswith("{")
    if response.status == "completed":
        assert isinstance(json.loads(response.output_text), dict)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_calls_and_their_results(client: openai.OpenAI, choice: Any) -> None:
    fields: Any = {
        "input": "What is the weather in Paris?",
        "tools": [WEATHER],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_output_tokens": 80,
        **MODEL,
    }
    asked = client.responses.create(**fields)
    (call,) = asked.output
    assert call.type == "function_call"
    assert set(json.loads(call.arguments)) == {"city"}
    events = list(client.responses.create(stream=True, **fields))
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    assert len(deltas) > 1  # told of while it is written
    answered = client.responses.create(
        previous_response_id=asked.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}],
        tools=[WEATHER],
        tool_choice="none",
        max_output_tokens=8,
        **MODEL,
    )
    assert [item.type for item in answered.output] == ["message"]


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(input="x", previous_response_id="resp_none", **MODEL)
    assert missing.value.code == "previous_response_not_found"
    with pytest.raises(openai.BadRequestError) as schema:
        client.responses.create(
            input="x",
            text={
                "format": {
                    "type": "json_schema",
                    "name": "a",
                    "schema": {"properties": {"foo": "bar"}},
                }
            },
            **MODEL,
        )
    assert schema.value.param == "text.format"
    assert "/properties/foo" in schema.value.message
    with pytest.raises(openai.BadRequestError) as long:
        client.responses.create(input="word " * 10_000, **MODEL)
    assert long.value.code == "context_length_exceeded"


async def test_the_async_client(base_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as client:
        response = await client.responses.create(input="Name a river.", **BRIEF)
        async with client.responses.stream(input="Name a river.", **BRIEF) as stream:
            events = [event async for event in stream]
        assert events[-1].response.output_text == response.output_text  # type: ignore[union-attr]
        await client.responses.delete(response.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response.id)
