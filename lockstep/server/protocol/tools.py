"""Functions, the choice among them, and their calls in bodies of chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from lockstep.server.protocol.body import Body
from lockstep.text import turn
from lockstep.text.tools import Function, ToolChoice
from lockstep.types import RequestError

MAX_TOOLS = 256


class FunctionBody(Body):
    """`tools[].function`."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(Body):
    """One entry of `tools`; only functions are known."""

    type: Literal["function"]
    function: FunctionBody


class FunctionName(Body):
    """A function by its name."""

    name: str


class NamedTool(Body):
    """`tool_choice` that names the function to call, and an entry of `allowed_tools`."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Body):
    """The functions that may be called, and whether one has to be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(max_length=MAX_TOOLS)]


class AllowedToolsChoice(Body):
    """`tool_choice` that allows some of the functions."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


Choice = Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice


class CalledFunction(Body):
    """`tool_calls[].function` of an assistant's message."""

    name: str
    arguments: str


class ToolCallBody(Body):
    """One entry of an assistant's `tool_calls`; an `index` from a stream is passed over."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    def rendered(self) -> dict[str, Any]:
        """The call as `lockstep.text.tools.prompting` reads it."""
        return {"id": self.id, "type": self.type, "function": self.function.model_dump()}


def functions_of(tools: Sequence[ToolBody] | None) -> list[Function]:
    """The functions of `tools`.

    Raises:
        RequestError: two of one name, or one that cannot be called.
    """
    return list(turn.functions_of([tool.model_dump() for tool in tools or ()]))


def choice_of(
    choice: Choice | None, functions: Sequence[Function], parallel: bool | None
) -> ToolChoice:
    """`tool_choice` and `parallel_tool_calls`. A function that is named is called once.

    Raises:
        RequestError: a function that is not declared, or a call that nothing can answer.
    """
    match choice:
        case None:
            return ToolChoice("auto", None, parallel)
        case NamedTool(function=named):
            return ToolChoice("required", _declared([named.name], functions), False)
        case AllowedToolsChoice(allowed_tools=allowed):
            names = _declared([tool.function.name for tool in allowed.tools], functions)
            if not names:
                raise RequestError("tool_choice: allowed_tools allows none", field="tool_choice")
            return ToolChoice(allowed.mode, names, parallel)
        case _:
            if choice == "required" and not functions:
                raise RequestError(
                    "tool_choice 'required' needs tools that can be called", field="tool_choice"
                )
            return ToolChoice(choice, None, parallel)


def _declared(names: Sequence[str], functions: Sequence[Function]) -> tuple[str, ...]:
    known = {function.name for function in functions}
    for name in names:
        if name not in known:
            raise RequestError(
                f"tool_choice: {name!r} is not among the tools of this request",
                field="tool_choice",
            )
    return tuple(dict.fromkeys(names))
