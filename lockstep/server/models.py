"""`GET /v1/models`: what is served; OpenAI's clients read `data`, TypeSafe's `models`."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from msgspec import UNSET
from starlette.responses import Response

from lockstep.server import replies
from lockstep.server.generation import Service, service_of
from lockstep.server.openapi import returns

router = APIRouter()


class ModelDescription(replies.Reply):
    """One served model as TypeSafe's client reads it; released: when this server loaded it."""

    name: str
    description: str
    release_date: str


class ModelListing(replies.ModelList):
    """Reply of `GET /v1/models`."""

    models: list[ModelDescription] = msgspec.field(default_factory=list)


@router.get("/v1/models", responses=returns(ModelListing))
async def list_models(request: HTTPRequest) -> Response:
    """The models that requests may name: the one that writes, and the branches that decide."""
    service = service_of(request)
    names = (service.model_name, *sorted(service.branches))
    reply = ModelListing(
        data=[_card(service, name) for name in names],
        models=[_described(service, name) for name in names],
    )
    return Response(replies.encode(reply), media_type="application/json")


@router.get("/v1/models/{name:path}", responses=returns(replies.ModelCard))
async def get_model(name: str, request: HTTPRequest) -> Response:
    """One of them."""
    service = service_of(request)
    service.decider(name)
    return Response(replies.encode(_card(service, name)), media_type="application/json")


def _described(service: Service, name: str) -> ModelDescription:
    info, branch = service.llm.info, service.branches.get(name)
    text = (
        f"{info.architecture}, {info.dtype} on {info.device}, "
        f"a context of {info.max_context} tokens"
    )
    if branch is not None and name != service.model_name:
        what = {"options": ", ".join(branch.options[:8]), "codes": "any question"}
        text = f"A branch of {service.model_name}: {what.get(branch.head, 'a number')}"
        text += f". {branch.instructions}" if branch.instructions else ""
    return ModelDescription(
        name=name,
        description=text,
        release_date=datetime.fromtimestamp(service.started, UTC).date().isoformat(),
    )


def _card(service: Service, name: str) -> replies.ModelCard:
    return replies.ModelCard(
        id=name,
        created=service.started,
        max_model_len=service.llm.info.max_context,
        parent=UNSET if name == service.model_name else service.model_name,
    )
