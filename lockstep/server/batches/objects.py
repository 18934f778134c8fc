"""The wire objects of files and batches, and their ids."""

from __future__ import annotations

import re
import secrets
import time
from typing import Generic, Literal, TypeVar

import msgspec

from lockstep.server.replies import Reply

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
ENDED: frozenset[Status] = frozenset({"failed", "completed", "expired", "cancelled"})

FILE_ID = re.compile(r"file-[0-9a-f]{24}")
BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")


def new_file_id() -> str:
    """An id that sorts by the time of its making."""
    return f"file-{_ordered()}"


def new_batch_id() -> str:
    """As `new_file_id`."""
    return f"batch_{_ordered()}"


def _ordered() -> str:
    return f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(6)}"


class FileObject(Reply):
    """A stored file. Times are Unix seconds."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"
    expires_at: int | None = None


class FileDeleted(Reply):
    """Reply of `DELETE /v1/files/{id}`."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class Problem(Reply):
    """Why a batch failed or stands still; `line` counts from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Problems(Reply):
    """A list of them."""

    data: list[Problem]
    object: Literal["list"] = "list"


class Counts(Reply):
    """Lines of a batch by outcome; the three agree once the batch has ended."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class CachedTokens(Reply):
    """Part of the input tokens."""

    cached_tokens: int = 0


class ReasoningTokens(Reply):
    """Part of the output tokens."""

    reasoning_tokens: int = 0


class BatchUsage(Reply):
    """Tokens of all answered lines."""

    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    input_tokens_details: CachedTokens = msgspec.field(default_factory=CachedTokens)
    output_tokens_details: ReasoningTokens = msgspec.field(default_factory=ReasoningTokens)


class BatchObject(Reply):
    """A batch. Times are Unix seconds.

    Attributes:
        errors: of a failed batch, the first bad lines; of one under way, why it stands still.
        model: the model that all valid lines name, if they name one.
    """

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    object: Literal["batch"] = "batch"
    status: Status = "validating"
    errors: Problems | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = msgspec.field(default_factory=Counts)
    usage: BatchUsage | None = None
    model: str | None = None
    metadata: dict[str, str] | None = None


T = TypeVar("T", FileObject, BatchObject)


class Page(Reply, Generic[T]):
    """One page of a listing, newest first unless asked otherwise."""

    data: list[T]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"

    @classmethod
    def of(cls, found: list[T], limit: int) -> Page[T]:
        """A page from up to `limit` + 1 objects: the last one only says that there is more."""
        shown = found[:limit]
        return cls(
            data=shown,
            has_more=len(found) > limit,
            first_id=shown[0].id if shown else None,
            last_id=shown[-1].id if shown else None,
        )


class Job(msgspec.Struct, kw_only=True):
    """A batch as the index holds it.

    Attributes:
        owner: name of the API key that made it; "" where the server asks for none.
        served: the model that the server had when it took the batch; another server on the
            same directory leaves the batch alone.
        keep_seconds: lifetime of the result files; None keeps them.
    """

    batch: BatchObject
    owner: str
    served: str
    keep_seconds: int | None = None
