"""`/v1/responses`: items in, items out, and conversations that the server remembers.

Where things go:
- `bodies.py`: the request body; `items.py`, `parts.py`: its input, and as chat messages.
- `objects.py`: items and responses as they are stored and sent.
- `builder.py`: pieces of an answer to events (`events.py`) and to the whole response.
- `store.py`: finished responses, for a while and up to a size.
- `call.py`: one request from its body to its last event; `route.py`: the routes.
"""
