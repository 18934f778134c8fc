"""Checks a JSON Schema before the grammar library sees it, and says which node is at fault.

The library leaves out some keywords in silence (`additionalItems`, `divisibleBy`, anything
that it has never heard of) and counts repeated keys of an object for `minProperties`. Here a
keyword is either enforced, known to say nothing about a value, or refused by its path.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from lockstep.types import RequestError

MAX_SCHEMA_BYTES = 128 * 1024
MAX_DEPTH = 64  # of nested schemas
MAX_NODES = 20_000
MAX_PROPERTIES = 1_000  # of one object; the library's time grows with the square
MAX_REFERENCES = 500  # distinct ones: the library follows a chain of them by recursion
MAX_MULTIPLE = 100_000  # least common multiple of all `multipleOf`: states of its automaton

_ONE = {"additionalProperties", "items"}
_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}
_MAPS = {"properties", "patternProperties", "$defs", "definitions"}
_COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_TEXTS = {"$ref", "pattern", "format", "$id", "$anchor"}
_OTHERS = {"type", "enum", "const", "required"}
_ENFORCED = _ONE | _LISTS | _MAPS | _COUNTS | _NUMBERS | _TEXTS | _OTHERS
# Say nothing about whether a value is valid. The second line has habits of schema writers.
_ANNOTATIONS = {
    *("$schema", "$comment", "$vocabulary", "title", "description", "default", "examples"),
    *("deprecated", "readOnly", "writeOnly", "contentEncoding", "contentMediaType"),
    *("example", "discriminator", "xml", "externalDocs", "propertyOrdering", "enumNames"),
    *("enumDescriptions", "markdownDescription", "errorMessage", "strict"),
}
_TYPES = ("null", "boolean", "object", "array", "number", "integer", "string")


class SchemaError(RequestError):
    """A schema that cannot be enforced: `path` is the JSON pointer of the node at fault."""

    def __init__(self, path: str, message: str, code: str = "invalid_schema") -> None:
        where = path or "the root"
        super().__init__(f"JSON schema, at {where}: {message}", field="grammar", code=code)
        self.path = path


def check_schema(schema: Any) -> None:
    """Refuse a schema that is malformed, too large, or that the library would not enforce.

    Raises:
        SchemaError: naming the node by its JSON pointer.
    """
    try:
        size = len(json.dumps(schema, ensure_ascii=False, allow_nan=False).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError("", f"it cannot be written as JSON ({error})") from None
    if size > MAX_SCHEMA_BYTES:
        raise SchemaError("", f"it has {size} bytes, at most {MAX_SCHEMA_BYTES} are allowed")
    _Walk().visit(schema, "", 0)


class _Walk:
    """One pass over a schema; holds what is counted over the whole of it."""

    def __init__(self) -> None:
        self.nodes = 0
        self.references: set[str] = set()
        self.multiple = 1  # of the digits of every multipleOf
        self.exponents: list[int] = []  # and their powers of ten

    def visit(self, schema: Any, path: str, depth: int) -> None:
        self.nodes += 1
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            raise SchemaError(path, f"a schema is an object or a boolean, not {_short(schema)}")
        if depth > MAX_DEPTH:
            raise SchemaError(path, f"schemas are nested more than {MAX_DEPTH} deep")
        if self.nodes > MAX_NODES:
            raise SchemaError(path, f"it has more than {MAX_NODES} nodes")
        for keyword, value in schema.items():
            self._keyword(keyword, value, f"{path}/{_escape(keyword)}")
        _check_min_properties(schema, path)
        for child, where in children(schema, path):
            self.visit(child, where, depth + 1)

    def _keyword(self, keyword: str, value: Any, path: str) -> None:
        if keyword in _ANNOTATIONS or keyword.startswith("x-"):
            if keyword == "x-guidance":
                raise SchemaError(path, "options of the grammar library are not taken")
            return
        if keyword not in _ENFORCED:
            raise SchemaError(
                path,
                f"{keyword!r} is not enforced by this server; take it out, or ask for it in words",
                "unsupported_schema",
            )
        wrong = _wrong_value(keyword, value)
        if wrong:
            raise SchemaError(path, f"{wrong}, not {_short(value)}")
        if keyword == "$ref":
            self.references.add(value)
            if len(self.references) > MAX_REFERENCES:
                raise SchemaError(path, f"more than {MAX_REFERENCES} definitions are referred to")
        elif keyword == "multipleOf":
            self._multiple(value, path)

    def _multiple(self, value: float, path: str) -> None:
        _sign, digits, exponent = Decimal(str(value)).normalize().as_tuple()
        assert isinstance(exponent, int)  # finite
        self.multiple = math.lcm(self.multiple, int("".join(map(str, digits))))
        self.exponents.append(exponent)
        spread = max(self.exponents) - min(self.exponents)
        if spread > 9 or self.multiple * 10**spread > MAX_MULTIPLE:
            raise SchemaError(
                path,
                f"the least common multiple of all multipleOf may be at most {MAX_MULTIPLE}",
                "unsupported_schema",
            )


def children(schema: Mapping[str, Any], path: str = "") -> Iterator[tuple[Any, str]]:
    """The schemas directly inside a checked one, and where each stands."""
    for keyword, value in schema.items():
        where = f"{path}/{_escape(keyword)}"
        if keyword in _ONE:
            yield value, where
        elif keyword in _LISTS:
            yield from ((child, f"{where}/{index}") for index, child in enumerate(value))
        elif keyword in _MAPS:
            yield from ((child, f"{where}/{_escape(name)}") for name, child in value.items())


def _wrong_value(keyword: str, value: Any) -> str:
    """What the keyword's value should be, if it is something else."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if keyword in _LISTS and not (isinstance(value, list) and value):
        return "it takes a non-empty list of schemas"
    if keyword in _MAPS:
        if not isinstance(value, dict):
            return "it takes an object of schemas"
        if keyword in ("properties", "patternProperties") and len(value) > MAX_PROPERTIES:
            return f"it takes at most {MAX_PROPERTIES} entries ({len(value)} here)"
    if keyword in _COUNTS and not (isinstance(value, int) and number and value >= 0):
        return "it takes an integer of at least 0"
    if keyword in _NUMBERS and not (number and math.isfinite(value)):
        return "it takes a number"
    if keyword == "multipleOf" and not value > 0:
        return "it takes a number above 0"
    if keyword in _TEXTS and not isinstance(value, str):
        return "it takes a string"
    if keyword == "enum" and not (isinstance(value, list) and value):
        return "it takes a non-empty list of values"
    if keyword == "required" and not (
        isinstance(value, list) and all(isinstance(name, str) for name in value)
    ):
        return "it takes a list of property names"
    if keyword == "type":
        names = value if isinstance(value, list) else [value]
        if not names or not all(isinstance(name, str) and name in _TYPES for name in names):
            return f"it takes one of {', '.join(_TYPES)}, or a list of them"
    return ""


def _check_min_properties(schema: Mapping[str, Any], path: str) -> None:
    """At most one property may be asked for beyond the required ones.

    The library counts properties without looking whether two of them have one name.
    """
    least = schema.get("minProperties", 0)
    required = len(set(schema.get("required", ())))
    if least > required + 1:
        raise SchemaError(
            f"{path}/minProperties",
            f"{least} is enforced only up to one more than the required properties ({required})",
            "unsupported_schema",
        )


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
