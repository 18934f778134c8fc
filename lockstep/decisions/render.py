"""Inputs and questions as the model reads them.

A prompt is a context, the same for every question about an input, and a short suffix of its
own for each. Both are tokenised apart and joined as ids: no question moves a token of the
context, so its pages are shared and its rows are computed once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.branch import Branch
from lockstep.decisions.questions import Option, Question
from lockstep.requests import Conversation, RequestBuilder
from lockstep.text import Tokenizer
from lockstep.text.prompt import ChatPrompt, Shown
from lockstep.text.turn import Turn
from lockstep.types import RequestError


@dataclass(frozen=True, slots=True)
class Context:
    """A rendered input.

    Attributes:
        ids: what all its questions share.
        before, after: text around a question; behind `after` the answer begins.
        lead: what stands between `after` and a label: "" or " ".
    """

    ids: tuple[int, ...]
    before: str
    after: str
    lead: str = ""


Given = str | Conversation | Turn | ChatPrompt
"""An input: a text, a conversation, one with functions, or one that is tokenised already."""


def render_input(builder: RequestBuilder, given: Given, *, field: str = "input") -> Context:
    """The context of an input: a text, or a conversation, rendered by the model's own template
    as a chat would be, so that a decision about a chat finds the chat's pages.

    A question goes behind the text of a last message from the user, else it is a message of
    its own. A model without a template reads plain text.

    Raises:
        RequestError: empty, no text or conversation, or the template's complaint.
    """
    try:
        return _render(builder, given, field)
    except RequestError as error:
        raise _about(field, error) from None


def _about(field: str, error: RequestError) -> RequestError:
    """The error about `messages` as one about what the client calls them."""
    if error.field != "messages":
        return error
    return RequestError(str(error).replace("messages", field, 1), field=field, code=error.code)


def _conversation(builder: RequestBuilder, given: Given, field: str) -> Shown:
    """What the template is given; a text is one message of the user."""
    if isinstance(given, ChatPrompt):
        return given.shown
    if isinstance(given, str):
        if not given:
            raise RequestError(f"{field} must not be empty", field=field)
        given = [{"role": "user", "content": given}]
    return builder.show(given if isinstance(given, Turn) else Turn(given))


def _ids(builder: RequestBuilder, given: Given, text: str) -> list[int]:
    if isinstance(given, ChatPrompt):
        return given.ids_of(builder.tokenizer, text)
    return builder.tokenizer.encode(text, add_special_tokens=False)


def _render(builder: RequestBuilder, given: Given, field: str) -> Context:
    shown = _conversation(builder, given, field)
    if builder.tokenizer.chat_template is None:
        ids = builder.encode(_plain(shown), field=field)
        return Context(tuple(ids), before="\n\n", after="\nAnswer:", lead=" ")
    messages = [dict(message) for message in shown.messages]
    mark = _absent_mark(messages)
    joined = messages[-1]["role"] == "user"
    if joined:
        messages[-1]["content"] += mark
    else:
        messages.append({"role": "user", "content": mark})
    # The answer stands where thoughts would begin.
    arguments = {**shown.arguments, "enable_thinking": False}
    marked = replace(shown, messages=messages, arguments=arguments)
    before, found, after = marked.text(builder.tokenizer).partition(mark)
    if not found or mark in after or not before:
        raise RequestError(
            "the model's chat template does not show a question where it stands",
            field=field,
            code="chat_template_error",
        )
    ids = _ids(builder, given, before)
    return Context(tuple(ids), before="\n\n" if joined else "", after=after)


def _plain(shown: Shown) -> str:
    return "\n\n".join(message["content"] for message in shown.messages)


def _absent_mark(messages: Sequence[dict[str, Any]]) -> str:
    """A text that stands nowhere in the messages."""
    whole = json.dumps(messages, ensure_ascii=False, default=str)
    mark = "\N{WHITE SQUARE}question\N{WHITE SQUARE}"
    while mark in whole:
        mark += "\N{WHITE SQUARE}"
    return mark


def question_text(question: Question, labels: Sequence[str]) -> str:
    """The question with its options and how to answer it: `labels` name the options."""
    texts = _shown([option.value for option in question.options])
    if question.kind == "predicate":
        lines = [f"Statement or question about the text above: {question.instructions}"]
        for label, option in zip(labels, question.options, strict=True):
            if option.description:
                lines.append(f"{label} means: {option.description}")
        lines.append(f"Is it true? Answer with one word: {labels[0]} or {labels[1]}.")
        return "\n".join(lines)
    one = "letter" if labels[0].isalpha() else "number"
    task = "Choose" if question.kind == "choice" else "Rate"
    listed = "option" if question.kind == "choice" else "level"
    lines = [f"{task}, for the text above: {question.instructions}".rstrip(": ")]
    lines += [
        f"{label}. {_described(text, option)}"
        for label, text, option in zip(labels, texts, question.options, strict=True)
    ]
    lines.append(f"Answer with the {one} of one {listed} only.")
    return "\n".join(lines)


def _described(text: str, option: Option) -> str:
    return f"{text}: {option.description}" if option.description else text


def _shown(values: Sequence[str | bool]) -> list[str]:
    """Values in words; texts in quotes where one would look like a boolean among them."""
    booleans = {str(value).lower() for value in values if isinstance(value, bool)}
    clash = any(value in booleans for value in values if isinstance(value, str))
    return [
        str(value).lower()
        if isinstance(value, bool)
        else (json.dumps(value, ensure_ascii=False) if clash else value)
        for value in values
    ]


def suffix_ids(builder: RequestBuilder, context: Context, text: str) -> list[int]:
    """Ids of a question's text as it stands behind the context."""
    return builder.tokenizer.encode_inside(f"{context.before}{text}{context.after}")


def context_ids(builder: RequestBuilder, given: Given, *, field: str = "input") -> list[int]:
    """What a branch reads before its suffix: a conversation as the model's template shows it,
    without an opening of the assistant's turn; a text is one message of the user.

    A model without a template reads plain text. Training and serving both call this.

    Raises:
        RequestError: empty, no text or conversation, or the template's complaint.
    """
    try:
        shown = _conversation(builder, given, field)
        if builder.tokenizer.chat_template is None:
            return builder.encode(_plain(shown), field=field)
        return _ids(builder, given, shown.text(builder.tokenizer, opened=False))
    except RequestError as error:
        raise _about(field, error) from None


def branch_suffix_ids(tokenizer: Tokenizer, branch: Branch, question_text: str = "") -> list[int]:
    """What stands behind the context for a branch; its head reads the last row of it.

    Training and serving both call this.

    Args:
        question_text: of a head over answer codes, see `question_text`.
    """
    return tokenizer.encode_inside(branch.suffix.replace("{question}", question_text))
