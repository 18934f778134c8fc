"""Requests through an engine of this process, so many at once, and what they cost."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from lockstep.engine.loop import Engine
from lockstep.types import EngineStats, Request, SequenceOutput

OUTSTANDING = 512


@dataclass
class Driven:
    """What came of some requests.

    Attributes:
        seconds: from the first submit to the last output. cpu: of all threads meanwhile.
        outputs: by request, in their order.
        before, after: the engine's counters around it.
    """

    seconds: float = 0.0
    cpu: float = 0.0
    outputs: dict[str, list[SequenceOutput]] = field(default_factory=dict)
    before: EngineStats = field(default_factory=EngineStats)
    after: EngineStats = field(default_factory=EngineStats)

    @property
    def computed(self) -> int:
        """Rows that went through the model."""
        return self.after.computed_tokens - self.before.computed_tokens

    @property
    def generated(self) -> int:
        return self.after.generated_tokens - self.before.generated_tokens

    @property
    def steps(self) -> int:
        return self.after.steps - self.before.steps


def drive(engine: Engine, requests: Iterable[Request], outstanding: int = OUTSTANDING) -> Driven:
    """Run all requests; `outstanding` of them are queued or running at a time.

    Raises:
        RuntimeError: one ended with an error.
    """
    waiting = deque(requests)
    found = Driven(before=engine.stats())
    live: dict[str, int] = {}
    begin, worked = time.perf_counter(), time.process_time()
    while waiting or live:
        while waiting and len(live) < outstanding:
            request = waiting.popleft()
            live[request.id] = request.sampling.n
            found.outputs[request.id] = []
            engine.submit(request)
        for out in engine.step():
            if out.error:
                raise RuntimeError(f"{out.request}: {out.error}")
            found.outputs[out.request].append(out)
            if out.finish is not None:
                live[out.request] -= 1
                if not live[out.request]:
                    del live[out.request]
    found.seconds, found.cpu = time.perf_counter() - begin, time.process_time() - worked
    found.after = engine.stats()
    return found
