"""Masks of grammars: equal to a slow reference, a function of the tokens, bounded in time."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.text import Tokenizer
from lockstep.text.grammar import check_ebnf, from_gbnf, json_rule, literal
from lockstep.text.grammar_matcher import (
    CompiledGrammar,
    GrammarCompiler,
    GrammarState,
    has,
)
from lockstep.types import Grammar, RequestError
from tests.text.grammars import PERSON, ROWS, accepts, ids_of, start, walk


@pytest.fixture(scope="module")
def compiler(smollm2: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: smollm2, ROWS)


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
