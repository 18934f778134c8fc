"""`GET /v1/models`: what is served."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from starlette.responses import Response

from lockstep.server import replies
from lockstep.server.generation import Service, service_of

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: HTTPRequest) -> Response:
    """The models that requests may name."""
    reply = replies.ModelList(data=[_card(service_of(request))])
    return Response(replies.encode(reply), media_type="application/json")


@router.get("/v1/models/{name:path}")
async def get_model(name: str, request: HTTPRequest) -> Response:
    """One of them."""
    service = service_of(request)
    service.check_model(name)
    return Response(replies.encode(_card(service)), media_type="application/json")


def _card(service: Service) -> replies.ModelCard:
    return replies.ModelCard(
        id=service.model_name,
        created=service.started,
        max_model_len=service.llm.info.max_context,
    )
