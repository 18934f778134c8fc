"""What a JSON Schema may hold, and where a refusal points."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.text.grammar_schema import MAX_DEPTH, MAX_PROPERTIES, SchemaError, check_schema

IGNORED: dict[str, Any] = {
    "uniqueItems": True,
    "not": {"const": 1},
    "if": {"minimum": 1},
    "then": {"minimum": 1},
    "else": {"minimum": 1},
    "contains": {"const": 1},
    "minContains": 2,
    "propertyNames": {"maxLength": 2},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {}},
    "dependencies": {"a": ["b"]},
    "unevaluatedProperties": False,
    "unevaluatedItems": False,
    "additionalItems": False,
    "divisibleBy": 2,
    "disallow": "string",
    "extends": {},
    "contentSchema": {},
    "$dynamicRef": "#a",
    "maxlength": 3,
}


@pytest.mark.parametrize("keyword", IGNORED)
def test_a_keyword_that_would_be_ignored_is_refused_by_its_path(keyword: str) -> None:
    schema = {"type": "object", "properties": {"a/b": {"items": {keyword: IGNORED[keyword]}}}}
    with pytest.raises(SchemaError) as caught:
        check_schema(schema)
    assert caught.value.path == f"/properties/a~1b/items/{keyword}"
    assert keyword in str(caught.value)
    assert caught.value.field == "grammar"


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": {"foo": "bar"}}, "/properties/foo"),  # A43
        ("bar", ""),
        ([], ""),
        ({"properties": []}, "/properties"),
        ({"anyOf": []}, "/anyOf"),
        ({"anyOf": [{}, 3]}, "/anyOf/1"),
        ({"items": [{"type": "integer"}]}, "/items"),  # draft 4's tuples
        ({"type": "objct"}, "/type"),
        ({"type": []}, "/type"),
        ({"enum": []}, "/enum"),
        ({"required": "a"}, "/required"),
        ({"minLength": -1}, "/minLength"),
        ({"minLength": True}, "/minLength"),
        ({"minimum": "a"}, "/minimum"),
        ({"minimum": 3, "exclusiveMinimum": True}, "/exclusiveMinimum"),  # draft 4
        ({"pattern": 3}, "/pattern"),
        ({"multipleOf": 0}, "/multipleOf"),
        ({"x-guidance": {"lenient": True}}, "/x-guidance"),
        ({"minProperties": 2, "required": []}, "/minProperties"),
    ],
)
def test_a_malformed_node_is_named(schema: Any, path: str) -> None:
    with pytest.raises(SchemaError) as caught:
        check_schema(schema)
    assert caught.value.path == path


def test_what_says_nothing_about_values_is_taken() -> None:
    check_schema(
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "T",
            "description": "d",
            "default": {"a": 1},
            "examples": [1],
            "x-order": ["a"],
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/A"}, "title": {"deprecated": True}},
            "minProperties": 2,
            "required": ["a"],
            "$defs": {"A": {"oneOf": [{"type": "null"}, {"const": 1}], "discriminator": {}}},
        }
    )


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        nested(MAX_DEPTH + 1),
        nested(100_000),
        {"properties": {f"p{i}": {} for i in range(MAX_PROPERTIES + 1)}},
        {"enum": ["x" * 200_000]},
        {"anyOf": [{}] * 30_000},
        {"multipleOf": 1_000_003},
        {"allOf": [{"multipleOf": p} for p in (9973, 9967)]},
        {"multipleOf": 1e-300, "items": {"multipleOf": 7}},
        {"anyOf": [{"$ref": f"#/$defs/d{i}"} for i in range(600)]},
        {"minimum": float("nan")},
    ],
)
def test_what_is_too_large_is_refused(schema: Any) -> None:
    with pytest.raises(SchemaError):
        check_schema(schema)


def test_the_limits_themselves_are_allowed() -> None:
    check_schema(nested(MAX_DEPTH))
    check_schema({"properties": {f"p{i}": True for i in range(MAX_PROPERTIES)}})
    check_schema({"multipleOf": 0.01, "items": {"multipleOf": 1000}})
    check_schema({"multipleOf": 99_991})
