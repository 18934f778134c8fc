"""A turn as the model reads it: what its chat template is given, the text, the ids.

Whoever reads the same conversation (a chat, a gate on it, a decision about it) gets it from
here, so that all of them begin with the same ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.text.chat import normalised
from lockstep.text.dialect import Dialect
from lockstep.text.tokenizer import Tokenizer
from lockstep.text.tools.prompting import check_shape, without_system
from lockstep.text.turn import EFFORTS, Turn
from lockstep.types import RequestError

RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})


@dataclass(frozen=True, slots=True)
class Shown:
    """A conversation as a chat template is given it.

    Attributes:
        messages: of roles and texts. tools: JSON schemas of functions, for a template that
            knows them. arguments: further variables.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def text(self, tokenizer: Tokenizer, *, opened: bool = True) -> str:
        """What the template makes of it; `opened`: ready for the assistant's turn.

        Raises:
            RequestError: no template, or its complaint.
        """
        return tokenizer.render_chat(
            self.messages, tools=self.tools, add_generation_prompt=opened, **self.arguments
        )


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation ready for the assistant's turn: `text` is what the template made of
    `shown`, `ids` are its tokens."""

    shown: Shown
    text: str
    ids: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, shown: Shown) -> ChatPrompt:
        """Render and tokenise.

        Raises:
            RequestError: see `Shown.text`.
        """
        text = shown.text(tokenizer)
        return cls(shown, text, tuple(tokenizer.encode(text, add_special_tokens=False)))

    def ids_of(self, tokenizer: Tokenizer, text: str) -> list[int]:
        """Ids of another text that begins like this one, which are its own ids so far."""
        return tokenizer.encode_beside(text, self.text, self.ids)


def show(tokenizer: Tokenizer, dialect: Dialect, turn: Turn) -> Shown:
    """What the model's chat template is given.

    A template without a system role gets what there is to say of functions in the first
    message of the user; a system message of the client's is the template's to refuse.

    Raises:
        RequestError: calls that are none, an effort that the template does not know, or a
            variable that is not the client's to set.
    """
    reserved = RESERVED & set(turn.template_arguments or {})
    if reserved:
        raise RequestError(
            f"chat_template_kwargs may not set {', '.join(sorted(reserved))}",
            field="chat_template_kwargs",
        )
    messages = normalised(turn.messages)
    check_shape(messages)
    told = turn.functions if turn.choice.mode != "none" else ()
    arguments = {**_effort(dialect, turn.effort), **(turn.template_arguments or {})}
    given, tools = dialect.prompt(messages, told)
    shown = Shown(given, tools, arguments)
    own = given[0]["role"] == "system" != messages[0]["role"]
    if own and tokenizer.chat_template is not None:
        try:
            shown.text(tokenizer)
        except RequestError as error:
            if error.code != "chat_template_error":
                raise
            return replace(shown, messages=without_system(given))
    return shown


def _effort(dialect: Dialect, effort: str | None) -> dict[str, Any]:
    """An effort as the chat template takes it.

    Raises:
        RequestError: it takes none.
    """
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise RequestError(
            f"reasoning_effort must be one of {', '.join(EFFORTS)}, got {effort!r}",
            field="reasoning_effort",
        )
    if "reasoning_effort" in dialect.variables:
        return {"reasoning_effort": effort}
    for name in ("enable_thinking", "thinking"):
        if name in dialect.variables:
            return {name: effort != "none"}
    if effort == "none" and dialect.thinking is None:
        return {}
    raise RequestError(
        "reasoning_effort: the chat template of this model takes none",
        field="reasoning_effort",
        code="unsupported_parameter",
    )
