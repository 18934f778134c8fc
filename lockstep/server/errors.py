"""Every error as OpenAI's clients expect it: {"error": {message, type, param, code}}."""

from __future__ import annotations

import http.client
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lockstep.engine.client import EngineUnavailable
from lockstep.outputs import GenerationError
from lockstep.server import calls
from lockstep.server.paths import problem
from lockstep.types import LockstepError, RequestError

log = logging.getLogger("lockstep.server")

QUEUE_RETRY_SECONDS = 1
CLIENT_CLOSED_REQUEST = 499  # nobody reads it; it shows in the access log
MAX_MESSAGE = 2000  # characters; what a client wrote may be said back to it, not all of megabytes
MAX_PARAM = 200
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
# Codes of errors that the framework raises, by status.
_CODES = {
    400: "invalid_body",
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    416: "range_not_satisfiable",
}


class ErrorBody(msgspec.Struct):
    """The inner object of an error reply."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct):
    """An error reply."""

    error: ErrorBody


class NotFound(RequestError):
    """The request names something that is not here."""


class NotAllowed(RequestError):
    """The caller has shown no key, a wrong one, or one that may not do this.

    Attributes:
        status: 401 or 403.
    """

    def __init__(self, message: str, *, code: str, status: int = 401) -> None:
        super().__init__(message, code=code)
        self.status = status


class RateLimited(RequestError):
    """The caller has used what its limits allow.

    Attributes:
        retry_after: seconds until it may try again.
    """

    def __init__(self, message: str, *, code: str, retry_after: float) -> None:
        super().__init__(message, code=code)
        self.retry_after = retry_after


class RequestCancelled(RequestError):
    """The server's operator ended the request."""


class Draining(EngineUnavailable):
    """The server takes no new requests."""


class UnknownModel(NotFound):
    """The request names a model that is not served here."""


class TooLarge(RequestError):
    """More bytes than a limit allows."""


class UnsupportedEncoding(RequestError):
    """The body is compressed."""


class StorageUnavailable(LockstepError):
    """The data directory takes no more: the disk is full or fails."""


def describe(error: Exception) -> tuple[int, ErrorReply, dict[str, str]]:
    """Status, body and headers for an error that a request ran into."""
    match error:
        case NotFound():
            return _reply(404, str(error), param=error.field or None, code=error.code)
        case TooLarge():
            return _reply(413, str(error), param=error.field or None, code=error.code)
        case UnsupportedEncoding():
            return _reply(415, str(error), code=error.code)
        case NotAllowed():
            headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
            return _reply(error.status, str(error), code=error.code, headers=headers)
        case RateLimited():
            headers = {"Retry-After": _whole(error.retry_after)}
            return _reply(429, str(error), code=error.code, headers=headers)
        case RequestError(code="branch_replaced"):  # clients try again by themselves
            return _reply(409, str(error), param=error.field or None, code=error.code)
        case RequestError(code="queue_full"):
            headers = {"Retry-After": str(QUEUE_RETRY_SECONDS)}
            return _reply(429, str(error), code=error.code, headers=headers)
        case RequestError():
            return _reply(400, str(error), param=error.field or None, code=error.code)
        case EngineUnavailable():
            headers = {}
            if error.retry_after is not None:
                headers["Retry-After"] = _whole(error.retry_after)
            code = "draining" if isinstance(error, Draining) else "engine_unavailable"
            return _reply(503, str(error), code=code, headers=headers)
        case StorageUnavailable():
            return _reply(507, str(error), code="storage_unavailable")
        case GenerationError() if str(error).startswith("grammar: "):
            # The client's own constraints leave nothing to write, or are too complex to follow.
            return _reply(400, str(error), code="grammar_error")
        case LockstepError():
            return _reply(500, str(error), code="engine_error")
        case _:
            return _reply(500, "the server met an unexpected error", code="internal_error")


def response(error: Exception) -> Response:
    """The HTTP response for an error."""
    status, body, headers = describe(error)
    return _json(status, body, headers)


def too_large_message(limit: int) -> str:
    """What a body over the limit is told."""
    return f"the request body is larger than {limit} bytes"


def too_large(limit: int) -> Response:
    """The response to a body over the limit."""
    return _json(*_reply(413, too_large_message(limit), code="request_too_large"))


class OneShape:
    """Gives errors that a library writes by itself, such as for a bad `Range`, the same shape."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: Message | None = None
        told = b""

        async def replacing(message: Message) -> None:
            nonlocal start, told
            if message["type"] == "http.response.start" and _is_foreign(message):
                start = message
            elif start is None:
                await send(message)
            else:
                told += message.get("body", b"")
                if not message.get("more_body", False):
                    await _in_shape(start, told)(scope, receive, send)

        await self._app(scope, receive, replacing)


def _is_foreign(start: Message) -> bool:
    kind = Headers(raw=start["headers"]).get("content-type")
    return start["status"] >= 400 and kind != "application/json"


def _in_shape(start: Message, told: bytes) -> Response:
    """What goes out in place of an error that a library has written."""
    status, headers = start["status"], Headers(raw=start["headers"])
    text = told.decode(errors="replace") or http.client.responses.get(status, "no more is known")
    code = {400: "invalid_request"}.get(status) or _CODES.get(status, "http_error")
    kept = {name: headers[name] for name in ("content-range", "allow") if name in headers}
    return _json(*_reply(status, text, code=code, headers=kept))


def client_closed() -> Response:
    """For a client that has gone: for the log alone. It has a type, so that it keeps its shape."""
    return Response(status_code=CLIENT_CLOSED_REQUEST, media_type="application/json")


def install(app: FastAPI) -> None:
    """Make `app` answer every error in this shape."""

    @app.exception_handler(LockstepError)
    async def on_lockstep_error(request: Request, error: Exception) -> Response:
        return response(error)

    @app.exception_handler(RequestValidationError)
    async def on_invalid_body(request: Request, error: RequestValidationError) -> Response:
        message, param, code = _first_problem(error.errors())
        if param == "gate":
            inside = [each for each in error.errors() if each["loc"][1:2] == ("gate",)]
            found = problem(inside, error.body)
            if found is not None:
                return response(found)
        return _json(*_reply(400, message, param=param, code=code))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        if isinstance(error.__cause__, ClientDisconnect):
            return client_closed()
        text = str(error.detail)
        if error.status_code == 404 and text == "Not Found":
            text = f"there is no {request.method} {request.url.path} here"
        code = _CODES.get(error.status_code, "http_error")
        if text == "There was an error parsing the body":
            text = (
                "the body cannot be read as JSON: it is no UTF-8, nested too deeply, "
                "or has a number of too many digits"
            )
            code = "invalid_json"
        headers = dict(error.headers or {})
        return _json(*_reply(error.status_code, text, code=code, headers=headers))

    @app.exception_handler(Exception)
    async def on_unexpected_error(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return response(error)


def _reply(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> tuple[int, ErrorReply, dict[str, str]]:
    call = calls.current.get()
    if call is not None and code is not None:
        call.error = code
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    # What a client wrote may not be valid Unicode; the reply is.
    message, param = _shown(message, MAX_MESSAGE), _shown(param or "", MAX_PARAM) or None
    body = ErrorReply(ErrorBody(message=message, type=kind, param=param, code=code))
    return status, body, dict(headers or {})


def _shown(text: str, most: int) -> str:
    """Valid Unicode, and its middle left out where it is long."""
    if len(text) > most:
        text = f"{text[: most // 2]} … {text[-most // 2 + 3 :]}"
    return text.encode(errors="backslashreplace").decode()


def _whole(seconds: float) -> str:
    """For a Retry-After header: rounded up, at least one."""
    return str(max(1, math.ceil(seconds)))


def _json(status: int, body: ErrorReply, headers: Mapping[str, str]) -> Response:
    return Response(
        msgspec.json.encode(body), status, headers=headers, media_type="application/json"
    )


def _first_problem(errors: Sequence[Mapping[str, Any]]) -> tuple[str, str | None, str]:
    """Message, field and code of a body that pydantic refused.

    A value that fits no member of a union gives one error a member; all are told.
    """
    first = errors[0]
    where = [str(part) for part in first["loc"] if part not in ("body", "query")]
    if first["type"] == "json_invalid":
        detail = first.get("ctx", {}).get("error", "")
        return f"the body is not valid JSON: {detail}", None, "invalid_json"
    if not where:
        wanted = "the body must be a JSON object, sent with Content-Type: application/json"
        return wanted, None, "invalid_type"
    if first["type"] == "extra_forbidden":
        return f"unknown parameter: {'.'.join(where) or repr('')}", where[0], "unknown_parameter"
    if first["type"] == "missing":
        return f"missing parameter: {'.'.join(where)}", where[0], "missing_parameter"
    same = (error["msg"] for error in errors if where[0] in error["loc"])
    messages = list(dict.fromkeys(same))[:4]
    return f"{where[0]}: {'; or: '.join(messages)}", where[0], "invalid_type"
