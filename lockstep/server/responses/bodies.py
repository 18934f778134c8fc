"""The body of `POST /v1/responses`, and what it means.

Sampling fields that OpenAI's responses do not have (`seed`, `top_k`, `stop`, ...) are taken
under the names that they have in chat completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from lockstep.server.constraints import named_schema
from lockstep.server.generation import Envelope
from lockstep.server.protocol import Body, GenerationBody
from lockstep.server.protocol.tools import (
    MAX_TOOLS,
    AllowedTools,
    AllowedToolsChoice,
    FunctionBody,
    FunctionName,
    NamedTool,
    ToolBody,
    choice_of,
    functions_of,
)
from lockstep.server.protocol.tools import Choice as ChatChoice
from lockstep.server.responses.items import TextOrItems
from lockstep.server.responses.objects import ReasoningSettings, Response, TextSettings
from lockstep.text.tools import Function, ToolChoice
from lockstep.types import Grammar, RequestError, SamplingParams

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
    allowed_callers: Annotated[list[Literal["direct"]], Field(max_length=1)] | None = None
    defer_loading: Literal[False] | None = None
    output_schema: None = None


class NamedFunction(Body):
    """`tool_choice` that names the function to call, and an entry of `allowed_tools`."""

    type: Literal["function"]
    name: str


class AllowedFunctions(Body):
    """`tool_choice` that allows some of the functions."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(max_length=MAX_TOOLS, fail_fast=True)]


Choice = NamedFunction | AllowedFunctions


class ResponseBody(GenerationBody):
    """Body of `POST /v1/responses`."""

    input: TextOrItems
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=128)] | None = None
    max_output_tokens: int | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Choice | None = None
    parallel_tool_calls: bool | None = None
    include: Annotated[list[Includable], Field(max_length=16, fail_fast=True)] | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    gate: Any = None
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
        "response_format": (),  # text.format is its name here
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

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())

    def functions(self) -> list[Function]:
        """The functions that the model is told of.

        Raises:
            RequestError: a tool of another type, or one that cannot be called.
        """
        return functions_of(
            [_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(self.tools or ())]
        )

    def choice(self, functions: Sequence[Function]) -> ToolChoice:
        """Whether the model calls them, and which.

        Raises:
            RequestError: one that is not declared, or a call that nothing can answer.
        """
        return choice_of(_chat_choice(self.tool_choice), functions, self.parallel_tool_calls)

    def sampling(self) -> SamplingParams:
        """As `GenerationBody.sampling`, with the grammar of `text.format`."""
        params, grammar = super().sampling(), self._grammar()
        if grammar is None:
            return params
        if params.grammar is not None:
            raise RequestError(
                f"{grammar.name} and {params.grammar.name} cannot be given together",
                field=params.grammar.name,
            )
        return replace(params, grammar=grammar)

    def _grammar(self) -> Grammar | None:
        form = self.text.format if self.text is not None else None
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return Grammar("json_object", name="text.format")
        fields = form.model_dump(
            include={"name", "description", "strict", "definition"}, by_alias=True
        )
        return named_schema(fields, "text.format", "text.format")

    def labels(self) -> dict[str, str]:
        """`metadata`, which is kept and given back.

        Raises:
            RequestError: more, longer or other entries than OpenAI allows.
        """
        labels = self.metadata or {}
        if len(labels) > MAX_METADATA:
            raise RequestError(
                f"metadata has {len(labels)} entries, at most {MAX_METADATA} are allowed",
                field="metadata",
            )
        for key, value in labels.items():
            if len(key) > MAX_KEY:
                raise RequestError(
                    f"metadata: a key has {len(key)} characters, at most {MAX_KEY} are allowed",
                    field="metadata",
                )
            if not isinstance(value, str) or len(value) > MAX_VALUE:
                raise RequestError(
                    f"metadata.{key} must be a string of at most {MAX_VALUE} characters",
                    field="metadata",
                )
        return labels

    def response(self, envelope: Envelope) -> Response:
        """The response before any output: what was asked for, said back.

        Raises:
            RequestError: metadata that cannot be kept.
        """
        reasoning = self.reasoning or ReasoningOptions()
        form = self.text.format if self.text is not None else None
        choice = self.tool_choice or "auto"
        return Response(
            id=envelope.id,
            created_at=envelope.created,
            model=envelope.model,
            system_fingerprint=envelope.fingerprint,
            instructions=self.instructions,
            previous_response_id=self.previous_response_id,
            max_output_tokens=self.max_output_tokens,
            max_tool_calls=self.max_tool_calls,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_logprobs=self.top_logprobs or 0,
            tools=[_said_back(tool) for tool in self.tools or ()],
            tool_choice=choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            reasoning=ReasoningSettings(
                effort=reasoning.effort, summary=reasoning.summary or reasoning.generate_summary
            ),
            text=TextSettings(
                format=(form or TextFormat(type="text")).model_dump(
                    exclude_none=True, by_alias=True
                )
            ),
            metadata=self.labels(),
            store=self.store is not False,
            user=self.user,
            safety_identifier=self.safety_identifier,
            prompt_cache_key=self.prompt_cache_key,
        )

    def _own_sampling(self) -> dict[str, Any]:
        if self.gate is not None:
            raise RequestError(
                "gate is taken by /v1/chat/completions and /v1/completions, not by responses",
                field="gate",
                code="unsupported_parameter",
            )
        values: dict[str, Any] = {"max_tokens": self.max_output_tokens}
        if self.wants_logprobs:
            values["logprobs"] = self.top_logprobs or 0
        return values


def _chat_tool(tool: Tool, where: str) -> ToolBody:
    """The tool as chat completions have it."""
    if tool.type != "function":
        raise RequestError(
            f"{where}: tools of type {tool.type!r} are not supported by this server, only "
            "functions are",
            field="tools",
            code="unsupported_parameter",
        )
    for name, value in (tool.model_extra or {}).items():
        if value is not None:
            raise RequestError(
                f"{where}.{name} is not supported by this server",
                field="tools",
                code="unsupported_parameter",
            )
    if tool.name is None:
        raise RequestError(f"{where}.name is missing", field="tools")
    function = FunctionBody(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        strict=tool.strict,
    )
    return ToolBody(type="function", function=function)


def _chat_choice(choice: Literal["none", "auto", "required"] | Choice | None) -> ChatChoice | None:
    """The choice as chat completions have it."""
    match choice:
        case NamedFunction():
            return _named(choice.name)
        case AllowedFunctions():
            tools = [_named(tool.name) for tool in choice.tools]
            return AllowedToolsChoice(
                type="allowed_tools", allowed_tools=AllowedTools(mode=choice.mode, tools=tools)
            )
        case _:
            return choice


def _named(name: str) -> NamedTool:
    return NamedTool(type="function", function=FunctionName(name=name))


def _said_back(tool: Tool) -> dict[str, Any]:
    """A tool with the fields that OpenAI's clients expect to be there."""
    said = tool.model_dump(exclude_none=True)
    return {**said, "parameters": tool.parameters, "strict": tool.strict}
