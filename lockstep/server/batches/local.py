"""A file of requests answered without a server: the same routes, the same rows, one file out.

Results are kept beside the output until all are there, under a name that depends on the
input's bytes, the endpoint and the model: the same call again goes on where it stopped, and
a changed input begins anew.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from fastapi import FastAPI

from lockstep.durable import hold, sync_folder
from lockstep.engine.client import EngineState
from lockstep.lines import read_lines
from lockstep.places import Places
from lockstep.server.batches.answering import Answering
from lockstep.server.batches.attempts import Sender
from lockstep.server.batches.checking import Checked, check_file
from lockstep.server.batches.inprocess import InProcess, batch_endpoints
from lockstep.server.batches.journal import Journal
from lockstep.server.batches.lines import ENVELOPE_BYTES, RowError, Source
from lockstep.server.batches.results import ordered_rows
from lockstep.server.batches.threads import stoppable, to_the_end
from lockstep.server.generation import Service
from lockstep.types import RequestError

POLL_SECONDS = 0.2

Progress = Callable[[int, int], None]  # lines with a row, of how many


@dataclass(frozen=True, slots=True)
class Summary:
    """Rows of the output: answers, and errors. `resumed`: rows that an earlier call had."""

    answered: int
    failed: int
    resumed: int


async def answer_file(
    app: FastAPI, file: Path, out: Path, *, endpoint: str = "", progress: Progress
) -> Summary:
    """Answer every line of `file` into `out`, one row a line, in the order of the input.

    Args:
        app: over a started engine; need not be served.
        endpoint: url of the lines; "" takes that of the first line.

    Raises:
        RequestError: `out` exists, there is no such endpoint, or no line is a request.
        OSError: a file cannot be read or written; what was answered is kept.
    """
    service: Service = app.state.service
    config, client = service.config, service.llm.client
    if out.exists():
        raise RequestError(f"{out} exists; choose another output or remove it", field="out")
    endpoint = endpoint or await to_the_end(_first_url, file, config.max_body_bytes)
    endpoints = batch_endpoints(app)
    if endpoint not in endpoints:
        raise RequestError(
            f"endpoint must be one of {', '.join(sorted(endpoints))}, got {endpoint[:100]!r}",
            field="endpoint",
        )
    judges = "".join(f"{name} {own.key}\n" for name, own in sorted(service.branches.items()))
    identity = await stoppable(
        lambda stop: _digest(file, f"{endpoint}\n{service.model_name}\n{judges}", stop)
    )
    source = Source(file, identity, endpoint, config.max_body_bytes)
    places = Places(
        config.batch_concurrency
        or client.config.scheduler.resolved(client.info.device).max_sequences
    )
    sender = Sender(InProcess(app).post, lambda: client.state is EngineState.READY, places)
    part = out.with_name(f"{out.name}.{identity}.part")
    with _alone(part), closing(await to_the_end(Journal, part)) as journal:
        resumed = journal.ok + journal.failed
        checked = await stoppable(lambda stop: check_file(source, journal, stop))
        if not checked.good:
            part.unlink()
            raise RequestError(_nothing(file, checked), field="file")
        answering = Answering(source, journal, sender, "", _raise)
        await _watched(answering, journal, checked.total, progress)
        await stoppable(lambda stop: _write(source, journal, out, stop))
        part.unlink()
        return Summary(journal.ok, journal.failed, resumed)


async def _watched(answering: Answering, journal: Journal, total: int, progress: Progress) -> None:
    work = asyncio.create_task(answering.run())
    try:
        while not work.done():
            progress(journal.ok + journal.failed, total)
            await asyncio.wait({work}, timeout=POLL_SECONDS)
        work.result()
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


def _write(source: Source, journal: Journal, out: Path, stop: threading.Event) -> None:
    """The rows, whole or not at all."""
    draft = out.with_name(f"{out.name}.{source.name}.tmp")
    missing = RowError("internal_error", "the line has no result")
    try:
        with (
            draft.open("wb") as file,
            closing(ordered_rows(source, journal, missing, stop)) as rows,
        ):
            for _, row in rows:
                file.write(row)
                file.write(b"\n")
            file.flush()
            os.fsync(file.fileno())
        draft.rename(out)
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(out.parent)


class _Url(msgspec.Struct):
    url: str = ""


def _first_url(file: Path, max_body: int) -> str:
    """The url of the first line that has one."""
    with file.open("rb") as lines:
        for _, text in read_lines(lines, max_body + ENVELOPE_BYTES):
            try:
                found = msgspec.json.decode(text or b"{}", type=_Url).url
            except (msgspec.DecodeError, RecursionError):
                continue
            if found:
                return found
    raise RequestError(f"no line of {file} has a url", field="file")


def _digest(file: Path, salt: str, stop: threading.Event) -> str:
    digest = hashlib.sha256(salt.encode())
    with file.open("rb") as content:
        while not stop.is_set() and (block := content.read(1 << 20)):
            digest.update(block)
    return digest.hexdigest()[:16]


@contextmanager
def _alone(part: Path) -> Iterator[None]:
    """Keep a second call away from the same results."""
    descriptor = os.open(part, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        hold(descriptor, part)
        yield
    finally:
        os.close(descriptor)


def _nothing(file: Path, checked: Checked) -> str:
    if not checked.problems:
        return f"{file} has no lines"
    first = checked.problems[0]
    return f"no line of {file} is a request; line {first.line}: {first.message}"


def _raise(error: OSError | None) -> None:
    """Somebody is at the terminal: a full disk ends the call, and the next one goes on."""
    if error is not None:
        raise error
