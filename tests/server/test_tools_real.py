"""Tools on SmolLM2, whose template takes none: told in text, kept by grammars."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from lockstep.async_llm import AsyncLLM
from tests.server.support import ServerThread

pytestmark = pytest.mark.slow


class GetWeather(pydantic.BaseModel):
    """What the weather is in a city."""

    city: str
    days: int = pydantic.Field(ge=1, le=9)


@pytest.fixture(scope="module")
def smollm2() -> Iterator[openai.OpenAI]:
    with (
        ServerThread(lambda: AsyncLLM("smollm2", threads=2)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


TOOL = openai.pydantic_function_tool(GetWeather)
NAMED = {"type": "function", "function": {"name": "GetWeather"}}
ASK = [{"role": "user", "content": "What is the weather in Paris for the next 3 days?"}]


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    fields = {"tools": [TOOL], "tool_choice": NAMED, "temperature": 0, "max_tokens": 90, **fields}
    return client.chat.completions.create(model="smollm2", messages=ASK, **fields)  # type: ignore[arg-type]


def test_a_named_function_is_called_with_what_was_asked(smollm2: openai.OpenAI) -> None:
    reply = ask(smollm2)
    (choice,) = reply.choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert GetWeather.model_validate_json(call.function.arguments).city == "Paris"
    parts = [
        part.function.arguments
        for chunk in ask(smollm2, stream=True)
        for streamed in chunk.choices
        for part in streamed.delta.tool_calls or []
    ]
    assert "".join(parts) == call.function.arguments
    assert len(parts) > 4


def test_the_client_parses_the_arguments(smollm2: openai.OpenAI) -> None:
    reply = smollm2.chat.completions.parse(
        model="smollm2",
        messages=ASK,  # type: ignore[arg-type]
        tools=[TOOL],
        tool_choice=NAMED,  # type: ignore[arg-type]
        temperature=1.0,
        seed=3,
        n=3,
        max_tokens=200,
    )
    for choice in reply.choices:
        (call,) = choice.message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, GetWeather)


def test_a_result_is_taken_into_the_answer(smollm2: openai.OpenAI) -> None:
    message = ask(smollm2, tool_choice="required").choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"sky": "clear"})}
    talk = [*ASK, message.model_dump(exclude_none=True), result]
    answer = smollm2.chat.completions.create(
        model="smollm2",
        messages=talk,  # type: ignore[arg-type]
        tools=[TOOL],
        temperature=0,
        max_tokens=40,
    )
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens  # the conversation so far


def test_answers_with_tools_are_the_same_alone_and_in_a_crowd(smollm2: openai.OpenAI) -> None:
    alone = ask(smollm2, seed=5, temperature=0.8)
    together = ask(smollm2, seed=5, temperature=0.8, n=4)
    (call,) = alone.choices[0].message.tool_calls
    (same,) = together.choices[0].message.tool_calls
    assert call.function.arguments == same.function.arguments
