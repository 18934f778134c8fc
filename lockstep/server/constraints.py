"""What a client asks the text to look like, in each of the names for it, as a `Grammar`.

`response_format` is OpenAI's; `structured_outputs` and the older `guided_*` are vLLM's.
Only the shape of the request is checked here. Schema, regex and rules are checked where they
are compiled, in the engine's process, and what is wrong comes back as a 400 as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from lockstep.text.grammar import check_ebnf, from_gbnf
from lockstep.types import Grammar, RequestError

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_KINDS = ("json", "regex", "choice", "grammar", "json_object")


def grammar_of(fields: Mapping[str, Any]) -> Grammar | None:
    """The one constraint of a request body; None when its text is free.

    Args:
        fields: `response_format`, `structured_outputs` and `guided_*` of the body; a field
            that is absent or null asks for nothing.

    Raises:
        RequestError: more than one constraint, or one that is malformed.
    """
    found = []
    for name, value in fields.items():
        if value is None:
            continue
        if name == "response_format":
            grammar = response_format(value)
        elif name == "structured_outputs":
            grammar = structured_outputs(value)
        else:
            grammar = _constraint(name.removeprefix("guided_"), value, name)
        if grammar is not None:
            found.append(grammar)
    if len(found) > 1:
        names = " and ".join(grammar.name for grammar in found)
        raise RequestError(f"{names} cannot be given together", field=found[1].name)
    return found[0] if found else None


def response_format(value: Any, name: str = "response_format") -> Grammar | None:
    """`{"type": "text" | "json_object"}` or `{"type": "json_schema", "json_schema": {...}}`.

    Args:
        name: what the client calls the field, for errors.

    Raises:
        RequestError: naming the part at fault.
    """
    kind = _mapping(value, name).get("type")
    if kind == "text":
        _only(value, name, ("type",))
        return None
    if kind == "json_object":
        _only(value, name, ("type",))
        return Grammar("json_object", name=name)
    if kind != "json_schema":
        raise RequestError(
            f"{name}.type must be 'text', 'json_object' or 'json_schema', got {kind!r}", field=name
        )
    _only(value, name, ("type", "json_schema"))
    inner = _mapping(value.get("json_schema"), f"{name}.json_schema", name)
    _only(inner, f"{name}.json_schema", ("name", "description", "schema", "strict"), name)
    return named_schema(inner, name, f"{name}.json_schema")


def named_schema(inner: Mapping[str, Any], field: str, path: str) -> Grammar:
    """The grammar of a schema with `name`, `schema`, `strict` and `description` beside it.

    `strict` changes nothing: a schema that is accepted is always enforced.

    Args:
        field, path: for errors: the field of the body, and where `inner` stands in it.
    """
    label = inner.get("name")
    if not isinstance(label, str) or not _NAME.fullmatch(label):
        raise RequestError(
            f"{path}.name must be 1 to 64 letters, digits, '_' or '-', got {label!r}", field=field
        )
    for key, kind in (("strict", bool), ("description", str)):
        if inner.get(key) is not None and not isinstance(inner[key], kind):
            raise RequestError(f"{path}.{key} must be a {kind.__name__}", field=field)
    if inner.get("schema") is None:
        raise RequestError(f"{path}.schema is missing", field=field)
    return _schema(inner["schema"], field, f"{path}.schema")


def structured_outputs(value: Any, name: str = "structured_outputs") -> Grammar | None:
    """Exactly one of `json`, `regex`, `choice`, `grammar`, `json_object: true`."""
    given = {key: item for key, item in _mapping(value, name).items() if item is not None}
    _only(given, name, _KINDS)
    if len(given) != 1:
        raise RequestError(f"{name} must have exactly one of {', '.join(_KINDS)}", field=name)
    ((key, item),) = given.items()
    return _constraint(key, item, name, f"{name}.{key}")


def _constraint(kind: str, value: Any, name: str, path: str = "") -> Grammar | None:
    path = path or name
    if kind == "json":
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise RequestError(f"{path} is not JSON: {error}", field=name) from None
        return _schema(value, name, path)
    if kind == "json_object":
        if value is not True:
            raise RequestError(f"{path} must be true, got {value!r}", field=name)
        return Grammar("json_object", name=name)
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
            raise RequestError(f"{path} must be a non-empty list of texts", field=name)
        return Grammar("choice", _json(value, path, name), name=name)
    if not isinstance(value, str) or not value:
        raise RequestError(f"{path} must be a non-empty string", field=name)
    _json(value, path, name)
    if kind == "regex":
        return Grammar("regex", value, name=name)
    try:
        source = from_gbnf(value) if "::=" in value else value
        check_ebnf(source)
    except RequestError as error:
        raise RequestError(
            str(error).replace("grammar", path, 1), field=name, code=error.code
        ) from None
    return Grammar("ebnf", source, name=name)


def _schema(value: Any, name: str, path: str) -> Grammar:
    if not isinstance(value, dict | bool):
        raise RequestError(f"{path} must be a JSON Schema (an object), got {value!r}", field=name)
    return Grammar("json_schema", _json(value, path, name), name=name)


def _json(value: Any, path: str, name: str) -> str:
    """Canonical text; the order of keys stays, since properties are written in it."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode()
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} cannot be written as JSON: {error}", field=name) from None
    return text


def _mapping(value: Any, path: str, field: str = "") -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{path} must be an object, got {value!r}", field=field or path)
    return value


def _only(value: Mapping[str, Any], path: str, keys: tuple[str, ...], field: str = "") -> None:
    unknown = sorted(set(value) - set(keys))
    if unknown:
        raise RequestError(
            f"{path} has unknown keys: {', '.join(unknown)}",
            field=field or path,
            code="unknown_parameter",
        )
