"""An input file's lines, read and checked; and the rows that answer them."""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from lockstep.lines import read_lines

MAX_CUSTOM_ID = 512  # characters
ENVELOPE_BYTES = 16 * 1024  # of a line, beside its body
_KEYS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True)
class Line:
    """A request. `number` counts the file's lines from 1; `body` is its JSON as it stood."""

    number: int
    custom_id: str
    body: bytes
    model: str | None = None


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no request, and why; `custom_id` where it could be read."""

    number: int
    custom_id: str | None
    code: str
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """A file of requests. `name` stands in the ids of rows, `max_body` bytes bound a body."""

    path: Path
    name: str
    endpoint: str
    max_body: int

    def lines(self) -> Generator[Line | BadLine, None, None]:
        """Every line that is not blank, checked; one is held at a time.

        Raises:
            OSError: the file cannot be read.
        """
        with self.path.open("rb") as file:
            for number, text in read_lines(file, self.max_body + ENVELOPE_BYTES):
                yield check_line(number, text, self.endpoint, self.max_body)


class _Body(msgspec.Struct):
    """What must be known of a body before its route reads it."""

    model: Any = None
    stream: Any = None


_decode_line = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_body = msgspec.json.Decoder(_Body).decode


def check_line(number: int, text: bytes | None, endpoint: str, max_body: int) -> Line | BadLine:
    """The request in a line of `read_lines`, or why there is none.

    The body's own fields are the route's to check, when it runs.
    """
    too_large = f"body is larger than {max_body} bytes"
    if text is None:
        return BadLine(number, None, "request_too_large", too_large, "body")
    try:
        text.decode()
        fields = _decode_line(text)
    except UnicodeDecodeError as error:
        return BadLine(number, None, "invalid_json", f"the line is not UTF-8: {error.reason}")
    except (msgspec.DecodeError, RecursionError) as error:
        return BadLine(number, None, "invalid_json", f"the line is not a JSON object: {error}")
    custom_id = _text(fields.get("custom_id"))
    known = custom_id if custom_id and len(custom_id) <= MAX_CUSTOM_ID else None

    def bad(code: str, message: str, param: str) -> BadLine:
        return BadLine(number, known, code, message, param)

    for name in _KEYS:
        if name not in fields:
            return bad("missing_parameter", f"{name} is missing", name)
    for name in fields:
        if name not in _KEYS:
            return bad("unknown_parameter", f"unknown parameter: {name[:100]}", name[:100])
    if not custom_id:
        return bad("invalid_custom_id", "custom_id must be a text that is not empty", "custom_id")
    if known is None:
        return bad(
            "invalid_custom_id",
            f"custom_id has {len(custom_id)} characters, at most {MAX_CUSTOM_ID} are allowed",
            "custom_id",
        )
    if _text(fields["method"]) != "POST":
        shown = _shown(fields["method"])
        return bad("invalid_method", f"method must be 'POST', got {shown}", "method")
    if _text(fields["url"]) != endpoint:
        wanted = f"url must be the batch's endpoint {endpoint!r}, got {_shown(fields['url'])}"
        return bad("mismatched_url", wanted, "url")
    if len(fields["body"]) > max_body:
        return bad("request_too_large", too_large, "body")
    try:
        body = _decode_body(fields["body"])
    except (msgspec.DecodeError, RecursionError) as error:
        return bad("invalid_body", f"body must be a JSON object: {error}", "body")
    if body.stream not in (None, False):
        return bad("unsupported_parameter", "stream must be false in a batch", "body.stream")
    model = body.model if isinstance(body.model, str) else None
    return Line(number, known, bytes(fields["body"]), model)


def duplicate(line: Line, first: int) -> BadLine:
    """A line whose custom_id line `first` already has."""
    message = f"custom_id {line.custom_id!r} was already used on line {first}"
    return BadLine(line.number, line.custom_id, "duplicate_custom_id", message, "custom_id")


def _text(raw: msgspec.Raw | None) -> str | None:
    if raw is None:
        return None
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):  # an array too deep, half of a surrogate pair
        return None
    return value if isinstance(value, str) else None


def _shown(raw: msgspec.Raw) -> str:
    return bytes(raw)[:100].decode(errors="replace")


# --- rows ---------------------------------------------------------------------------------


class RowError(msgspec.Struct):
    """Why a line was never answered."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class RowResponse(msgspec.Struct):
    """What a route answered."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class Row(msgspec.Struct):
    """One line of an output or error file."""

    id: str
    custom_id: str | None
    response: RowResponse | None
    error: RowError | None


def answered(source: str, line: Line, status: int, body: bytes) -> Row:
    """The row of a line that its route answered, whatever the status."""
    suffix = _suffix(source, line.number)
    response = RowResponse(status, f"req_{suffix}", msgspec.Raw(_one_line(body)))
    return Row(f"batch_req_{suffix}", line.custom_id, response, None)


def unanswered(source: str, number: int, custom_id: str | None, error: RowError) -> Row:
    """The row of a line that no route has seen."""
    return Row(f"batch_req_{_suffix(source, number)}", custom_id, None, error)


def refused(source: str, bad: BadLine) -> Row:
    """The row of a line that is no request."""
    error = RowError(bad.code, f"line {bad.number}: {bad.message}", bad.param, bad.number)
    return unanswered(source, bad.number, bad.custom_id, error)


class _Details(msgspec.Struct):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class _Usage(msgspec.Struct):
    """Usage under the names of either kind of route."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Reply(msgspec.Struct):
    usage: _Usage | None = None


_decode_reply = msgspec.json.Decoder(_Reply).decode


def tokens_used(reply: bytes) -> tuple[int, int, int, int]:
    """Input, cached, output and reasoning tokens that a reply reports; zeros where it does not."""
    try:
        usage = _decode_reply(reply).usage or _Usage()
    except msgspec.DecodeError:
        return 0, 0, 0, 0
    read = usage.prompt_tokens_details or usage.input_tokens_details or _Details()
    written = usage.completion_tokens_details or usage.output_tokens_details or _Details()
    return (
        usage.prompt_tokens + usage.input_tokens,
        read.cached_tokens,
        usage.completion_tokens + usage.output_tokens,
        written.reasoning_tokens,
    )


def _suffix(source: str, number: int) -> str:
    return f"{source.removeprefix('batch_')}_{number}"


def _one_line(body: bytes) -> bytes:
    """A body as one line of JSON; what is no JSON becomes a string."""
    try:
        return msgspec.json.format(body, indent=-1) if b"\n" in body else _checked(body)
    except msgspec.DecodeError:
        return json.dumps(body.decode(errors="replace")).encode()


def _checked(body: bytes) -> bytes:
    msgspec.json.decode(body, type=msgspec.Raw)
    return body
