"""Typed records that cross between a door and its engine process.

One msgpack message is one record; a tag tells the records of a direction apart.
The dataclasses of `types` and `config` travel as they are. Nothing here is
pickled, so neither side can make the other run code.
"""

from __future__ import annotations

import msgspec

from lockstep.branch import Branch
from lockstep.config import EngineConfig
from lockstep.types import EngineInfo, EngineStats, Request, SequenceOutput


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Base of every record that crosses the boundary."""


# --- door to engine -------------------------------------------------------------------


class Start(Message, frozen=True, kw_only=True):
    """The first record, written to the child's standard input.

    Attributes:
        address: zmq endpoint that the door has bound.
        factory: "module:name" of a callable (EngineConfig, progress) -> Engine.
        config: what to start.
        heartbeat_seconds: longest silence of an idle engine.
    """

    address: str
    factory: str
    config: EngineConfig
    heartbeat_seconds: float = 1.0


class Submit(Message, frozen=True, kw_only=True):
    """Queue a request; answered by `StepReport.accepted` or `StepReport.rejected`."""

    request: Request


class Cancel(Message, frozen=True, kw_only=True):
    """End a request, or one choice of it; unknown ids are ignored."""

    request: str
    choice: int | None = None


class FlushCache(Message, frozen=True, kw_only=True):
    """Forget every cached prefix that no live sequence reads."""


class LoadBranch(Message, frozen=True, kw_only=True):
    """Load a branch, in the place of the one of that name; answered by a `BranchReply`.

    Attributes:
        ticket: names the answer. folder: absolute path.
    """

    ticket: int
    name: str
    folder: str


class UnloadBranch(Message, frozen=True, kw_only=True):
    """Refuse requests that name the branch; answered by a `BranchReply`."""

    ticket: int
    name: str


class Shutdown(Message, frozen=True, kw_only=True):
    """Stop after the current step and exit."""


ToEngine = Submit | Cancel | FlushCache | LoadBranch | UnloadBranch | Shutdown


# --- engine to door -------------------------------------------------------------------


class Progress(Message, frozen=True, kw_only=True):
    """Start-up progress: what is being done and the fraction done, in [0, 1]."""

    stage: str
    fraction: float


class Ready(Message, frozen=True, kw_only=True):
    """The engine takes requests now. Attributes: branches: by name."""

    info: EngineInfo
    branches: dict[str, Branch] = {}


class StartFailed(Message, frozen=True, kw_only=True):
    """The engine could not start.

    Attributes:
        kind: class name of the error, so that the door raises the same kind.
        message: one line that names what is wrong.
    """

    kind: str
    message: str


class Rejection(Message, frozen=True, kw_only=True):
    """Why a request was not queued; the parts of a `RequestError`."""

    request: str
    message: str
    field: str
    code: str


class StepReport(Message, frozen=True, kw_only=True):
    """Everything that happened since the last report, one record a step."""

    accepted: tuple[str, ...]
    rejected: tuple[Rejection, ...]
    outputs: tuple[SequenceOutput, ...]
    stats: EngineStats


class BranchReply(Message, frozen=True, kw_only=True):
    """What became of a `LoadBranch` or an `UnloadBranch`.

    Attributes:
        branch: what was loaded; None where nothing was.
        error: why it cannot be done, "" where it was.
    """

    ticket: int
    branch: Branch | None = None
    error: str = ""


class Heartbeat(Message, frozen=True, kw_only=True):
    """Sent by an idle engine."""

    stats: EngineStats


class Fatal(Message, frozen=True, kw_only=True):
    """The engine met an error it cannot go on from; the process ends after this."""

    message: str


FromEngine = Progress | Ready | StartFailed | StepReport | BranchReply | Heartbeat | Fatal

encode = msgspec.msgpack.Encoder().encode
decode_start = msgspec.msgpack.Decoder(Start).decode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
