"""Routes whose errors name the exact place in the body: `questions[3].choices[0].value`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from lockstep.types import RequestError

_MOST_MESSAGES = 4  # of a value that fits no member of a union


class PathRoute(APIRoute):
    """A route that answers a body that does not fit with a `RequestError` naming the place."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            try:
                return await handle(request)
            except RequestValidationError as error:
                found = problem(error.errors(), error.body)
                if found is None:
                    raise
                raise found from None

        return handler


def problem(errors: Sequence[Mapping[str, Any]], body: object) -> RequestError | None:
    """What is wrong with a body, and where; None for a body that is no JSON object."""
    if not isinstance(body, dict):
        return None
    found = [(path_of(error["loc"][1:], body, error["type"]), error) for error in errors]
    # A union complains once a member. One that only minds the value is the one that was meant,
    # else the one that got furthest; of equal ones the first.
    path, first = max(
        found, key=lambda entry: (not entry[1]["type"].endswith("_type"), _depth(entry[0]))
    )
    if not path and first["type"] != "extra_forbidden":
        return None
    if first["type"] == "extra_forbidden":
        return RequestError(
            f"unknown parameter: {path or repr(path)}", field=path, code="unknown_parameter"
        )
    if first["type"] == "missing":
        return RequestError(f"missing parameter: {path}", field=path, code="missing_parameter")
    same = dict.fromkeys(error["msg"] for own, error in found if own == path)
    text = "; or: ".join(list(same)[:_MOST_MESSAGES])
    return RequestError(f"{path}: {text}", field=path, code="invalid_type")


def _depth(path: str) -> int:
    return path.count(".") + path.count("[")


def path_of(loc: Sequence[int | str], body: object, kind: str) -> str:
    """A place as a client writes it; names of union members in pydantic's `loc` are left out."""
    path = ""
    value = body
    for place, part in enumerate(loc):
        if isinstance(part, int) and isinstance(value, list) and part < len(value):
            value = value[part]
            path += f"[{part}]"
        elif isinstance(value, dict) and part in value:
            value = value[part]
            path += f".{part}" if path else str(part)
        elif isinstance(value, dict) and kind == "missing" and place == len(loc) - 1:
            path += f".{part}" if path else str(part)
    return path
