"""Requests that nobody would send, by the ten thousand, and what must hold whatever comes.

- `target.py`: the application in this process over a scripted engine in its own, and the
  invariants: no 5xx, every error in one shape, streams that end, nothing left behind, the same
  bits for good requests as before.
- `bodies.py`: good bodies with something wrong in them, odd paths, forms and headers.
- `test_bodies.py`, `test_openapi.py` (by schemathesis, from the server's own document),
  `test_connections.py` (below HTTP), `test_real_engine.py` (SmolLM2), `test_security.py` (what
  no request may do), `test_found.py` (what was found once).

`pytest tests/fuzz --fuzz-requests 500000` with `HYPOTHESIS_PROFILE=explore` looks for more.
"""
