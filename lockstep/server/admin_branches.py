"""`/admin/branches`: what decides beside the model, loaded and unloaded while it serves.

Whoever holds an admin key names folders of the server's own disk, so only those inside the
configured root are looked at, and what is wrong with one is told without what it holds.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from pydantic import Field
from starlette.responses import Response

from lockstep.branch import Branch, BranchError, check_branch_name
from lockstep.server.errors import NotFound
from lockstep.server.generation import Service, service_of
from lockstep.server.openapi import returns
from lockstep.server.paths import PathRoute
from lockstep.server.protocol import Body
from lockstep.types import RequestError

log = logging.getLogger("lockstep.server")
router = APIRouter(prefix="/admin", tags=["admin"], route_class=PathRoute)

MAX_BRANCHES = 64
MAX_PATH = 1024


class BranchBody(Body):
    """Body of `POST /admin/branches`: a name, and the folder that holds the branch."""

    name: str
    path: Annotated[str, Field(min_length=1, max_length=MAX_PATH)]


class BranchCard(msgspec.Struct):
    """A loaded branch. `key` tells apart branches that may decide differently; `weight_bytes` is
    what it holds of the device's memory."""

    name: str
    key: str
    base_name: str
    fork: int
    exit: int
    adapt: str
    head: str
    options: tuple[str, ...]
    instructions: str
    thresholds: dict[str, float]
    temperature: float
    calibration: dict[str, Any]
    weight_bytes: int

    @classmethod
    def of(cls, name: str, branch: Branch) -> BranchCard:
        """What is told of it."""
        return cls(
            name=name,
            key=branch.key,
            base_name=branch.base_name,
            fork=branch.fork,
            exit=branch.exit,
            adapt=branch.adapt,
            head=branch.head,
            options=branch.options,
            instructions=branch.instructions,
            thresholds=branch.thresholds,
            temperature=branch.temperature,
            calibration=branch.calibration,
            weight_bytes=branch.weight_bytes,
        )


class BranchCards(msgspec.Struct):
    """Reply of `GET /admin/branches`, by name."""

    data: list[BranchCard]
    object: str = "list"


class Unloaded(msgspec.Struct):
    """Reply of `DELETE /admin/branches/{name}`."""

    name: str
    unloaded: bool = True


@router.get("/branches", responses=returns(BranchCards))
async def list_branches(request: HTTPRequest) -> Response:
    """The loaded branches."""
    found = sorted(service_of(request).branches.items())
    return _json(BranchCards([BranchCard.of(name, branch) for name, branch in found]))


@router.post("/branches", responses=returns(BranchCard))
async def load_branch(body: BranchBody, request: HTTPRequest) -> Response:
    """Load a branch; in place of one of the same name, whose requests end with it."""
    service = service_of(request)
    _check_name(service, body.name)
    folder = await asyncio.to_thread(_inside, service, body.path)
    try:
        branch = await service.llm.load_branch(body.name, folder)
    except BranchError as error:
        raise RequestError(f"path: {error}", field="path", code="invalid_branch") from None
    log.info("loaded branch %s (%s) from %s", body.name, branch.key, folder)
    return _json(BranchCard.of(body.name, branch))


@router.delete("/branches/{name}", responses=returns(Unloaded))
async def unload_branch(name: str, request: HTTPRequest) -> Response:
    """Forget a branch: new requests are refused, those that use it end first."""
    service = service_of(request)
    if name not in service.branches:
        raise NotFound(f"there is no branch {name!r}", field="name", code="branch_not_found")
    try:
        await service.llm.unload_branch(name)
    except BranchError as error:  # somebody else was faster
        raise NotFound(str(error), field="name", code="branch_not_found") from None
    log.info("unloaded branch %s", name)
    return _json(Unloaded(name))


def _check_name(service: Service, name: str) -> None:
    try:
        check_branch_name(name)
    except BranchError as error:
        raise RequestError(f"name: {error}", field="name") from None
    if name == service.model_name:
        raise RequestError(f"name: {name!r} is the model that writes", field="name")
    if name not in service.branches and len(service.branches) >= MAX_BRANCHES:
        raise RequestError(
            f"name: {MAX_BRANCHES} branches are loaded, which is the limit; unload one",
            field="name",
            code="too_many_branches",
        )


def _inside(service: Service, path: str) -> str:
    """The folder, links followed.

    Raises:
        RequestError: it is outside what the server may read from, or no folder.
    """
    roots = _roots(service)
    try:
        folder = Path(os.path.realpath(path))
        is_folder = folder.is_dir()
    except (OSError, ValueError) as error:  # too long, a loop of links, a null character
        raise RequestError(f"path cannot be used: {error}", field="path") from None
    # A root itself is none, or else the folder that holds it would be a root afterwards.
    if not any(root in folder.parents for root in roots):
        raise RequestError(
            f"path must lie inside {' or '.join(map(str, roots))}, got {path[:200]!r}; "
            "`lockstep serve --branch-root FOLDER` allows another",
            field="path",
            code="path_not_allowed",
        )
    if not is_folder:
        raise RequestError(f"path: {path[:200]!r} is no folder", field="path")
    return str(folder)


def _roots(service: Service) -> list[Path]:
    """Folders inside which branches may lie."""
    if service.config.branch_root:
        return [Path(os.path.realpath(service.config.branch_root))]
    started = service.llm.client.config.branches.load
    parents = (os.path.dirname(os.path.realpath(folder)) for _, folder in started)
    return list(dict.fromkeys(Path(folder) for folder in (os.path.realpath("."), *parents)))


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
