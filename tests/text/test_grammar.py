"""Masks of grammars: equal to a slow reference, a function of the tokens, bounded in time."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.text import Tokenizer
from lockstep.text.grammar import check_ebnf, from_gbnf, json_rule, literal
from lockstep.text.grammar_matcher import (
    COMPILE_SECONDS,
    CompiledGrammar,
    GrammarCompiler,
    GrammarState,
    has,
)
from lockstep.types import Grammar, RequestError

ROWS = 49160  # the model's head has a few rows more than SmolLM2's vocabulary
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "nick": {"type": ["string", "null"], "pattern": "^[a-z]{1,6}$"},
        "tags": {"type": "array", "items": {"enum": ["a", "b c", 3, None]}, "maxItems": 3},
    },
    "required": ["name", "nick", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler(smollm2: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: smollm2, ROWS)


def start(compiler: GrammarCompiler, grammar: Grammar, stop_ids: Sequence[int]) -> GrammarState:
    return compiler.compile(grammar).start(stop_ids)


def ids_of(words: np.ndarray) -> list[int]:
    return [int(i) for i in np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))]


def walk(
    state: GrammarState, tokenizer: Tokenizer, seed: int, most: int = 60
) -> tuple[str, list[int], bool]:
    """Text and tokens of a random walk, and whether it came to the grammar's end."""
    chance = np.random.default_rng(seed)
    taken: list[int] = []
    while len(taken) < most and not state.done:
        words = state.pending().words()
        assert not state.error, state.error
        assert words.any() or state.may_end
        if not words.any() or (state.may_end and chance.random() < 0.3):
            return _text(tokenizer, taken), taken, True
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        # Short tokens more often, so that walks end.
        some = [int(token) for token in chance.choice(allowed, 8)]
        token = min(some, key=lambda t: len(tokenizer.token_bytes(t)))
        if token in tokenizer.eos_ids:
            return _text(tokenizer, taken), taken, True
        taken.append(token)
        state.advance(token)
    return _text(tokenizer, taken), taken, state.done


def _text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, tokens)).decode("utf-8", "replace")


# --- masks --------------------------------------------------------------------------------


def viable_regex(pattern: str) -> Callable[[bytes], bool]:
    compiled = regex.compile(pattern.encode(), regex.DOTALL)
    return lambda data: compiled.fullmatch(data, partial=True) is not None


def viable_choice(texts: Sequence[str]) -> Callable[[bytes], bool]:
    return lambda data: any(text.encode().startswith(data) for text in texts)


@pytest.mark.parametrize(
    ("grammar", "viable", "complete"),
    [
        (
            Grammar("regex", r"[A-Z][a-z]{2,9} \d{3}-\d{4}( x)*"),
            viable_regex(r"[A-Z][a-z]{2,9} [0-9]{3}-[0-9]{4}( x)*"),
            lambda data: regex.fullmatch(rb"[A-Z][a-z]{2,9} [0-9]{3}-[0-9]{4}( x)*", data),
        ),
        (
            Grammar("regex", "(ab|a)(c|bcd)+"),
            viable_regex("(ab|a)(c|bcd)+"),
            lambda data: regex.fullmatch(rb"(ab|a)(c|bcd)+", data),
        ),
        (
            Grammar("choice", json.dumps(["yes", "yes sir", "né", "日本 (x)/\\d"])),
            viable_choice(["yes", "yes sir", "né", "日本 (x)/\\d"]),
            lambda data: (
                data.decode("utf-8", "replace") in ("yes", "yes sir", "né", "日本 (x)/\\d")
            ),
        ),
    ],
)
def test_every_mask_equals_trying_each_tokens_bytes(
    compiler: GrammarCompiler,
    smollm2: Tokenizer,
    grammar: Grammar,
    viable: Callable[[bytes], bool],
    complete: Callable[[bytes], object],
) -> None:
    ends = smollm2.eos_ids
    pieces = [(t, smollm2.token_bytes(t)) for t in range(ROWS) if t not in smollm2.special_ids]
    chance = random.Random(3)
    for _ in range(2):
        state = start(compiler, grammar, ends)
        text = b""
        for _ in range(6):
            words = state.pending().words()
            expected = {t for t, data in pieces if data and viable(text + data)}
            found = set(ids_of(words))
            assert found - set(ends) == expected
            assert state.may_end == bool(complete(text))
            assert (found & set(ends)) == (set(ends) if state.may_end else set())
            if not expected:
                break
            token = chance.choice(sorted(expected))
            text += smollm2.token_bytes(token)
            state.advance(token)
            if state.done:
                assert complete(text)
                break


def test_a_mask_of_a_schema_equals_consuming_each_token(
    compiler: GrammarCompiler, smollm2: Tokenizer
) -> None:
    """Against the library's other way in: does a copy take the token?"""
    compiled = compiler.compile(Grammar("json_schema", json.dumps(PERSON)))
    prefix = smollm2.encode('{"name": "Jo', add_special_tokens=False)
    sample = random.Random(1).sample(range(ROWS), 300)
    state, tried = compiled.start(()), compiled._matcher.deep_copy()
    for token in prefix:
        words = state.pending().words()
        assert has(words, token)
        for other in {*sample, *ids_of(words)[:100]}:
            taken = tried.deep_copy().consume_token(other)
            assert has(words, other) == (taken and other not in smollm2.eos_ids)
        state.advance(token)
        tried.consume_token(token)


def test_ids_without_text_and_control_tokens_are_never_allowed(
    compiler: GrammarCompiler, smollm2: Tokenizer
) -> None:
    state = start(compiler, Grammar("regex", "(?s:.*)"), ())
    allowed = set(ids_of(state.pending().words()))
    assert len(allowed) > 40_000
    assert not allowed & smollm2.special_ids
    assert all(smollm2.token_bytes(token) for token in allowed)
    assert max(allowed) < smollm2.vocab_size


def test_the_second_real_vocabulary_too(gemma: Tokenizer) -> None:
    other = GrammarCompiler(lambda: gemma, 262_144)
    grammar = Grammar("json_schema", json.dumps(PERSON))
    walks = [walk(start(other, grammar, gemma.eos_ids), gemma, seed) for seed in range(3)]
    texts = [text for text, _tokens, ended in walks if ended]
    assert texts
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)


# --- where a text ends ----------------------------------------------------------------------


def test_end_tokens_are_allowed_exactly_where_the_grammar_may_end(
    compiler: GrammarCompiler, smollm2: Tokenizer
) -> None:
    (a,) = smollm2.encode("a", add_special_tokens=False)
    eos, other = smollm2.eos_ids[0], smollm2.eos_ids[-1]
    state = start(compiler, Grammar("regex", "(aa)*"), (eos, a))
    for may_end in (True, False, True, False):
        words = state.pending().words()
        assert state.may_end is may_end
        assert has(words, eos) is may_end
        assert not has(words, other)  # not among the request's stop ids
        assert has(words, a)  # an ordinary stop id is text
        state.advance(a)


def test_a_text_that_nothing_can_follow_is_done(
    compiler: GrammarCompiler, smollm2: Tokenizer
) -> None:
    state = start(compiler, Grammar("choice", '["ab"]'), smollm2.eos_ids)
    for token in smollm2.encode("ab", add_special_tokens=False):
        assert not state.done
        state.pending().words()
        state.advance(token)
    assert state.done
    assert not state.error


def test_the_state_is_a_function_of_the_tokens_alone(
    compiler: GrammarCompiler, smollm2: Tokenizer
) -> None:
    """Copies do not see one another, whatever order they run in."""
    grammar = Grammar("json_schema", json.dumps(PERSON))
    alone = []
    for seed in range(4):
        fresh = GrammarCompiler(lambda: smollm2, ROWS)  # nothing was ever run on it
        alone.append(masks(fresh.compile(grammar), smollm2, seed))
    compiled = compiler.compile(grammar)
    crowd = [(compiled.start(()), random.Random(seed), seed) for seed in range(4)]
    found: list[list[bytes]] = [[] for _ in crowd]
    for _ in range(25):
        for state, chance, seed in reversed(crowd):
            if not state.done:
                step(state, chance, found[seed])
    assert found == alone


def step(state: GrammarState, chance: random.Random, found: list[bytes]) -> None:
    words = state.pending().words()
    found.append(words.tobytes())
    state.advance(chance.choice(ids_of(words)))


def masks(compiled: CompiledGrammar, tokenizer: Tokenizer, seed: int) -> list[bytes]:
    state, chance, found = compiled.start(()), random.Random(seed), []
    for _ in range(25):
        if not state.done:
            step(state, chance, found)
    return found


# --- schemas ----------------------------------------------------------------------------------

leaves = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.builds(
        lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
        st.integers(-1000, 1000),
        st.integers(0, 500),
    ),
    st.builds(lambda m: {"type": "integer", "multipleOf": m}, st.integers(1, 40)),
    st.builds(
        lambda low, span: {"type": "number", "exclusiveMinimum": low, "maximum": low + span},
        st.integers(-5, 5),
        st.integers(1, 9),
    ),
    st.builds(
        lambda low, span: {"type": "string", "minLength": low, "maxLength": low + span},
        st.integers(0, 3),
        st.integers(0, 5),
    ),
    st.sampled_from(
        [
            {"type": "string", "pattern": "^[ab]{2,4}$"},
            {"type": "string", "pattern": "x"},
            {"type": "string", "pattern": "^\\d+(\\.\\d)?$", "maxLength": 4},
            {"const": {"a": [1, 'é\n"/']}},
            {"enum": ["", "a", "日本", 1.5, -3, None, True, [1], {"k": {}}]},
            {"type": ["string", "null"], "maxLength": 3},
        ]
    ),
)


def _object(props: dict[str, Any], required: int, closed: bool) -> dict[str, Any]:
    names = list(props)
    schema = {"type": "object", "properties": props, "required": names[:required]}
    return {**schema, "additionalProperties": False} if closed else schema


schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(
            lambda item, low, span: {
                "type": "array",
                "items": item,
                "minItems": low,
                "maxItems": low + span,
            },
            inner,
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        st.builds(
            lambda first, second: {"type": "array", "prefixItems": [first, second], "items": False},
            inner,
            inner,
        ),
        st.builds(
            _object,
            st.dictionaries(st.sampled_from(["a", "b c", "é", "x/y", '"']), inner, max_size=3),
            st.integers(0, 3),
            st.just(True),
        ),
        st.builds(
            lambda value: {
                "type": "object",
                "additionalProperties": value,
                "minProperties": 1,
                "maxProperties": 2,
            },
            inner,
        ),
        st.builds(lambda one, two: {"anyOf": [one, two]}, inner, inner),
        st.builds(
            lambda low: {"items": {"$ref": "#/$defs/leaf"}, "maxItems": low}, st.integers(0, 2)
        ),
        st.just(
            {
                "allOf": [
                    {"type": "object", "properties": {"a": {"type": "integer"}}},
                    {"properties": {"a": {"minimum": 3}, "b": {"const": 1}}, "required": ["a"]},
                ]
            }
        ),
    ),
    max_leaves=5,
)


@settings(max_examples=40)
@given(schema=schemas, leaf=leaves, seed=st.integers(0, 1000))
def test_what_a_random_walk_writes_is_valid(
    compiler: GrammarCompiler, smollm2: Tokenizer, schema: dict[str, Any], leaf: Any, seed: int
) -> None:
    schema = {**schema, "$defs": {"leaf": leaf}}
    state = start(compiler, Grammar("json_schema", json.dumps(schema)), smollm2.eos_ids)
    text, _tokens, ended = walk(state, smollm2, seed, most=120)
    if ended:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def test_walks_of_a_schema_come_to_an_end(compiler: GrammarCompiler, smollm2: Tokenizer) -> None:
    ended = 0
    for seed in range(20):
        state = start(compiler, Grammar("json_schema", json.dumps(PERSON)), smollm2.eos_ids)
        text, _tokens, end = walk(state, smollm2, seed, most=150)
        if end:
            jsonschema.validate(json.loads(text), PERSON)
            ended += 1
    assert ended >= 10  # else the property above says little


def test_any_object_is_json(compiler: GrammarCompiler, smollm2: Tokenizer) -> None:
    for seed in range(10):
        text, _tokens, end = walk(
            start(compiler, Grammar("json_object"), smollm2.eos_ids), smollm2, seed, most=300
        )
        if end:
            assert isinstance(json.loads(text), dict)


def test_space_between_values_is_bounded(compiler: GrammarCompiler, smollm2: Tokenizer) -> None:
    state = start(compiler, Grammar("json_object"), smollm2.eos_ids)
    for token in smollm2.encode('{"a":', add_special_tokens=False):
        state.pending().words()
        state.advance(token)
    newlines = smollm2.encode("\n", add_special_tokens=False)[0]
    assert has(state.pending().words(), newlines)
    state.advance(newlines)
    assert not has(state.pending().words(), newlines)


# --- other forms --------------------------------------------------------------------------------


def accepts(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar, text: str) -> bool:
    state = start(compiler, grammar, tokenizer.eos_ids)
    for token in tokenizer.encode(text, add_special_tokens=False):
        if not has(state.pending().words(), token):
            return False
        state.advance(token)
    return state.done or (state.pending().words() is not None and state.may_end)


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("a/b", ["a/b"], ["ab"]),
        (r"\d+", ["42"], ["٣", ""]),  # \d is ASCII, as in JSON Schema
        ("^abc$", ["abc"], ["abcd"]),
        ("a\nb", ["a\nb"], ["anb"]),
        (r"[/\\]+", ["/\\"], ["x"]),
        ("(?i)yes", ["YES", "yEs"], ["no"]),
        (".", ["é", "日"], ["\n"]),
    ],
)
def test_regular_expressions(
    compiler: GrammarCompiler, smollm2: Tokenizer, pattern: str, good: list[str], bad: list[str]
) -> None:
    grammar = Grammar("regex", pattern)
    assert all(accepts(compiler, smollm2, grammar, text) for text in good)
    assert not any(accepts(compiler, smollm2, grammar, text) for text in bad)


def test_an_ebnf_with_json_inside(compiler: GrammarCompiler, smollm2: Tokenizer) -> None:
    quoted = literal('<tool "x">\n')
    source = f'start: {quoted} call+\ncall: {json_rule(PERSON)} ";"'
    person = '{"name": "Jo", "nick": null, "tags": ["b c"]}'
    grammar = Grammar("ebnf", source)
    assert accepts(compiler, smollm2, grammar, f'<tool "x">\n{person};{person};')
    assert not accepts(compiler, smollm2, grammar, f'<tool "x">\n{person}')
    assert not accepts(compiler, smollm2, grammar, f'<tool "x">\n{person.replace("null", "3")};')


def test_gbnf_is_read_too(compiler: GrammarCompiler, smollm2: Tokenizer) -> None:
    source = from_gbnf('root ::= "select " col (", " col)*\ncol ::= "a" | [b-d]+')
    assert accepts(compiler, smollm2, Grammar("ebnf", source), "select a, bcd")
    assert not accepts(compiler, smollm2, Grammar("ebnf", source), "select e")
    with pytest.raises(RequestError):
        from_gbnf("root ::= (((")
    with pytest.raises(RequestError):
        from_gbnf("root ::= " + "(" * 50_000)


@pytest.mark.parametrize(
    "source",
    [
        '%llguidance {"no_forcing": false}\nstart: "a"',
        'start: %json {"x-guidance": {"lenient": true}, "uniqueItems": true}',
        "start: a\na[temperature=0.5]: /x/",
        "start: a\na[max_tokens=5]: /x/",
        'start: a "b"\n  a[stop="x"]: /x/',
        'start: %json {"minProperties": 3}',
        'start: %json {"items": {"not": {}}}',
        'start: "' + "a" * 70_000 + '"',
    ],
)
def test_a_clients_ebnf_may_not_ask_for_what_is_not_done(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_ebnf(source)
    assert caught.value.field == "grammar"


# --- what is refused, and how long it takes ----------------------------------------------------

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
