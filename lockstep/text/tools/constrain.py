"""Grammars that keep an answer to calls in form, or to calls and a response format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from lockstep.text.answer import AnswerFormat
from lockstep.text.grammar import json_rule, literal, to_lark
from lockstep.text.grammar_schema import check_schema
from lockstep.text.tools.base import Function, ToolChoice
from lockstep.text.tools.rules import Rules, any_of
from lockstep.types import Grammar, RequestError

ANY_OBJECT = {"type": "object"}


def constrain(
    form: AnswerFormat,
    choice: ToolChoice,
    answer: Grammar | None,
    control_ids: Mapping[str, int],
    *,
    loose: bool = False,
) -> Grammar | None:
    """What holds an answer to its form; None when it is free.

    Required calls, calls of strict functions, the bound of one call, and a response
    format are kept by a grammar. Calls that the model makes at will are free until they
    begin. Reasoning is free, and may or must come first as the prompt has it.

    Args:
        form: the functions that may be called, and the reasoning.
        answer: of a response format.
        loose: the arguments of functions that are not strict are any object.

    Raises:
        RequestError: a strict function's schema that cannot be kept, or an EBNF grammar
            beside calls or reasoning.
    """
    calling = form.tools is not None and choice.mode != "none"
    strict = any(function.strict for function in form.functions) or choice.parallel is False
    required = choice.mode == "required"
    if answer is None and not (calling and (required or strict)):
        return None
    if not calling and form.thinking is None:
        return answer
    rules = Rules(control_ids.get)
    name = "tools" if calling or answer is None else answer.name
    parts: list[str] = []
    if calling and form.tools is not None:
        functions = [_keepable(function, loose) for function in form.functions]
        write = form.tools.calls if required or answer is not None else form.tools.mixed
        parts.append(rules.rule(write(rules, functions, several=choice.parallel is not False)))
    if answer is not None and not (calling and required):
        try:
            parts.append(_answer(answer))
        except RequestError as error:
            message = str(error).replace("grammar", answer.name, 1)
            raise RequestError(message, field=answer.name, code=error.code) from None
    start = any_of(*parts)
    if form.thinking is not None:
        start = f"{_thinking(rules, form)} {start}"
    return Grammar("ebnf", rules.source(start), name=name)


def _thinking(rules: Rules, form: AnswerFormat) -> str:
    """Reasoning and the white space behind it, which may stand first."""
    assert form.thinking is not None
    space = rules.terminal(r"/\s*/")
    thought = f"{rules.until(form.thinking.end)} {space}"
    if form.thinking_opened:
        return thought
    opening = rules.marker(form.thinking.start)
    if opening.startswith('"'):
        opening = rules.rule(opening, "[lazy]")
    return f"({opening} {thought})?"


def _answer(answer: Grammar) -> str:
    """A response format as an expression of a Lark rule."""
    match answer.kind:
        case "json_schema":
            return json_rule(json.loads(answer.source))
        case "json_object":
            return json_rule(ANY_OBJECT)
        case "choice":
            return any_of(*map(literal, json.loads(answer.source)))
        case "regex":
            return to_lark(answer).partition("\n")[0].removeprefix("start: ")
        case "ebnf":
            raise RequestError(
                "a grammar in EBNF cannot stand beside tools or reasoning", field="grammar"
            )


def _keepable(function: Function, loose: bool) -> Function:
    """The function with a schema that a grammar keeps in full, as far as can be told here.

    For one that is not strict, a schema beyond that is left to the model.
    """
    if loose and not function.strict:
        return replace(function, parameters=ANY_OBJECT)
    try:
        check_schema(function.schema)
    except RequestError as error:
        if function.strict:
            raise RequestError(
                f"tools: the parameters of strict function {function.name!r}: {error}",
                field="tools",
                code="invalid_function_parameters",
            ) from None
        return replace(function, parameters=ANY_OBJECT)
    return function
