"""The engine: from queued requests to steps, one sequence's life at a time.

Where does my code go?

- `sequence.py`: one choice of one request, its state and what it needs next.
- `scheduler.py`: which token runs the next step has; pure, without tensors or clock.
- `queues.py`: who runs and who waits, and how a sequence goes from one to the other.
- `loop.py`: `Engine`: checks requests, runs plans, survives a failing step.
- `process.py`, `client.py`: an engine in a process of its own, and the way to it.
"""
