"""Multipart bodies in pieces of any size: what is stored is what was sent."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.types import Message

from lockstep.server.batches import upload
from lockstep.server.batches.upload import Upload, receive
from lockstep.server.errors import TooLarge
from lockstep.server.sse import ClientGone
from lockstep.types import RequestError

BOUNDARY = b"x-boundary"
LIMIT = 5000


def form(fields: dict[str, str], content: bytes, filename: str = "in.jsonl") -> bytes:
    parts = [
        b'--%s\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
        % (BOUNDARY, name.encode(), value.encode())
        for name, value in fields.items()
    ]
    parts.append(
        b'--%s\r\nContent-Disposition: form-data; name="file"; filename="%s"\r\n'
        b"Content-Type: application/octet-stream\r\n\r\n%s\r\n"
        % (BOUNDARY, filename.encode(), content)
    )
    return b"".join(parts) + b"--%s--\r\n" % BOUNDARY


def send(target: Path, pieces: list[bytes], *, leaves: bool = False) -> Upload:
    waiting = [*pieces]

    async def incoming() -> Message:
        if leaves and not waiting:
            return {"type": "http.disconnect"}
        piece = waiting.pop(0) if waiting else b""
        return {"type": "http.request", "body": piece, "more_body": leaves or bool(waiting)}

    kind = b"multipart/form-data; boundary=" + BOUNDARY
    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", kind)]}
    return asyncio.run(receive(Request(scope, incoming), target, LIMIT))


def split(body: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts)})
    return [body[a:b] for a, b in pairwise(places)]


contents = st.binary(max_size=300) | st.lists(
    st.sampled_from([b"\r\n", b"--", BOUNDARY, b"--" + BOUNDARY[:-1], b"\r", b"a"]), max_size=9
).map(b"".join).filter(lambda data: b"\r\n--" + BOUNDARY not in b"\r\n" + data)


@given(contents, st.lists(st.integers(0, 10_000), max_size=30), st.text("abc é", max_size=5))
@example(b"x" * LIMIT, [], "")
@settings(deadline=None)
def test_what_is_stored_is_what_was_sent(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, cuts: list[int], purpose: str
) -> None:
    target = tmp_path_factory.mktemp("upload") / "file"
    found = send(target, split(form({"purpose": purpose}, content), cuts))
    assert target.read_bytes() == content
    assert found == Upload(fields={"purpose": purpose}, filename="in.jsonl", size=len(content))


@given(st.integers(0, 400), st.booleans())
@settings(deadline=None)
def test_a_form_cut_off_is_refused(
    tmp_path_factory: pytest.TempPathFactory, cut: int, leaves: bool
) -> None:
    body = form({"purpose": "batch"}, b"content " * 10).removesuffix(b"--\r\n")
    target = tmp_path_factory.mktemp("upload") / "file"
    with pytest.raises(ClientGone if leaves else RequestError):
        send(target, [body[:cut]], leaves=leaves)


def test_a_file_over_the_limit_is_not_stored_to_its_end(tmp_path: Path) -> None:
    pieces = split(form({}, b"x" * 50 * LIMIT), [1000 * n for n in range(250)])
    with pytest.raises(TooLarge, match=str(LIMIT)):
        send(tmp_path / "file", pieces)
    assert (tmp_path / "file").stat().st_size <= LIMIT


def test_at_most_a_buffer_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "BUFFER_BYTES", 100)
    held: list[int] = []
    take = upload._Form.take

    def noting(self: upload._Form) -> bytes:
        held.append(len(self.waiting))
        return take(self)

    monkeypatch.setattr(upload._Form, "take", noting)
    body = form({}, b"y" * 4000)
    send(tmp_path / "file", split(body, [50 * n for n in range(100)]))
    assert len(held) > 20
    assert max(held) <= 150


@pytest.mark.parametrize(
    ("given_name", "kept"),
    [
        ("a.jsonl", "a.jsonl"),
        ("../../etc/passwd", "passwd"),
        ("C:\\\\Users\\\\me\\\\a.jsonl", "a.jsonl"),
        ("", "upload.jsonl"),
        ("..", "upload.jsonl"),
        ("/", "upload.jsonl"),
        ("a\tb", "ab"),
        ("x" * 999, "x" * 255),
    ],
)
def test_a_name_is_only_a_name(tmp_path: Path, given_name: str, kept: str) -> None:
    assert send(tmp_path / "file", [form({}, b"", given_name)]).filename == kept
