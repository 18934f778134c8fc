"""Decisions over HTTP, in the two shapes that clients of 2026 speak.

Where things go:
- `openai.py`: `POST /v1/decisions`, OpenAI's shape.
- `systemone.py`: `POST /v1/systemone`, TypeSafe's shape.
- `account.py`: runs an inquiry and counts its tokens.

What a decision is: `lockstep.decisions`. How to ask: `docs/decisions.md`.
"""

from __future__ import annotations

from fastapi import APIRouter

from lockstep.server.decisions import openai, systemone

router = APIRouter()
router.include_router(openai.router)
router.include_router(systemone.router)
