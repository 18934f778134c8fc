"""The outermost layer: every HTTP request passes here, and its account begins and ends here.

In this order: an id, the caller's key, draining, the caller's limits; then the application;
then the access log and the counters, however the request ended.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Mapping

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lockstep import logs
from lockstep.server import auth, calls, errors
from lockstep.server.auth import Key
from lockstep.server.calls import Call
from lockstep.server.limits import Allowance
from lockstep.server.operations import Operations
from lockstep.types import LockstepError

log = logging.getLogger("lockstep.server")
access = logging.getLogger("lockstep.access")

METHOD_NOT_ALLOWED = 405
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/=+-]{1,128}")
_ENDS = re.compile(r"/v1/(responses|batches)/[^/]+/cancel").fullmatch
_POLLED = ("/health", "/ready", "/metrics", "/stats")  # every few seconds, by machines
_CODES = {
    "requests": "rate_limit_exceeded",
    "tokens": "rate_limit_exceeded",
    "concurrent": "too_many_concurrent_requests",
}


class FrontDoor:
    """Wraps the application; see above."""

    def __init__(self, app: ASGIApp, operations: Operations) -> None:
        self._app = app
        self._operations = operations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        call = Call(
            id=_request_id(headers),
            method=scope["method"],
            path=scope["path"],
            client=scope["client"][0] if scope.get("client") else "",
        )
        token, name = calls.current.set(call), logs.request_id.set(call.id)
        operations = self._operations
        operations.metrics.in_flight += 1
        if operations.tracer is not None and call.path not in _POLLED:
            operations.tracer.begin(call, headers)
        try:
            await self._serve(call, headers, scope, receive, send)
        finally:
            route = scope.get("route")
            call.route = getattr(route, "path", "")
            call.ended = True
            operations.metrics.in_flight -= 1
            self._settle(call)
            calls.current.reset(token)
            logs.request_id.reset(name)

    async def _serve(
        self,
        call: Call,
        headers: Mapping[bytes, bytes],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        extra = {"x-request-id": call.id}

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                MutableHeaders(scope=message).update(extra)
            await send(message)

        allowance: Allowance | None = None
        try:
            call.key = self._identify(headers, scope["path"])
            if _asks_for_work(scope):
                if self._operations.draining:
                    raise self._operations.refusal()
                _check_encoding(headers)
                allowance = self._enter(call, extra)
        except LockstepError as error:
            await errors.response(error)(scope, receive, noting)
            return
        try:
            await self._app(scope, receive, noting)
        except Exception as error:
            if call.status:
                raise  # the reply has begun: all that is left is to break it off
            log.error("%s %s failed", call.method, call.path, exc_info=error)
            await errors.response(error)(scope, receive, noting)
        finally:
            if allowance is not None:
                allowance.leave()

    def _identify(self, headers: Mapping[bytes, bytes], path: str) -> Key | None:
        """Whose key the request carries.

        Raises:
            NotAllowed: none, a wrong one, or one that may not go there.
        """
        keyring = self._operations.keyring
        admin = path == "/admin" or path.startswith("/admin/")
        if not keyring.needed:
            if admin:
                raise errors.NotAllowed(
                    "/admin is off: it needs a server with an admin key",
                    code="admin_disabled",
                    status=403,
                )
            return None
        secret = auth.shown_secret(headers)
        if self._is_open(path):
            return keyring.find(secret) if secret is not None else None
        if secret is None:
            raise errors.NotAllowed(
                "this server needs an API key: send Authorization: Bearer KEY",
                code="missing_api_key",
            )
        key = keyring.find(secret)
        if key is None:
            raise errors.NotAllowed("this API key is not known here", code="invalid_api_key")
        if admin and not key.admin:
            raise errors.NotAllowed(
                f"the key {key.name!r} is no admin key", code="admin_key_required", status=403
            )
        return key

    def _is_open(self, path: str) -> bool:
        """Liveness and the page's own files need no key; the page asks for one itself."""
        if path == "/metrics":
            return self._operations.config.open_metrics
        return path in ("/health", "/ready", "/") or path.startswith("/page/")

    def _enter(self, call: Call, extra: dict[str, str]) -> Allowance:
        """Count the request against its caller's limits; `leave` the allowance at its end.

        Raises:
            RateLimited: they are used up.
        """
        allowance = self._operations.allowance(call)
        refusal = allowance.enter()
        extra.update(allowance.headers())
        if refusal is not None:
            raise errors.RateLimited(
                refusal.message, code=_CODES[refusal.kind], retry_after=refusal.seconds
            )
        return allowance

    def _settle(self, call: Call) -> None:
        """Counters, the span and the log line of a request that has ended."""
        metrics, seconds = self._operations.metrics, time.monotonic() - call.began
        if not call.status:
            call.status = errors.CLIENT_CLOSED_REQUEST
        # What matches no route, or not by its method, which may be any word, is told apart by
        # nothing, so that nobody can fill the table.
        method = call.method if call.route and call.status != METHOD_NOT_ALLOWED else ""
        metrics.http[method, call.route, call.status] += 1
        metrics.http_seconds.observe(seconds)
        if call.error:
            metrics.refused[call.error] += 1
        if call.key is not None:
            metrics.key_requests[call.key.name] += 1
        if self._operations.tracer is not None:
            self._operations.tracer.end(call)
        if self._operations.config.access_log:
            level = logging.INFO if call.status < 500 else logging.WARNING
            if call.path in _POLLED and call.status in (200, 503):
                level = logging.DEBUG
            text = f"{call.method} {call.path} {call.status}"
            access.log(level, text, extra={"fields": _fields(call, seconds)})


def _asks_for_work(scope: Scope) -> bool:
    """Whether limits and draining apply: to what is sent to be worked on, not to its end."""
    path: str = scope["path"]
    return scope["method"] == "POST" and not path.startswith("/admin/") and not _ENDS(path)


def _check_encoding(headers: Mapping[bytes, bytes]) -> None:
    """Refuse a compressed body: a small one could hold more than memory does."""
    coding = headers.get(b"content-encoding", b"identity").decode("latin-1")
    if coding.strip().lower() not in ("", "identity"):
        raise errors.UnsupportedEncoding(
            f"the body has Content-Encoding {coding!r}; bodies are taken as they are",
            code="unsupported_content_encoding",
        )


def _request_id(headers: Mapping[bytes, bytes]) -> str:
    """The client's own, if it is short and plain, else a new one."""
    given = headers.get(b"x-request-id", b"")
    if _REQUEST_ID.fullmatch(given):
        return given.decode("ascii")
    return f"req-{uuid.uuid4().hex}"


def _fields(call: Call, seconds: float) -> dict[str, object]:
    fields: dict[str, object] = {
        "client": call.client,
        "method": call.method,
        "path": call.path,
        "status": call.status,
        "seconds": round(seconds, 4),
    }
    if call.key is not None:
        fields["key"] = call.key.name
    if call.error:
        fields["error"] = call.error
    if call.requests:
        fields["engine_requests"] = call.requests
        fields["prompt_tokens"] = call.prompt_tokens
        fields["cached_tokens"] = call.cached_tokens
        fields["generated_tokens"] = call.generated_tokens
        if call.first_token:
            fields["first_token_seconds"] = round(call.first_token - call.began, 4)
        if call.finishes:
            fields["finish"] = ",".join(sorted(set(call.finishes)))
    return fields
