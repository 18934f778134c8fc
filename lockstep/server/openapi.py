"""`GET /openapi.json`: every body and reply as a JSON Schema, errors included.

FastAPI describes the bodies, which are pydantic's. Replies are msgspec's, which it cannot read:
a route names its own with `responses=returns(...)`, and `describe` puts their schemas in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from lockstep.server.errors import ErrorReply
from lockstep.server.operations import Operations

_PLACEHOLDER = "reply:"
_PREFIX = "reply."  # of schemas: a call that is sent and one that is received differ
_replies: dict[str, Any] = {}  # what routes return, by name; filled as their modules load

Responses = dict[int | str, dict[str, Any]]


def returns(reply: Any, *, event: Any = None) -> Responses:
    """What a route answers with, for `responses=`.

    Args:
        reply: a msgspec type, sent as JSON.
        event: of a route that may stream: the type of its server-sent events.
    """
    content: dict[str, Any] = {"application/json": {"schema": _reference(reply)}}
    if event is not None:
        content["text/event-stream"] = {
            "schema": {
                "type": "string",
                "description": "With stream: true: server-sent events with one JSON object each.",
                "x-event": _reference(event),
            }
        }
    return {200: {"description": "The answer.", "content": content}}


def returns_other(media_type: str, *statuses: int) -> Responses:
    """The same for what is no JSON.

    Args:
        statuses: beside 200.
    """
    content = {media_type: {"schema": {"type": "string", "format": "binary"}}}
    return {
        status: {"description": "The content.", "content": content} for status in (200, *statuses)
    }


def errors() -> Responses:
    """What every route answers with when it cannot do what it was asked to."""
    content = {"application/json": {"schema": _reference(ErrorReply)}}
    return {
        "4XX": {"description": "The request cannot be served.", "content": content},
        "5XX": {"description": "The server cannot serve it now.", "content": content},
    }


def describe(app: FastAPI, operations: Operations) -> Callable[[], dict[str, Any]]:
    """For `app.openapi`: the document, made when it is first asked for."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, routes=app.routes)
            app.openapi_schema = _complete(made, secured=operations.keyring.needed)
        return app.openapi_schema

    return openapi


def _reference(reply: Any) -> dict[str, str]:
    name = _PLACEHOLDER + repr(reply)
    _replies[name] = reply
    return {"$ref": name}


def _complete(document: dict[str, Any], *, secured: bool) -> dict[str, Any]:
    schemas, components = msgspec.json.schema_components(
        _replies.values(), ref_template=f"#/components/schemas/{_PREFIX}{{name}}"
    )
    found: dict[str, Any] = _replaced(document, dict(zip(_replies, schemas, strict=True)))
    for operation in (each for path in found["paths"].values() for each in path.values()):
        _only_named(operation["responses"])
    known = found.setdefault("components", {}).setdefault("schemas", {})
    known.update({_PREFIX + name: schema for name, schema in components.items()})
    if secured:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def _only_named(responses: dict[str, Any]) -> None:
    """Take out FastAPI's own guess: JSON of any kind, where a route names something else."""
    content = responses["200"]["content"]
    if content["application/json"]["schema"] == {}:
        del content["application/json"]
    if not content:
        del responses["200"]  # never given


def _replaced(node: Any, schemas: dict[str, Any]) -> Any:
    """A copy with the schemas in place of what stands for them."""
    if isinstance(node, dict):
        if str(node.get("$ref", "")).startswith(_PLACEHOLDER):
            return schemas[node["$ref"]]
        return {key: _replaced(value, schemas) for key, value in node.items()}
    if isinstance(node, list):
        return [_replaced(value, schemas) for value in node]
    return node
