"""How log records are written: lines for people, or one JSON object a line.

A leaf of the map. The server's process and the engine's both call `configure`; the
second learns the format from the environment.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from contextvars import ContextVar
from typing import Any, Literal, TextIO

Format = Literal["console", "json"]

FORMAT_VARIABLE = "LOCKSTEP_LOG_FORMAT"

# The HTTP request that the running task works for; "" outside of one.
request_id: ContextVar[str] = ContextVar("request_id", default="")


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, request_id, and the record's `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON. Whatever breaks lines or moves a terminal's cursor is escaped, so
        that a line is a record and shows as it is."""
        entry: dict[str, Any] = {
            "time": _timestamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        current = request_id.get()
        if current:
            entry["request_id"] = current
        entry.update(getattr(record, "fields", {}))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        text = json.dumps(entry, ensure_ascii=False, default=str)
        return text if text.isprintable() else json.dumps(entry, default=str)


class ConsoleFormatter(logging.Formatter):
    """Time, level, logger and message, then those of the record's `fields` as name=value that
    the message does not say already."""

    def format(self, record: logging.LogRecord) -> str:
        """The record in one line, and a traceback below it where there is one."""
        message = _one_line(record.getMessage())
        line = f"{_timestamp(record.created)} {record.levelname:7} {record.name}: {message}"
        said = set(message.split())
        fields = dict(getattr(record, "fields", {}))
        current = request_id.get()
        if current:
            fields.setdefault("request_id", current)
        for name, value in fields.items():
            if str(value) not in said:
                line += f" {name}={_plain(value)}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def configure(style: Format | None = None, stream: TextIO | None = None) -> None:
    """Send everything from INFO up to `stream`, by default standard error.

    Args:
        style: by default what a parent process has set in the environment, else "console".
            Passing one sets it for child processes.
    """
    if style is None:
        style = "json" if os.environ.get(FORMAT_VARIABLE) == "json" else "console"
    else:
        os.environ[FORMAT_VARIABLE] = style
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else ConsoleFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for chatty in ("uvicorn", "httpx", "httpcore", "opentelemetry", "python_multipart"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def _timestamp(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"


def _plain(value: object) -> str:
    """Bare where it is one word, else quoted and escaped, so that nobody can forge a line."""
    text = str(value)
    if text and text.isprintable() and not any(mark in text for mark in ' "='):
        return text
    return json.dumps(text, ensure_ascii=not text.isprintable())


def _one_line(text: str) -> str:
    """Line breaks and other control characters escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
