"""langchain-openai on chat completions and on responses."""

from __future__ import annotations

import functools
import operator
from typing import Any, Literal

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=8)
    size: Literal["small", "large"]


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return f"It rains in {city}."


@pytest.fixture(scope="module", params=["chat", "responses"])
def model(request: Any, base_url: str) -> ChatOpenAI:
    fields: Any = {"max_tokens": 48}  # the field's other name is unknown to type checkers
    return ChatOpenAI(
        base_url=base_url,
        api_key="none",  # type: ignore[arg-type]
        model="smollm2",
        temperature=0,
        max_retries=0,
        use_responses_api=request.param == "responses",
        **fields,
    )


def test_a_conversation(model: ChatOpenAI) -> None:
    history: list[Any] = [HumanMessage("Name a river.")]
    first = model.invoke(history)
    assert first.text
    second = model.invoke([*history, first, HumanMessage("Where is it?")])
    assert second.text
    usage = second.usage_metadata
    assert usage is not None
    assert usage["input_token_details"]["cache_read"] > 0


def test_a_stream_is_the_answer(model: ChatOpenAI) -> None:
    whole = model.invoke("Name a river.")
    chunks = list(model.stream("Name a river."))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert len(chunks) > 5


@pytest.mark.asyncio(loop_scope="session")  # langchain keeps one asynchronous connection pool
async def test_asynchronous_batches(model: ChatOpenAI) -> None:
    answers = await model.abatch(["Name a river.", "Name a city.", "Name a river."])
    assert answers[0].text == answers[2].text == model.invoke("Name a river.").text


@pytest.mark.parametrize("choice", ["required", "get_weather"])
def test_tools(model: ChatOpenAI, choice: str) -> None:
    bound = model.bind_tools(
        [get_weather], tool_choice=choice, parallel_tool_calls=False, strict=True
    )
    history: list[Any] = [HumanMessage("What is the weather in Paris?")]
    answer = bound.invoke(history)
    (call,) = answer.tool_calls
    assert call["name"] == "get_weather"
    assert call["args"]["city"] in ("Paris", "Rome")
    streamed = functools.reduce(operator.add, bound.stream(history))
    assert isinstance(streamed, AIMessage)
    assert [made["args"] for made in streamed.tool_calls] == [call["args"]]
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    said = model.bind_tools([get_weather], tool_choice="none").invoke([*history, answer, result])
    assert said.text
    assert not said.tool_calls


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(model: ChatOpenAI, method: Any) -> None:
    city = model.with_structured_output(City, method=method, strict=True).invoke("Describe Paris.")
    assert isinstance(city, City)


def test_errors_are_told(model: ChatOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="context holds"):
        model.invoke("word " * 10_000)
