"""Reading and checking an input file's lines: total over bytes, exact about what is wrong."""

from __future__ import annotations

import io
import json
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lockstep.lines import read_lines
from lockstep.server.batches.lines import (
    MAX_CUSTOM_ID,
    BadLine,
    Line,
    answered,
    check_line,
    refused,
    tokens_used,
)

URL = "/v1/chat/completions"
LIMIT = 1000
BATCH = "batch_0123456789abcdef01234567"

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
bodies = st.dictionaries(st.text(), values, max_size=5)


def request(**changes: Any) -> dict[str, Any]:
    row = {"custom_id": "a", "method": "POST", "url": URL, "body": {"model": "m"}, **changes}
    return {name: value for name, value in row.items() if value is not ...}


def check(row: object, number: int = 7) -> Line | BadLine:
    return check_line(number, json.dumps(row).encode(), URL, LIMIT)


@given(st.text(min_size=1, max_size=MAX_CUSTOM_ID), bodies)
def test_a_request_keeps_its_id_and_its_body(custom_id: str, body: dict[str, Any]) -> None:
    body.pop("stream", None)
    text = json.dumps(request(custom_id=custom_id, body=body)).encode()
    line = check_line(3, text, URL, len(text))
    assert isinstance(line, Line)
    assert (line.number, line.custom_id) == (3, custom_id)
    assert json.loads(line.body) == body
    assert line.body in text, "the body goes to the route as it stood"


@given(st.binary(max_size=300))
@example(b'{"custom_id":"\\ud800","method":"POST","url":"/v1/chat/completions","body":{}}')
@example(b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":' + b"[" * 5000)
@example(b"[" * 100_000)
@example(b'"\xff"')
@example(b"NaN")
def test_no_bytes_raise(text: bytes) -> None:
    assert isinstance(check_line(1, text, URL, 10**6), Line | BadLine)


@given(st.dictionaries(st.sampled_from(["custom_id", "method", "url", "body", "x"]), values))
def test_every_object_is_a_request_or_says_what_is_wrong(row: dict[str, Any]) -> None:
    checked = check(row)
    if isinstance(checked, BadLine):
        assert checked.code
        assert checked.message
        assert checked.param is not None
        encoded = json.loads(msgspec.json.encode(refused(BATCH, checked)))
        assert encoded["custom_id"] in (row.get("custom_id"), None)
        assert encoded["error"]["line"] == 7
        assert "line 7" in encoded["error"]["message"]


@pytest.mark.parametrize(
    ("row", "code", "param"),
    [
        ("[1]", "invalid_json", None),
        ("{", "invalid_json", None),
        ('{"a": NaN}', "invalid_json", None),
        (request(custom_id=...), "missing_parameter", "custom_id"),
        (request(method=...), "missing_parameter", "method"),
        (request(url=...), "missing_parameter", "url"),
        (request(body=...), "missing_parameter", "body"),
        (request(extra=1), "unknown_parameter", "extra"),
        (request(custom_id=""), "invalid_custom_id", "custom_id"),
        (request(custom_id=5), "invalid_custom_id", "custom_id"),
        (request(custom_id=None), "invalid_custom_id", "custom_id"),
        (request(custom_id="x" * (MAX_CUSTOM_ID + 1)), "invalid_custom_id", "custom_id"),
        (request(method="GET"), "invalid_method", "method"),
        (request(method=None), "invalid_method", "method"),
        (request(url="/v1/completions"), "mismatched_url", "url"),
        (request(url="http://127.0.0.1/v1/chat/completions"), "mismatched_url", "url"),
        (request(url="/v1/files/../chat/completions"), "mismatched_url", "url"),
        (request(body="{}"), "invalid_body", "body"),
        (request(body=[]), "invalid_body", "body"),
        (request(body={"prompt": "x" * LIMIT}), "request_too_large", "body"),
        (request(body={"stream": True}), "unsupported_parameter", "body.stream"),
        (request(body={"stream": 1}), "unsupported_parameter", "body.stream"),
    ],
)
def test_what_is_wrong_with_a_line(row: Any, code: str, param: str | None) -> None:
    text = row if isinstance(row, str) else json.dumps(row)
    checked = check_line(2, text.encode(), URL, LIMIT)
    assert isinstance(checked, BadLine)
    assert (checked.code, checked.param) == (code, param)


def test_stream_false_is_no_stream() -> None:
    assert isinstance(check(request(body={"stream": False})), Line)
    assert isinstance(check(request(body={"stream": None})), Line)


@given(
    st.lists(st.binary(max_size=40).map(lambda b: b.replace(b"\n", b"")), max_size=12),
    st.booleans(),
    st.integers(1, 30),
)
def test_lines_are_numbered_and_blank_ones_left_out(
    parts: list[bytes], ends: bool, limit: int
) -> None:
    data = b"\n".join(parts) + (b"\n" if ends else b"")
    expected: list[tuple[int, bytes | None]] = []
    for number, part in enumerate(data.split(b"\n"), 1):
        text = part.removeprefix(b"\xef\xbb\xbf") if number == 1 else part
        if len(part) > limit:
            expected.append((number, None))
        elif text.strip(b" \t\r\n"):
            expected.append((number, text.strip(b" \t\r\n")))
    assert list(read_lines(io.BytesIO(data), limit)) == expected


def test_a_line_without_end_is_not_held_in_memory() -> None:
    class Endless(io.RawIOBase):
        left = 32 << 20

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            count = min(len(buffer), self.left)
            self.left -= count
            buffer[:count] = b"x" * count
            return count

    endless = Endless()
    file = io.BufferedReader(endless, 1 << 16)
    tracemalloc.start()
    try:
        assert list(read_lines(file, 1000)) == [(1, None)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert endless.left == 0
    assert peak < 4 << 20


def test_a_reply_becomes_one_line_whatever_it_is() -> None:
    line = Line(4, "é\n", b"{}")
    for body, expected in (
        (b'{"a": [1, 2]}', {"a": [1, 2]}),
        (b'{\n "a": "x\\n"\n}', {"a": "x\n"}),
        (b"<html>\xff", "<html>�"),
        (b"", ""),
    ):
        encoded = msgspec.json.encode(answered(BATCH, line, 200, body))
        assert b"\n" not in encoded
        row = json.loads(encoded)
        assert row["response"]["body"] == expected
        assert row["custom_id"] == "é\n"
        assert row["id"].endswith("_4")


def test_usage_is_read_under_either_name() -> None:
    chat = {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    responses = {
        "input_tokens": 5,
        "output_tokens": 2,
        "input_tokens_details": {"cached_tokens": 3},
        "output_tokens_details": {"reasoning_tokens": 1},
    }
    assert tokens_used(json.dumps({"usage": chat}).encode()) == (5, 3, 2, 0)
    assert tokens_used(json.dumps({"usage": responses}).encode()) == (5, 3, 2, 1)
    assert tokens_used(b'{"usage": null}') == (0, 0, 0, 0)
    assert tokens_used(b'{"usage": {"prompt_tokens": "many"}}') == (0, 0, 0, 0)
    assert tokens_used(b"{") == (0, 0, 0, 0)
