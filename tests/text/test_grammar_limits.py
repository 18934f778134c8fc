"""Grammars that are refused, and how long the worst ones take."""

from __future__ import annotations

import json
import random
import threading
import time
from typing import Any

import pytest

from lockstep.text import Tokenizer
from lockstep.text.grammar_matcher import COMPILE_SECONDS, GrammarCompiler
from lockstep.types import Grammar, RequestError
from tests.text.grammars import ROWS, accepts, ids_of, start


@pytest.fixture(scope="module")
def compiler(smollm2: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: smollm2, ROWS)


OVERLAP = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
BAD = [
    Grammar("regex", "("),
    Grammar("regex", ""),
    Grammar("regex", r"(a)\1"),
    Grammar("regex", "a(?=b)"),
    Grammar("regex", r"[^\s\S]"),  # matches nothing
    Grammar("choice", "[]"),
    Grammar("choice", '[""]'),
    Grammar("choice", "{}"),
    Grammar("choice", "["),
    Grammar("json_schema", ""),
    Grammar("json_schema", '"x"'),
    Grammar("json_schema", '{"properties": {"foo": "bar"}}'),
    Grammar("json_schema", '{"uniqueItems": true}'),
    Grammar("json_schema", '{"oneOf": [{"type": "integer"}, {"type": "number"}]}'),
    Grammar("json_schema", '{"type": "integer", "minimum": 3, "maximum": 1}'),
    Grammar("json_schema", '{"$ref": "#"}'),
    Grammar("json_schema", '{"$ref": "#/$defs/none"}'),
    Grammar("json_schema", '{"$ref": "https://example.com/s.json"}'),
    Grammar("json_schema", '{"type": "string", "format": "no-such-format"}'),
    Grammar("json_schema", '{"type": "string", "pattern": "("}'),
    Grammar("ebnf", ""),
    Grammar("ebnf", "start: foo"),
    Grammar("ebnf", "start: start"),
    Grammar("ebnf", 'start: <|no_such_token|> "a"'),
    Grammar("ebnf", "start: @other"),
]


@pytest.mark.parametrize("grammar", BAD, ids=lambda g: f"{g.kind}:{g.source[:40]}")
def test_a_bad_grammar_is_refused_and_the_next_one_works(
    compiler: GrammarCompiler, smollm2: Tokenizer, grammar: Grammar
) -> None:
    for _ in range(2):  # the second time from what is kept
        with pytest.raises(RequestError) as caught:
            compiler.compile(grammar)
        assert caught.value.field == "grammar"
        assert len(str(caught.value)) < 1200
        assert "%llguidance" not in str(caught.value)
        assert "x-guidance" not in str(caught.value)
    assert accepts(compiler, smollm2, Grammar("regex", "ok"), "ok")


@pytest.mark.parametrize(
    ("schema", "path", "told"),
    [
        ({"properties": {"b": {"items": OVERLAP}}}, "/properties/b/items", "anyOf"),
        ({"$defs": {"x": OVERLAP}, "items": {"$ref": "#/$defs/x"}}, "/$defs/x", "anyOf"),
        ({"properties": {"a": {"format": "zip", "type": "string"}}}, "/properties/a", "zip"),
        ({"anyOf": [{"const": 1}, {"type": "string", "pattern": "("}]}, "/anyOf/1", "unclosed"),
        ({"properties": {"a": {"$ref": "#/$defs/no"}}}, "/properties/a", "does not exist"),
    ],
)
def test_a_node_that_the_library_refuses_is_named(
    compiler: GrammarCompiler, schema: dict[str, Any], path: str, told: str
) -> None:
    with pytest.raises(RequestError) as caught:
        compiler.compile(Grammar("json_schema", json.dumps(schema)))
    assert f"at {path}: " in str(caught.value)
    assert told in str(caught.value)


def _chain(count: int, form: str, last: str) -> str:
    rules = [form.format(i, i + 1) for i in range(count)]
    return "\n".join(["start: " + form.partition(":")[0].format(0), *rules, last.format(count)])


def _refs(count: int, keyword: str) -> str:
    defs: dict[str, Any] = {
        f"x{i}": {keyword: [{"$ref": f"#/$defs/x{i + 1}"}, {"$ref": f"#/$defs/x{i + 1}"}]}
        for i in range(count)
    }
    return json.dumps({"$defs": {**defs, f"x{count}": {"const": 1}}, "$ref": "#/$defs/x0"})


HOSTILE = [
    Grammar("regex", "(a|b)*a(a|b){20}"),
    Grammar("regex", "(((a{1,100}){1,100}){1,100}){1,100}"),
    Grammar("regex", "(.{0,1000}){0,1000}"),
    Grammar("regex", r"(\w{1,1000}\s){1,1000}"),
    Grammar("regex", "a{1000000000}"),
    Grammar("regex", "a" * 60_000),
    Grammar("regex", "(" * 20_000 + "a" + ")" * 20_000),
    Grammar("regex", "(x+x+)+y"),
    Grammar("choice", json.dumps([f"word {i}" for i in range(4096)])),
    Grammar("json_schema", '{"type": "string", "minLength": 1000000000}'),
    Grammar("json_schema", '{"type": "string", "minLength": 1000000, "pattern": "^a*$"}'),
    Grammar("json_schema", '{"items": {"type": "integer"}, "minItems": 4000000000}'),
    Grammar("json_schema", '{"type": "integer", "multipleOf": 99991}'),
    Grammar("json_schema", json.dumps({"enum": [f"v{i}" for i in range(9000)]})),
    Grammar(
        "json_schema",
        json.dumps(
            {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}
        ),
    ),
    Grammar("json_schema", _refs(30, "allOf")),
    Grammar("json_schema", _refs(30, "anyOf")),
    Grammar("json_schema", _refs(480, "anyOf")),
    Grammar(
        "json_schema",
        json.dumps({"allOf": [{"pattern": f"(a|b)*a(a|b){{{k}}}"} for k in (10, 11, 12, 13)]}),
    ),
    Grammar("ebnf", _chain(490, 'r{}: r{} | "b"', 'r{}: "a"')),
    Grammar("ebnf", _chain(490, 'T{}: T{} | "b"', 'T{}: "a"')),
    Grammar("ebnf", _chain(30, "T{0}: T{1} T{1}", 'T{}: "a"')),
    Grammar("ebnf", 'start: ("a" ("b" ("c"){1,1000}){1,1000}){1,1000}'),
    Grammar("ebnf", 'start: a a a a a a a a\na: a a | "x" | ""'),
    Grammar("ebnf", 'start: a{0,1000}\na: (T+)?\nT: "a"'),  # found by random grammars
    Grammar("ebnf", "start: (a{0,400}){2}\na: T*\nT: /[a-z ]/"),
    Grammar("ebnf", "start: " + "(" * 5000 + '"a"' + ")" * 5000),
    Grammar("ebnf", _chain(20_000, 'r{}: r{} | "b"', 'r{}: "a"')),
]


@pytest.mark.parametrize("grammar", HOSTILE, ids=lambda g: f"{g.kind}:{g.source[:40]}")
def test_a_hostile_grammar_holds_nobody(
    compiler: GrammarCompiler, smollm2: Tokenizer, grammar: Grammar
) -> None:
    """It is refused, or runs, or ends with an error; in any case soon."""
    began = time.perf_counter()
    try:
        state = start(compiler, grammar, ())
    except RequestError:
        state = None
    assert time.perf_counter() - began < COMPILE_SECONDS / 3
    chance = random.Random(1)
    for _ in range(12):
        if state is None or state.done or state.error:
            break
        began = time.perf_counter()
        allowed = ids_of(state.pending().words())
        if allowed:
            state.advance(chance.choice(allowed))
        assert time.perf_counter() - began < 1.0
    assert accepts(compiler, smollm2, Grammar("regex", "ok"), "ok")


def test_a_compilation_that_does_not_end_is_given_up(smollm2: Tokenizer) -> None:
    blocked = GrammarCompiler(lambda: smollm2, ROWS)
    blocked.compile(Grammar("regex", "a"))
    workers = blocked._workers
    assert workers is not None
    begun, release = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        release.wait(20)

    workers.submit(hang)
    assert begun.wait(5)
    late = blocked.prepare(Grammar("regex", "b"))
    blocked.give_up(late)
    with pytest.raises(RequestError, match="to compile"):
        late.result(0)
    assert accepts(blocked, smollm2, Grammar("regex", "c"), "c")  # on another thread
    release.set()


def test_compiled_grammars_are_kept_but_not_all_of_them(smollm2: Tokenizer) -> None:
    small = GrammarCompiler(lambda: smollm2, ROWS)
    first = small.compile(Grammar("regex", "a0"))
    assert small.compile(Grammar("regex", "a0", name="guided_regex")) is first
    for number in range(1, 70):
        small.compile(Grammar("regex", f"a{number}"))
    assert len(small._kept) <= 64
    assert small.compile(Grammar("regex", "a0")) is not first
