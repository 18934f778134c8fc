"""The page for people at `/`: chat with token probabilities, decisions, the engine live.

Plain HTML, CSS and JavaScript modules in `static/`, without a build step and without
anything from elsewhere; the page talks to the same public routes as every client.
"""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

router = APIRouter(include_in_schema=False)

# Nothing but this server's own files and routes; no inline script, no framing.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# Read once: what is not in this table cannot be asked for, whatever the path says.
_FILES = {
    entry.name: entry.read_bytes()
    for entry in (files("lockstep.server.page") / "static").iterdir()
    if entry.name.rpartition(".")[2] in _MEDIA_TYPES
}


@router.get("/")
async def index() -> Response:
    """The page."""
    return _file("index.html")


@router.get("/page/{name}")
async def asset(name: str) -> Response:
    """One of the page's own files."""
    return _file(name) if name in _FILES else Response(status_code=404)


def _file(name: str) -> Response:
    headers = {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": CONTENT_SECURITY_POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    media_type = _MEDIA_TYPES[name.rpartition(".")[2]]
    return Response(_FILES[name], headers=headers, media_type=media_type)
