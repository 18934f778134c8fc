"""The body of `POST /v1/responses`, and what it means.

Sampling fields that OpenAI's responses do not have (`seed`, `top_k`, `stop`, ...) are taken
under the names that they have in chat completions.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from lockstep.server.protocol import Body, GenerationBody
from lockstep.server.responses.items import MAX_ITEMS, InputItem
from lockstep.text.tools import Function, ToolChoice
from lockstep.types import RequestError

MAX_TOOLS = 256
MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512

# Asks for more about built-in tools and images, of which there are none here, or for
# encrypted reasoning: reasoning items carry theirs in plain text.
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class ReasoningOptions(Body):
    """`reasoning`: how long the model thinks before it answers."""

    effort: str | None = None
    summary: Literal["auto"] | None = None  # reasoning is shown in whole, never summed up
    generate_summary: Literal["auto"] | None = None
    context: Literal["auto"] | None = None  # the chat template decides what it shows
    mode: Literal["standard"] | None = None


class TextFormat(Body):
    """`text.format`."""

    model_config = ConfigDict(strict=True, extra="forbid", serialize_by_alias=True)

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(max_length=64)] | None = None
    description: str | None = None
    definition: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(Body):
    """`text`."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Tool(Body):
    """One entry of `tools`; only functions are known."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None
    output_schema: None = None


class Choice(Body):
    """`tool_choice` other than a word: one function, or some of them."""

    type: Literal["function", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[dict[str, Any]] | None = None


class ResponseBody(GenerationBody):
    """Body of `POST /v1/responses`."""

    input: str | Annotated[list[InputItem], Field(max_length=MAX_ITEMS)]
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=128)] | None = None
    max_output_tokens: int | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Choice | None = None
    parallel_tool_calls: bool | None = None
    include: list[Includable] | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_tool_calls: int | None = None  # counts built-in tools, of which there are none

    truncation: str | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    context_management: list[Any] | None = None
    moderation: Any = None
    prompt_cache_options: dict[str, Any] | None = None

    aliases: ClassVar[dict[str, str]] = {
        "max_tokens": "max_output_tokens",
        "logprobs": "top_logprobs",
    }
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "n": (1,),
        "max_tokens": (),
        "prompt_logprobs": (),
        "logprob_token_ids": ([],),
        "return_token_ids": (False,),
        "truncation": ("disabled",),
        "background": (False,),
        "conversation": (),
        "prompt": (),
        "context_management": ([],),
        "moderation": (),
        "prompt_cache_options": ({}, {"mode": "implicit"}),
    }
