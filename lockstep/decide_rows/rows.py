"""An input line as a row to decide about, or what is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from lockstep.config import ConfigError
from lockstep.lines import read_lines
from lockstep.requests import Conversation
from lockstep.types import RequestError

MAX_LINE_BYTES = 16 << 20
_PAIR = re.compile(rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..")
_HALF = re.compile(rb"\\u[dD][89a-fA-F]..")
_FIELD = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


class BadRow(RequestError):
    """A line that cannot be decided about.

    Attributes:
        id: the row's own, where it could be read.
    """

    def __init__(
        self, message: str, *, code: str, field: str = "", id: str | int | None = None
    ) -> None:
        super().__init__(message, field=field, code=code)
        self.id = id


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the input.

    Attributes:
        line: its number in the file, from 1. id: its own, as it stood.
        given: a plain prompt, or a conversation. characters: of its line, about.
    """

    line: int
    id: str | int | None
    given: str | Conversation
    characters: int = 0


@dataclass(frozen=True, slots=True)
class Rows:
    """A file of rows, and how a row becomes a prompt.

    A row is a JSON object with the fields that `template` names (by default `text`) or with
    `messages`, a conversation that is taken as it is; `id`, a string or an integer, is
    optional. Other fields are of no account.

    Attributes:
        template: text of the prompt; `{name}` stands for the row's field of that name.
        chat: the text is a user's message to the assistant, behind `system` if there is one.

    Raises:
        ConfigError: the template names no field.
    """

    path: Path
    template: str = "{text}"
    chat: bool = False
    system: str = ""

    def __post_init__(self) -> None:
        if not _FIELD.search(self.template):
            raise ConfigError(
                f"template must name a field of the rows, such as {{text}}, or all rows read "
                f"alike; got {self.template!r:.100}"
            )

    def lines(self) -> Generator[tuple[int, bytes | None], None, None]:
        """See `read_lines`.

        Raises:
            OSError: the file cannot be read.
        """
        with self.path.open("rb") as file:
            yield from read_lines(file, MAX_LINE_BYTES)

    def parse(self, line: int, text: bytes | None) -> Row:
        """The row in a line.

        Raises:
            BadRow: there is none.
        """
        if text is None:
            raise BadRow(f"the line is longer than {MAX_LINE_BYTES} bytes", code="line_too_long")
        fields = _fields(text)
        own = fields.get("id")
        if own is not None and (isinstance(own, bool) or not isinstance(own, str | int)):
            raise BadRow(
                f"id must be a string or an integer, got {own!r:.100}",
                code="invalid_value",
                field="id",
            )
        if "messages" in fields:
            messages = fields["messages"]
            if not isinstance(messages, list) or not messages:
                raise BadRow(
                    "messages must be a list of {role, content}",
                    code="invalid_value",
                    field="messages",
                    id=own,
                )
            return Row(line, own, messages, len(text))
        prompt = _filled(self.template, fields, own)
        if not self.chat and not self.system:
            return Row(line, own, prompt, len(text))
        before = [{"role": "system", "content": self.system}] if self.system else []
        return Row(line, own, [*before, {"role": "user", "content": prompt}], len(text))


def _fields(text: bytes) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # Which says of half a character that the line ends too early.
        half = _HALF.search(_PAIR.sub(b"", text))
        what = "half of a surrogate pair is no valid Unicode" if half else error
        raise BadRow(f"the line is not JSON: {what}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise BadRow("the line is not a JSON object", code="invalid_json")
    return fields


def _filled(template: str, fields: dict[str, Any], own: str | int | None) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in fields:
            raise BadRow(f"{name} is missing", code="missing_parameter", field=name, id=own)
        found = fields[name]
        if isinstance(found, bool) or not isinstance(found, str | int | float):
            raise BadRow(
                f"{name} must be a string or a number, got {found!r:.100}",
                code="invalid_value",
                field=name,
                id=own,
            )
        return str(found)

    filled = _FIELD.sub(value, template)
    if not filled.strip():
        raise BadRow("the row has no text", code="empty_prompt", id=own)
    return filled
