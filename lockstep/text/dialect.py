"""How one model talks: the format of its calls, its think markers, what its template knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self

from lockstep.text.answer import AnswerFormat
from lockstep.text.chat import variables_of
from lockstep.text.reasoning import THINK_MARKERS, ThinkMarkers, find_markers
from lockstep.text.tokenizer import Tokenizer
from lockstep.text.tools.base import Function, ToolChoice, ToolFormat
from lockstep.text.tools.prompting import native, one_by_one, written_out
from lockstep.text.tools.registry import FORMATS, format_of
from lockstep.types import RequestError

_PROMPT_TAIL = 24  # tokens of a prompt that say whether it opens the model's reasoning


@dataclass(frozen=True, slots=True)
class Dialect:
    """What is known of a model's way to answer.

    Attributes:
        tools: the format of its calls.
        native: its chat template takes functions; otherwise they are told in the system
            message, see `prompting.written_out`.
        thinking: the markers of its reasoning; None when it has none.
        variables: names that its chat template reads from outside.
        control_ids: ids of control tokens by name, for the markers that are such.
    """

    tools: ToolFormat
    native: bool
    thinking: ThinkMarkers | None
    variables: frozenset[str]
    control_ids: Mapping[str, int]

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, *, tool_parser: str = "auto", reasoning_parser: str = "auto"
    ) -> Self:
        """The dialect of a tokenizer's chat template.

        Args:
            tool_parser: a name in `FORMATS`, or "auto": what the template teaches.
            reasoning_parser: a name in `THINK_MARKERS`, "none", or "auto".
        """
        template = tokenizer.chat_template or ""
        variables = variables_of(template)
        tools = format_of(template) if tool_parser == "auto" else FORMATS[tool_parser]
        if reasoning_parser == "auto":
            thinking = find_markers(template)
        else:
            thinking = THINK_MARKERS.get(reasoning_parser)
        names = {name for form in FORMATS.values() for name in form.special}
        names |= {mark for pair in THINK_MARKERS.values() for mark in (pair.start, pair.end)}
        ids = {name: tokenizer.token_id(name) for name in names}
        return cls(
            tools=tools or FORMATS["hermes"],
            native=tools is not None and "tools" in variables,
            thinking=thinking,
            variables=variables,
            control_ids={
                name: token
                for name, token in ids.items()
                if token is not None and token in tokenizer.special_ids
            },
        )

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], functions: Sequence[Function]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Messages and tools as the chat template takes them.

        Raises:
            RequestError: functions for a template that takes none, in a format that the
                model cannot be told of in text.
        """
        if self.native:
            tools = [function.declaration() for function in functions]
            if self.tools.one_by_one:
                messages = one_by_one(messages)
            return native(messages, short_ids=self.tools.short_ids), tools or None
        if functions and self.tools.name != "hermes":
            raise RequestError(
                f"tools: the server reads calls in the format {self.tools.name!r}, but the chat "
                "template of this model takes no tools",
                field="tools",
                code="unsupported_parameter",
            )
        return written_out(messages, functions), None

    def settle(self, choice: ToolChoice) -> ToolChoice:
        """The choice with `parallel` decided.

        A model whose template knows no tools was not taught when to stop calling: where
        calls are all that it may write, it repeats the first one until there is no room.
        """
        if choice.parallel is not None:
            return choice
        return replace(choice, parallel=self.native or choice.mode != "required")

    def answer(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        functions: Sequence[Function],
        choice: ToolChoice,
    ) -> AnswerFormat:
        """How the answer to a prompt is to be read; `functions` are those that may be called."""
        thinking = self.thinking
        tail = tokenizer.decode(prompt[-_PROMPT_TAIL:], skip_special_tokens=False).rstrip()
        if thinking is not None and tail.endswith(thinking.end):
            thinking = None  # the prompt has closed it
        return AnswerFormat(
            thinking=thinking,
            thinking_opened=thinking is not None and tail.endswith(thinking.start),
            tools=self.tools if functions and choice.mode != "none" else None,
            functions=functions,
        )

    def shown(self, form: AnswerFormat) -> frozenset[int]:
        """Control tokens that are part of the text because its reader looks for them."""
        names = form.tools.special if form.tools is not None else ()
        if form.thinking is not None:
            names = (*names, form.thinking.start, form.thinking.end)
        return frozenset(self.control_ids[name] for name in names if name in self.control_ids)


@lru_cache(maxsize=4)
def dialect_of(
    tokenizer: Tokenizer, tool_parser: str = "auto", reasoning_parser: str = "auto"
) -> Dialect:
    """`Dialect.of`, kept."""
    return Dialect.of(tokenizer, tool_parser=tool_parser, reasoning_parser=reasoning_parser)
