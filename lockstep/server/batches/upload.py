"""Multipart bodies, straight to disk: the file part is never held in memory."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from lockstep.server.errors import TooLarge
from lockstep.server.sse import ClientGone
from lockstep.types import RequestError

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MAX_FIELD_BYTES = 4096
MAX_PARTS = 16
MAX_NAME = 255  # characters of a file name
BUFFER_BYTES = 1 << 20


@dataclass(slots=True)
class Upload:
    """What a form held beside the file's bytes. `filename` is None when there was no file."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None
    size: int = 0


async def receive(request: Request, target: Path, max_bytes: int) -> Upload:
    """Read a form; its part `file` goes to `target` and is synced.

    Raises:
        RequestError: not a form, or one that is broken or has two files.
        TooLarge: the file has more than `max_bytes` bytes.
        ClientGone: the client closed the connection.
        OSError: the disk takes no more. Whoever called removes `target`, whatever is raised.
    """
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise RequestError(
            "the body must be a form, sent with Content-Type: multipart/form-data; boundary=…",
            field="file",
            code="invalid_type",
        )
    with target.open("xb") as file:
        form = _Form(max_bytes)
        try:
            parser = MultipartParser(boundary, form.callbacks())
            async for chunk in request.stream():
                parser.write(chunk)
                if len(form.waiting) >= BUFFER_BYTES:
                    await asyncio.to_thread(file.write, form.take())
            parser.finalize()
        except FormParserError as error:
            raise RequestError(
                f"the form is broken: {error}", field="file", code="invalid_form"
            ) from None
        except ClientDisconnect:
            raise ClientGone from None
        if not form.complete:
            raise RequestError("the form has no end", field="file", code="invalid_form")
        await asyncio.to_thread(file.write, form.take())
        file.flush()
        await asyncio.to_thread(os.fsync, file.fileno())
    return form.upload


class _Form:
    """Takes the parser's events apart; at most one chunk and a buffer are held."""

    def __init__(self, max_bytes: int) -> None:
        self.upload = Upload()
        self.waiting = bytearray()
        self.complete = False
        self._max_bytes = max_bytes
        self._parts = 0
        self._header = bytearray()
        self._value = bytearray()
        self._disposition = b""
        self._name = ""
        self._is_file = False
        self._field = bytearray()

    def take(self) -> bytes:
        """The file's bytes that have come since the last call."""
        data = bytes(self.waiting)
        self.waiting.clear()
        return data

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._part_begin,
            "on_part_data": self._part_data,
            "on_part_end": self._part_end,
            "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_finished,
            "on_end": self._end,
        }

    def _part_begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise _broken(f"it has more than {MAX_PARTS} parts")
        self._disposition = b""
        self._field.clear()

    def _header_end(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        if b"name" not in options:
            raise _broken("a part has no name")
        self._name = options[b"name"].decode(errors="replace")[:MAX_NAME]
        self._is_file = self._name == "file"
        if not self._is_file:
            if self._name in self.upload.fields:
                raise RequestError(f"{self._name} is given twice", field=self._name)
            return
        if self.upload.filename is not None:
            raise RequestError("file is given twice", field="file")
        self.upload.filename = _plain_name(options.get(b"filename", b"").decode(errors="replace"))

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if not self._is_file:
            self._field += data[start:end]
            if len(self._field) > MAX_FIELD_BYTES:
                raise RequestError(
                    f"{self._name} has more than {MAX_FIELD_BYTES} bytes", field=self._name
                )
            return
        self.upload.size += end - start
        if self.upload.size > self._max_bytes:
            raise TooLarge(
                f"the file is larger than {self._max_bytes} bytes",
                field="file",
                code="request_too_large",
            )
        self.waiting += data[start:end]

    def _part_end(self) -> None:
        if not self._is_file:
            self.upload.fields[self._name] = self._field.decode(errors="replace")

    def _end(self) -> None:
        self.complete = True


def _plain_name(name: str) -> str:
    """A file name without folders and control characters; it is shown, and never opened."""
    last = PurePosixPath(name.replace("\\", "/")).name
    plain = "".join(c for c in last if c.isprintable())[:MAX_NAME]
    return plain if plain.strip(". ") else "upload.jsonl"


def _broken(why: str) -> RequestError:
    return RequestError(f"the form is broken: {why}", field="file", code="invalid_form")
