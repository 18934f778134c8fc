"""Inputs and questions as the model reads them.

A prompt is a context, the same for every question about an input, and a short suffix of its
own for each. Both are tokenised apart and joined as ids: no question moves a token of the
context, so its pages are shared and its rows are computed once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.branch import Branch
from lockstep.decisions.questions import Option, Question
from lockstep.requests import Conversation, RequestBuilder, check_conversation
from lockstep.text import Tokenizer
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


def render_input(
    builder: RequestBuilder,
    given: str | Conversation,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_arguments: Mapping[str, Any] | None = None,
    field: str = "input",
) -> Context:
    """The context of an input: a text, or a conversation, rendered by the model's own template
    as a chat would be, so that a decision about a chat finds the chat's pages.

    A question goes behind the text of a last message from the user, else it is a message of
    its own. A model without a template reads plain text.

    Args:
        tools, template_arguments: as `RequestBuilder.encode_chat`.

    Raises:
        RequestError: empty, no text or conversation, or the template's complaint.
    """
    given = _conversation(given, field)
    try:
        return _render(builder, given, tools, template_arguments or {}, field)
    except RequestError as error:
        raise _about(field, error) from None


def _about(field: str, error: RequestError) -> RequestError:
    """The error about `messages` as one about what the client calls them."""
    if error.field != "messages":
        return error
    return RequestError(str(error).replace("messages", field, 1), field=field, code=error.code)


def _conversation(given: str | Conversation, field: str) -> Conversation:
    """A text is one message of the user."""
    if not isinstance(given, str):
        return given
    if not given:
        raise RequestError(f"{field} must not be empty", field=field)
    return [{"role": "user", "content": given}]


def _render(
    builder: RequestBuilder,
    given: Conversation,
    tools: Sequence[Mapping[str, Any]] | None,
    arguments: Mapping[str, Any],
    field: str,
) -> Context:
    if builder.tokenizer.chat_template is None:
        text = "\n\n".join(_plain(message) for message in given)
        ids = builder.encode(text, field=field)
        return Context(tuple(ids), before="\n\n", after="\nAnswer:", lead=" ")
    check_conversation(given)
    messages = [dict(message) for message in given]
    mark = _absent_mark(messages)
    joined = messages[-1]["role"] == "user" and isinstance(messages[-1].get("content"), str)
    if joined:
        messages[-1]["content"] += mark
    else:
        messages.append({"role": "user", "content": mark})
    # The answer stands where thoughts would begin.
    rendered = builder.tokenizer.render_chat(
        messages, tools=tools, **{**arguments, "enable_thinking": False}
    )
    before, found, after = rendered.partition(mark)
    if not found or mark in after or not before:
        raise RequestError(
            "the model's chat template does not show a question where it stands",
            field=field,
            code="chat_template_error",
        )
    ids = builder.tokenizer.encode(before, add_special_tokens=False)
    return Context(tuple(ids), before="\n\n" if joined else "", after=after)


def _plain(message: Any) -> str:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, str):
        raise RequestError("a message's content must be text", field="input")
    return content


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


def context_ids(
    builder: RequestBuilder,
    given: str | Conversation,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_arguments: Mapping[str, Any] | None = None,
    field: str = "input",
) -> list[int]:
    """What a branch reads before its suffix: a conversation as the model's template shows it,
    without an opening of the assistant's turn; a text is one message of the user.

    A model without a template reads plain text. Training and serving both call this.

    Raises:
        RequestError: empty, no text or conversation, or the template's complaint.
    """
    given = _conversation(given, field)
    try:
        if builder.tokenizer.chat_template is None:
            return builder.encode("\n\n".join(map(_plain, given)), field=field)
        return builder.encode_chat(given, template_arguments, tools, add_generation_prompt=False)
    except RequestError as error:
        raise _about(field, error) from None


def branch_suffix_ids(tokenizer: Tokenizer, branch: Branch, question_text: str = "") -> list[int]:
    """What stands behind the context for a branch; its head reads the last row of it.

    Training and serving both call this.

    Args:
        question_text: of a head over answer codes, see `question_text`.
    """
    return tokenizer.encode_inside(branch.suffix.replace("{question}", question_text))
