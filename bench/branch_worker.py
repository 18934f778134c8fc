"""An engine in a process of its own, for comparisons of one engine with two on one card.

The model is loaded once; `Worker.set_up` makes another engine over it, with other branches and
settings, which takes a few seconds in place of a start.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

from bench.branch_package import BASE
from lockstep.types import EngineStats, Request

STEP_TOKENS = 8192
SEQUENCES = 64  # at once, at most


@dataclass(frozen=True)
class Setting:
    """What an engine is made of.

    Attributes:
        folder: of the branch "judge", none where empty.
        depth, caching, graphs: as in `BranchOptions`, `CacheConfig` and `ModelOptions`.
        pool: bytes of its pages.
    """

    folder: str = ""
    depth: Literal["full", "exit"] = "full"
    caching: bool = True
    graphs: bool = True
    pool: int = 40 << 30


@dataclass(frozen=True)
class Room:
    """Tokens that the pool holds, without and with the branch named at start."""

    alone: int
    beside: int


@dataclass(frozen=True)
class Answered:
    """What came of one request."""

    id: str
    tokens: tuple[int, ...]
    scores: tuple[float, ...]
    chosen: int | None
    logprobs: tuple[float, ...] = ()


class _Engine:
    """Requests in, answers out, over one loaded model."""

    def __init__(self, model: Any, backend: Any, shape: str, setting: Setting) -> None:
        import torch

        from lockstep.branch import read_branch
        from lockstep.config import BranchOptions, CacheConfig, SchedulerConfig
        from lockstep.engine.loop import Engine
        from lockstep.runner.memory import plan_pool
        from lockstep.runner.runner import Identity, Runner

        scheduler = SchedulerConfig(max_step_tokens=STEP_TOKENS, max_sequences=SEQUENCES)
        cache = CacheConfig(prefix_caching=setting.caching)
        runner = Runner(
            model,
            backend,
            page_tokens=cache.resolved(backend.kind).page_tokens,
            memory_bytes=setting.pool,
            step_tokens=STEP_TOKENS,
            max_sequences=SEQUENCES,
            graphs=setting.graphs,
            identity=Identity(shape, BASE),
            branches=[read_branch(setting.folder)] if setting.folder else [],
        )
        runner.warm_up()
        elements = setting.pool // torch.empty((), dtype=model.dtype).element_size()
        self.room = Room(
            *(
                plan_pool(groups, runner.page_tokens, elements).tokens()
                for groups in (model.groups, runner.groups)
            )
        )
        load = (("judge", setting.folder),) if setting.folder else ()
        options = BranchOptions(load=load, depth=setting.depth)
        self.engine = Engine(runner, scheduler, cache, runner.info(), branches=options)
        self.tails = 0
        self._found: dict[str, list[Any]] = {}

    def submit(self, requests: list[Request]) -> None:
        for request in requests:
            self._found[request.id] = []
            self.engine.submit(request)

    def step(self) -> list[Answered]:
        """Those that have ended."""
        done = []
        for out in self.engine.step():
            if out.error:
                raise RuntimeError(f"{out.request}: {out.error}")
            self._found[out.request].append(out)
            if out.finish is not None:
                outputs = self._found.pop(out.request)
                gates = [o.gate.chosen for o in outputs if o.gate is not None]
                done.append(
                    Answered(
                        out.request,
                        tuple(token for o in outputs for token in o.tokens),
                        outputs[-1].scores,
                        gates[0] if gates else None,
                        tuple(entry.logprob for o in outputs for entry in o.logprobs),
                    )
                )
        self.tails = max(self.tails, self.engine.stats().pages_tail)
        return done


def _serve(pipe: Connection, shape: str) -> None:
    """Load the model; then make engines and serve requests until told to stop."""
    import gc

    import torch

    from bench.random_model import random_model
    from bench.shapes import SHAPES
    from lockstep.kernels import cpu, cuda

    on_gpu = torch.cuda.is_available()
    backend = cuda.make_backend("cuda") if on_gpu else cpu.make_backend()
    model = random_model(SHAPES[shape], backend)
    pipe.send(model.num_layers)
    own: _Engine | None = None
    while True:
        while pipe.poll(0 if own is not None and own.engine.has_work() else None):
            message = pipe.recv()
            if message == "stop":
                return
            if isinstance(message, Setting):
                if own is not None:
                    own.engine.close()
                own = None
                gc.collect()  # engines and their graphs refer to each other
                if on_gpu:
                    torch.cuda.empty_cache()
                own = _Engine(model, backend, shape, message)
                pipe.send(own.room)
                continue
            assert own is not None
            if message == "stats":
                pipe.send((own.engine.stats(), own.tails))
            elif message == "flush":
                own.engine.flush_cache()
                own.tails = 0
            else:
                own.submit(message)
        assert own is not None
        done = own.step()
        if done:
            pipe.send(done)


class Worker:
    """The other end of such a process; the model loads meanwhile."""

    def __init__(self, shape: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, other = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(other, shape), daemon=True)
        self._process.start()
        other.close()

    def loaded(self) -> int:
        """Wait for the model: its layers. To be called once, before anything else."""
        layers: int = self.pipe.recv()
        return layers

    def set_up(self, setting: Setting) -> Room:
        """Another engine in place of the one before."""
        self.pipe.send(setting)
        room: Room = self.pipe.recv()
        return room

    def stats(self) -> tuple[EngineStats, int]:
        """The engine's counters, and the branches' pages at most since the last flush."""
        self.pipe.send("stats")
        found: tuple[EngineStats, int] = self.pipe.recv()
        return found

    def flush(self) -> None:
        self.pipe.send("flush")

    def close(self) -> None:
        self.pipe.send("stop")
        self._process.join(60)
