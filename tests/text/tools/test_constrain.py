"""Grammars of calls: calls pass them, and whatever passes them is read as calls."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from lockstep.text import Tokenizer
from lockstep.text.answer import AnswerFormat
from lockstep.text.grammar_matcher import GrammarCompiler, GrammarState, has
from lockstep.text.reasoning import THINK_MARKERS
from lockstep.text.tools import Function, ToolChoice
from lockstep.text.tools.constrain import constrain
from lockstep.text.tools.registry import FORMATS
from lockstep.types import Grammar, RequestError
from tests.text.tools.formats import Call, read, summary, write

NAMES = sorted(FORMATS)
SCHEMA = {
    "type": "object",
    "properties": {
        "place": {"enum": ["Paris", 'Zürich "x"']},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "exact": {"type": "boolean"},
        "list": {"type": "array", "items": {"$ref": "#/$defs/level"}, "maxItems": 2},
    },
    "required": ["place", "exact"],
    "additionalProperties": False,
    "$defs": {"level": {"enum": [1, "low"]}},
}
STRICT = Function("look", "", SCHEMA, strict=True)
NOW = Function("now")
CALLS: list[Call] = [
    ("look", {"place": "Paris", "days": 12, "exact": True, "list": [1, "low"]}),
    ("look", {"place": 'Zürich "x"', "exact": False}),
    ("now", {}),
]


@pytest.fixture(scope="module")
def compiler(smollm2: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: smollm2, smollm2.vocab_size)


def form(
    name: str, functions: tuple[Function, ...] = (STRICT, NOW), **settings: Any
) -> AnswerFormat:
    return AnswerFormat(tools=FORMATS[name], functions=functions, eager=True, **settings)


def start(compiler: GrammarCompiler, grammar: Grammar | None, tokenizer: Tokenizer) -> GrammarState:
    assert grammar is not None
    return compiler.compile(grammar).start(tokenizer.eos_ids)


def passes(state: GrammarState, tokenizer: Tokenizer, text: str) -> tuple[str, bool]:
    """As much of a text as the grammar lets through, and whether it may end there."""
    taken: list[int] = []
    for token in tokenizer.encode(text, add_special_tokens=False):
        if not has(state.compute(), token):
            break
        state.advance(token)
        taken.append(token)
    if not state.done:
        state.compute()
    return tokenizer.decode(taken), state.done or state.may_end


def written(name: str, calls: list[Call]) -> str:
    text = write(name, calls)
    if name == "pythonic":  # a string that holds a quote: the grammar writes JSON's quotes
        text = text.replace("'Paris'", '"Paris"').replace("'Zürich \"x\"'", '"Zürich \\"x\\""')
        text = text.replace("'low'", '"low"').replace("True", "true").replace("False", "false")
    return text


@pytest.mark.parametrize("name", NAMES)
def test_a_free_text_is_an_argument(
    compiler: GrammarCompiler, smollm2: Tokenizer, name: str
) -> None:
    parameters = {
        "type": "object",
        "properties": {"text": {"type": "string"}},
        "required": ["text"],
        "additionalProperties": False,
    }
    note = Function("note", "", parameters, strict=True)
    grammar = constrain(form(name, (note,)), ToolChoice("required"), None, {})
    text = write(name, [("note", {"text": "Buy milk"})]).replace("'Buy milk'", '"Buy milk"')
    assert passes(start(compiler, grammar, smollm2), smollm2, text) == (text, True)
    wrong = text.replace("text", "title")
    assert passes(start(compiler, grammar, smollm2), smollm2, wrong)[0] != wrong


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", ["required", "auto"])
def test_calls_pass_and_others_do_not(
    compiler: GrammarCompiler, smollm2: Tokenizer, name: str, mode: str
) -> None:
    choice = ToolChoice(mode)  # type: ignore[arg-type]
    grammar = constrain(form(name), choice, None, {})
    text = written(name, CALLS)
    assert passes(start(compiler, grammar, smollm2), smollm2, text) == (text, True)
    for wrong in (text.replace("12", "123"), text.replace("Paris", "Rome")):
        passed, _ = passes(start(compiler, grammar, smollm2), smollm2, wrong)
        assert passed != wrong
    free, ends = passes(start(compiler, grammar, smollm2), smollm2, "Hello (you) there.")
    assert (free == "Hello (you) there." and ends) == (mode == "auto")
    single = constrain(form(name), ToolChoice(choice.mode, None, parallel=False), None, {})
    one = written(name, CALLS[:1])
    assert passes(start(compiler, single, smollm2), smollm2, one) == (one, True)
    assert passes(start(compiler, single, smollm2), smollm2, text)[0] != text


@pytest.mark.parametrize("name", NAMES)
def test_whatever_a_grammar_lets_through_is_calls(
    compiler: GrammarCompiler, smollm2: Tokenizer, name: str
) -> None:
    """Random walks: at most 150 tokens, then those that lead to an end soonest are few."""
    grammar = constrain(form(name), ToolChoice("required", None, parallel=True), None, {})
    complete = 0
    for seed in range(12):
        chance = random.Random(seed)
        state = start(compiler, grammar, smollm2)
        taken: list[int] = []
        while not state.done and len(taken) < 150:
            words = state.compute()
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            if state.may_end and chance.random() < 0.5:
                break
            ids = [int(i) for i in allowed if int(i) not in smollm2.special_ids]
            taken.append(chance.choice(ids))
            state.advance(taken[-1])
            assert not state.error
        events = read(smollm2.decode(taken, skip_special_tokens=False), form(name), [])
        found = summary(events)
        assert "[TOOL_CALLS]".startswith(found.content)  # a marker that the walk left unfinished
        for called, arguments in found.calls:
            if called == "look":
                jsonschema.validate(json.loads(arguments), SCHEMA)
            else:
                assert json.loads(arguments) == {}
        complete += bool(found.calls) and not found.open_calls
    assert complete >= 6


@pytest.mark.parametrize("name", NAMES)
def test_reasoning_may_or_must_come_first(
    compiler: GrammarCompiler, smollm2: Tokenizer, name: str
) -> None:
    calls = written(name, CALLS[:1])
    thinking = THINK_MARKERS["think"]
    may = constrain(form(name, thinking=thinking), ToolChoice("required"), None, {})
    must = constrain(
        form(name, thinking=thinking, thinking_opened=True), ToolChoice("required"), None, {}
    )
    for text in (calls, f"<think>\nWell {{x}}.\n</think>\n\n{calls}"):
        assert passes(start(compiler, may, smollm2), smollm2, text) == (text, True)
    text = f"\nWell.\n</think>\n\n{calls}"
    assert passes(start(compiler, must, smollm2), smollm2, text) == (text, True)
    assert not passes(start(compiler, must, smollm2), smollm2, calls)[1]


ANSWER = Grammar(
    "json_schema",
    '{"type": "object", "properties": {"a": {"type": "null"}}, '
    '"required": ["a"], "additionalProperties": false}',
    name="response_format",
)


@pytest.mark.parametrize("name", NAMES)
def test_calls_beside_a_response_format(
    compiler: GrammarCompiler, smollm2: Tokenizer, name: str
) -> None:
    grammar = constrain(form(name), ToolChoice("auto"), ANSWER, {})
    for text in (written(name, CALLS), '{"a": null}'):
        assert passes(start(compiler, grammar, smollm2), smollm2, text) == (text, True)
    assert passes(start(compiler, grammar, smollm2), smollm2, "Hello")[0] == ""


@pytest.mark.parametrize(
    ("answer", "good", "bad"),
    [
        (Grammar("json_object"), '{"a": [1]}', "[1]"),
        (Grammar("choice", '["yes", "no"]'), "no", "maybe"),
        (Grammar("regex", "[a-z]+/[0-9]"), "ab/7", "ab-7"),
        (ANSWER, '{"a": null}', '{"a": 1}'),
    ],
)
def test_a_response_format_behind_reasoning(
    compiler: GrammarCompiler, smollm2: Tokenizer, answer: Grammar, good: str, bad: str
) -> None:
    plain = AnswerFormat(thinking=THINK_MARKERS["think"])
    grammar = constrain(plain, ToolChoice(), answer, {})
    for before in ("", "<think>\nHm.\n</think>\n\n"):
        text = before + good
        assert passes(start(compiler, grammar, smollm2), smollm2, text) == (text, True)
        assert passes(start(compiler, grammar, smollm2), smollm2, before + bad)[0] != before + bad


def test_free_answers_need_no_grammar() -> None:
    loose = AnswerFormat(tools=FORMATS["hermes"], functions=(NOW,))
    assert constrain(loose, ToolChoice("auto"), None, {}) is None
    assert constrain(loose, ToolChoice("none"), None, {}) is None
    assert constrain(AnswerFormat(), ToolChoice(), ANSWER, {}) is ANSWER


def test_control_tokens_are_named_by_id() -> None:
    grammar = constrain(form("mistral"), ToolChoice("required"), None, {"[TOOL_CALLS]": 5})
    assert grammar is not None
    assert "<[5]>" in grammar.source
    assert '"[TOOL_CALLS]"' not in grammar.source


def test_a_schema_beyond_the_library() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    loose = constrain(
        form("hermes", (Function("f", "", schema),)), ToolChoice("required"), None, {}
    )
    assert loose is not None
    assert "uniqueItems" not in loose.source
    with pytest.raises(RequestError, match=r"strict function 'f'.*uniqueItems") as caught:
        constrain(form("hermes", (Function("f", "", schema, True),)), ToolChoice(), None, {})
    assert caught.value.field == "tools"


def test_a_grammar_of_rules_cannot_stand_beside_tools() -> None:
    with pytest.raises(RequestError, match="beside tools") as caught:
        constrain(
            form("hermes"), ToolChoice(), Grammar("ebnf", 'start: "a"', name="guided_grammar"), {}
        )
    assert caught.value.field == "guided_grammar"


def test_an_unkept_response_format_names_its_field() -> None:
    bad = Grammar("json_schema", '{"type": "array", "uniqueItems": true}', name="response_format")
    with pytest.raises(RequestError, match="uniqueItems") as caught:
        constrain(form("hermes"), ToolChoice(), bad, {})
    assert caught.value.field == "response_format"
