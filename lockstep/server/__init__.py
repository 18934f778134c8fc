"""HTTP: OpenAI-compatible routes over an `AsyncLLM`. Imports no torch.

Where things go:
- `app.py`: the application: routes, middleware, error handlers.
- `protocol.py`: request bodies (pydantic) and what they mean as `SamplingParams`.
- `replies.py`: reply bodies (msgspec), one struct a JSON object.
- `logprobs.py`: logprobs in the chat, the completions and the prompt shape.
- `completions.py`, `chat.py`, `models.py`: one file a family of routes.
- `sse.py`: event streams, merging, and what happens when the client goes away.
- `errors.py`: every error in OpenAI's shape.
- `openapi.py`: what `/openapi.json` says of replies; every route names its own.
- `serve.py`: listen until told to stop, then drain; `connections.py`: silent clients.

What operators need, in the order in which a request meets it:
- `frontdoor.py`: every HTTP request begins and ends here; `calls.py`: its account.
- `auth.py`, `limits.py`: whose it is, and how much they may ask for.
- `operations.py`: every request to the engine, whoever sends it; draining.
- `metrics.py`, `tracing.py`, `status.py`, `admin.py`: what is counted, and how to look at it.
"""

from __future__ import annotations

from lockstep.server.app import create_app

__all__ = ["create_app"]
