"""`/v1/files` and `/v1/batches` over HTTP."""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable
from typing import Annotated, Literal, ParamSpec, TypeVar

from fastapi import APIRouter, Query
from fastapi import Request as HTTPRequest
from pydantic import Field, StringConstraints
from starlette.responses import FileResponse, Response

from lockstep.server import calls
from lockstep.server.batches import upload
from lockstep.server.batches.inprocess import batch_endpoints
from lockstep.server.batches.objects import (
    BATCH_ID,
    FILE_ID,
    BatchObject,
    FileDeleted,
    FileObject,
    Job,
    Page,
    new_batch_id,
    new_file_id,
)
from lockstep.server.batches.runner import Batches
from lockstep.server.batches.store import no_file
from lockstep.server.batches.threads import to_the_end
from lockstep.server.errors import StorageUnavailable
from lockstep.server.generation import service_of
from lockstep.server.openapi import returns, returns_other
from lockstep.server.protocol import Body
from lockstep.server.replies import Reply, encode
from lockstep.types import RequestError

P = ParamSpec("P")
T = TypeVar("T")

router = APIRouter()

FILES_PER_PAGE = 10_000
BATCHES_PER_PAGE, BATCHES_BY_DEFAULT = 100, 20
KEEP_SECONDS = (3600, 30 * 24 * 3600)
WINDOW = re.compile(r"([1-9][0-9]{0,5})([smhd])")
WINDOW_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}
LONGEST_WINDOW = 30 * 24 * 3600
RESERVE_BYTES = 256 * 1024 * 1024  # of the disk; uploads leave them to results


class ExpiresAfter(Body):
    """When a file may go."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=KEEP_SECONDS[0], le=KEEP_SECONDS[1])]


class BatchBody(Body):
    """Body of `POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: (
        Annotated[
            dict[
                Annotated[str, StringConstraints(max_length=64)],
                Annotated[str, StringConstraints(max_length=512)],
            ],
            Field(max_length=16),
        ]
        | None
    ) = None
    output_expires_after: ExpiresAfter | None = None

    def window_seconds(self) -> int:
        """Length of the completion window.

        Raises:
            RequestError: not of a form such as 24h, 90m, 45s or 7d, or too long.
        """
        found = WINDOW.fullmatch(self.completion_window)
        seconds = int(found[1]) * WINDOW_SECONDS[found[2]] if found else 0
        if not 0 < seconds <= LONGEST_WINDOW:
            raise RequestError(
                "completion_window must be a time such as '24h', '90m' or '7d', at most '30d', "
                f"got {self.completion_window[:50]!r}",
                field="completion_window",
            )
        return seconds


_FORM = {  # for the OpenAPI page: the body is parsed as it comes, by `upload`
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer"},
                    },
                }
            }
        },
    }
}


@router.post("/v1/files", openapi_extra=_FORM, responses=returns(FileObject))
async def create_file(request: HTTPRequest) -> Response:
    """Keep a file of requests: a form with `file` and `purpose`."""
    batches, config = _batches(request), service_of(request).config
    store = batches.store
    file_id = new_file_id()
    target = store.temporary(file_id)
    try:
        _check_room(store.free_bytes(), request)
        form = await upload.receive(request, target, config.max_file_bytes)
        record = _record(file_id, form)
        await to_the_end(store.add_file, record, calls.owner())
    except OSError as error:
        raise _storage(error) from error
    finally:
        target.unlink(missing_ok=True)
    return _json(record)


@router.get("/v1/files", responses=returns(Page[FileObject]))
async def list_files(
    request: HTTPRequest,
    limit: Annotated[int, Query(ge=1, le=FILES_PER_PAGE)] = FILES_PER_PAGE,
    after: Annotated[str | None, Query(pattern=f"^{FILE_ID.pattern}$")] = None,
    order: Literal["asc", "desc"] = "desc",
    purpose: str | None = None,
) -> Response:
    """This caller's files, newest first."""
    found = await _stored(
        _batches(request).store.files,
        calls.owner(),
        after=after,
        limit=limit + 1,
        order=order,
        purpose=purpose,
    )
    return _json(Page.of(found, limit))


@router.get("/v1/files/{file_id}", responses=returns(FileObject))
async def get_file(file_id: str, request: HTTPRequest) -> Response:
    """A file's name, size and times."""
    return _json(await _stored(_batches(request).store.file, file_id, calls.owner()))


@router.get("/v1/files/{file_id}/content", responses=returns_other("application/jsonl", 206))
async def get_file_content(file_id: str, request: HTTPRequest) -> Response:
    """A file's bytes."""
    store = _batches(request).store
    record = await _stored(store.file, file_id, calls.owner())
    path = store.content(file_id)
    try:
        found = await to_the_end(path.stat)
    except FileNotFoundError:  # deleted since
        raise no_file(file_id) from None
    return FileResponse(
        path, filename=record.filename, media_type="application/jsonl", stat_result=found
    )


@router.delete("/v1/files/{file_id}", responses=returns(FileDeleted))
async def delete_file(file_id: str, request: HTTPRequest) -> Response:
    """Forget a file."""
    await _stored(_batches(request).store.delete_file, file_id, calls.owner())
    return _json(FileDeleted(id=file_id))


@router.post("/v1/batches", responses=returns(BatchObject))
async def create_batch(body: BatchBody, request: HTTPRequest) -> Response:
    """Answer every line of a file in the background."""
    batches = _batches(request)
    window = body.window_seconds()
    endpoints = batch_endpoints(request.app)
    if body.endpoint not in endpoints:
        raise RequestError(
            f"endpoint must be one of {', '.join(sorted(endpoints))}, got {body.endpoint[:100]!r}",
            field="endpoint",
        )
    now = int(time.time())
    batch = BatchObject(
        id=new_batch_id(),
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        created_at=now,
        expires_at=now + window,
        metadata=body.metadata,
    )
    keep = body.output_expires_after
    job = Job(
        batch=batch,
        owner=calls.owner(),
        served=service_of(request).model_name,
        keep_seconds=None if keep is None else keep.seconds,
    )
    await _stored(batches.store.add_batch, job)
    batches.wake()
    return _json(batch)


@router.get("/v1/batches", responses=returns(Page[BatchObject]))
async def list_batches(
    request: HTTPRequest,
    limit: Annotated[int, Query(ge=1, le=BATCHES_PER_PAGE)] = BATCHES_BY_DEFAULT,
    after: Annotated[str | None, Query(pattern=f"^{BATCH_ID.pattern}$")] = None,
) -> Response:
    """This caller's batches, newest first."""
    batches = _batches(request)
    found = await _stored(batches.store.batches, calls.owner(), after=after, limit=limit + 1)
    return _json(Page.of([batches.describe(batch) for batch in found], limit))


@router.get("/v1/batches/{batch_id}", responses=returns(BatchObject))
async def get_batch(batch_id: str, request: HTTPRequest) -> Response:
    """A batch as it stands."""
    batches = _batches(request)
    batch = await _stored(batches.store.batch, batch_id, calls.owner())
    return _json(batches.describe(batch))


@router.post("/v1/batches/{batch_id}/cancel", responses=returns(BatchObject))
async def cancel_batch(batch_id: str, request: HTTPRequest) -> Response:
    """Answer no more lines; those that have an answer keep it."""
    batches = _batches(request)
    batch = await _stored(batches.store.change_batch, batch_id, calls.owner(), _cancel)
    batches.cancel(batch_id)
    return _json(batches.describe(batch))


def _cancel(batch: BatchObject) -> None:
    if batch.status in ("validating", "in_progress"):
        batch.status = "cancelling"
        batch.cancelling_at = int(time.time())
    elif batch.status != "cancelling":
        raise RequestError(
            f"batch {batch.id!r} is {batch.status} and cannot be cancelled",
            field="batch_id",
            code="batch_not_cancellable",
        )


def _record(file_id: str, form: upload.Upload) -> FileObject:
    """The record of an uploaded file.

    Raises:
        RequestError: a field of the form is missing, unknown or out of range.
    """
    fields = dict(form.fields)
    if form.filename is None:
        raise RequestError("missing parameter: file", field="file", code="missing_parameter")
    purpose = fields.pop("purpose", None)
    if purpose is None:
        raise RequestError("missing parameter: purpose", field="purpose", code="missing_parameter")
    if purpose != "batch":
        raise RequestError(
            f"purpose must be 'batch', the only one here, got {purpose[:50]!r}", field="purpose"
        )
    keep = _keep_seconds(fields)
    if fields:
        name = min(fields)
        raise RequestError(f"unknown parameter: {name}", field=name, code="unknown_parameter")
    now = int(time.time())
    return FileObject(
        id=file_id,
        bytes=form.size,
        created_at=now,
        filename=form.filename,
        purpose="batch",
        expires_at=None if keep is None else now + keep,
    )


def _keep_seconds(fields: dict[str, str]) -> int | None:
    """What `expires_after[anchor]` and `expires_after[seconds]` say; takes them out."""
    anchor = fields.pop("expires_after[anchor]", None)
    seconds = fields.pop("expires_after[seconds]", None)
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise RequestError(
            "expires_after.anchor must be 'created_at'", field="expires_after[anchor]"
        )
    low, high = KEEP_SECONDS
    if (
        seconds is None
        or not re.fullmatch(r"[0-9]{1,8}", seconds)
        or not (low <= int(seconds) <= high)
    ):
        raise RequestError(
            f"expires_after.seconds must be an integer in [{low}, {high}]",
            field="expires_after[seconds]",
        )
    return int(seconds)


def _check_room(free: int, request: HTTPRequest) -> None:
    """Raises OSError unless the announced body leaves the reserve alone."""
    declared = request.headers.get("content-length", "0")
    wanted = int(declared) if declared.isdigit() else 0
    if free - wanted < RESERVE_BYTES:
        raise OSError(errno.ENOSPC, f"{free} bytes are left, {RESERVE_BYTES} are kept for results")


def _batches(request: HTTPRequest) -> Batches:
    batches: Batches = request.app.state.batches
    return batches


async def _stored(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Ask the store, in a thread.

    Raises:
        StorageUnavailable: the disk takes no more.
        Whatever the store raises.
    """
    try:
        return await to_the_end(work, *args, **kwargs)
    except OSError as error:
        raise _storage(error) from error


def _storage(error: OSError) -> StorageUnavailable:
    return StorageUnavailable(f"the data directory takes no more: {error.strerror}")


def _json(reply: Reply) -> Response:
    return Response(encode(reply), media_type="application/json")
