"""The engine: from queued requests to steps, one sequence's life at a time.

Where does my code go?

- `sequence.py`: one choice of one request, its state and what it needs next.
- `scheduler.py`: a step's life: planned, under way, taken in; pure, without tensors or clock.
- `filling.py`: which token runs the next step has.
- `queues.py`: who runs and who waits, and how a sequence goes from one to the other.
- `routes.py`: how the rows of a branch's decision pass through the layers.
- `gates.py`: what a gate reads before a request writes; `branches.py`: branches by name.
- `loop.py`: `Engine`: checks requests, runs plans, survives a failing step.
- `process.py`, `client.py`, `link.py`, `remote.py`: an engine in a process of its own, and the
  way to it.
"""
