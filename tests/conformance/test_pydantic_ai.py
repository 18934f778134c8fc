"""pydantic-ai on chat completions and on responses."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.direct import model_request
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.messages import ModelMessage, ModelRequest, ToolCallPart, ToolReturnPart
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.openai import (
    OpenAIChatModel,
    OpenAIResponsesModel,
    OpenAIResponsesModelSettings,
)
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import ToolDefinition

pytestmark = pytest.mark.asyncio(loop_scope="session")  # as the model's connections
Model = OpenAIChatModel | OpenAIResponsesModel


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=8)
    size: Literal["small", "large"]


@pytest.fixture(scope="module", params=[OpenAIChatModel, OpenAIResponsesModel])
def model(request: Any, base_url: str) -> Model:
    kind: type[Model] = request.param
    provider = OpenAIProvider(base_url=base_url, api_key="none")
    return kind("smollm2", provider=provider, settings={"temperature": 0.0, "max_tokens": 48})


async def test_a_conversation(model: Model) -> None:
    agent = Agent(model, instructions="Be brief.")
    first = await agent.run("Name a river.")
    assert first.output
    second = await agent.run("Where is it?", message_history=first.all_messages())
    assert second.output
    assert second.usage.cache_read_tokens > 0
    assert second.usage.input_tokens > first.usage.input_tokens


async def test_a_stream_is_the_answer(model: Model) -> None:
    agent = Agent(model, instructions="Be brief.")
    whole = await agent.run("Count to three.")
    async with agent.run_stream("Count to three.") as result:
        pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
    assert "".join(pieces) == whole.output
    assert len(pieces) > 1


@pytest.mark.parametrize("native", [False, True])
async def test_structured_output(model: Model, native: bool) -> None:
    """By a schema of the text, and by a function that has to be called."""
    agent: Agent[None, City] = Agent(model, output_type=NativeOutput(City) if native else City)
    result = await agent.run("Describe Paris.")
    assert isinstance(result.output, City)


async def test_a_tool_is_called_and_its_result_read(model: Model) -> None:
    weather = ToolDefinition(
        name="get_weather",
        description="The weather of a city.",
        parameters_json_schema={
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    )
    asked: list[ModelMessage] = [ModelRequest.user_text_prompt("What is the weather in Paris?")]
    must_call = ModelRequestParameters(function_tools=[weather], allow_text_output=False)
    answer = await model_request(model, asked, model_request_parameters=must_call)
    (call, *_) = (part for part in answer.parts if isinstance(part, ToolCallPart))
    assert call.tool_name == "get_weather"
    assert call.args_as_dict()["city"] in ("Paris", "Rome")
    results = [
        ToolReturnPart(part.tool_name, "rain", part.tool_call_id)
        for part in answer.parts
        if isinstance(part, ToolCallPart)
    ]
    said = await model_request(
        model,
        [*asked, answer, ModelRequest(parts=results)],
        model_request_parameters=ModelRequestParameters(function_tools=[weather]),
    )
    assert said.parts
    assert said.usage.cache_read_tokens > 0


async def test_a_chain_by_id(base_url: str) -> None:
    model = OpenAIResponsesModel(
        "smollm2",
        provider=OpenAIProvider(base_url=base_url, api_key="none"),
        settings=OpenAIResponsesModelSettings(
            temperature=0.0, max_tokens=24, openai_previous_response_id="auto"
        ),
    )
    agent = Agent(model)
    first = await agent.run("Name a river.")
    second = await agent.run("Where is it?", message_history=first.all_messages())
    assert second.usage.cache_read_tokens >= first.usage.input_tokens


async def test_errors_are_told(model: Model) -> None:
    with pytest.raises(ModelHTTPError) as caught:
        await Agent(model).run("word " * 10_000)
    assert caught.value.status_code == 400
    assert "context_length_exceeded" in str(caught.value.body)
