"""Files of JSON lines, read with bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

_SKIP_BYTES = 1 << 20


def read_lines(file: BinaryIO, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Number and text of every line that is not blank; None for one of more than `max_bytes`.

    Lines end at a line feed, at nothing else. Holds one line at a time.
    """
    number = 0
    while raw := file.readline(max_bytes + 1):
        number += 1
        if len(raw) > max_bytes and not raw.endswith(b"\n"):
            while (rest := file.readline(_SKIP_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield number, None
            continue
        text = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
        if text := text.strip(b" \t\r\n"):
            yield number, text
