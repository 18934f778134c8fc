"""Requests of a self-test, and engines that run them under one schedule or another.

Imports no torch at its head: whoever makes a `World` loads a model, and with it torch.
"""

from __future__ import annotations

import random
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from lockstep.branch import Branch, read_branch
from lockstep.config import (
    BranchOptions,
    CacheConfig,
    ConfigError,
    EngineConfig,
    ModelOptions,
    SchedulerConfig,
)
from lockstep.types import (
    FinishReason,
    Gate,
    GateProbe,
    LockstepError,
    Request,
    SamplingParams,
    SequenceOutput,
)

if TYPE_CHECKING:
    from lockstep.engine.loop import Engine
    from lockstep.runner.runner import Runner

CONTEXT = 1024
LONG = 600  # tokens of the long probe: it crosses an attention segment, which has 512
ANSWER = 8  # tokens of an answer
STRANGERS = 32
FEW_ROWS = 4
CUDA_POOL = 2 << 30  # bytes; leaves room for the second pool that some schedules need
PLAIN_SLABS = 160  # of a second pool that is not meant to be short

Answer = tuple[tuple[int, ...], tuple[int, ...], bytes]
Answers = dict[str, Answer]


def probes(vocabulary: int) -> list[Request]:
    """The requests whose bits are watched: greedy, drawn, filtered, penalised with two choices,
    long, and one that decides before it writes."""
    source = random.Random(3)
    ways: tuple[tuple[str, int, dict[str, Any]], ...] = (
        ("greedy", 23, {"temperature": 0.0, "prompt_logprobs": 2}),
        ("drawn", 37, {"temperature": 1.0, "seed": 11}),
        ("filtered", 5, {"temperature": 0.8, "seed": -5, "top_k": 50, "top_p": 0.9, "min_p": 0.01}),
        ("penalised", 18, {"temperature": 1.2, "seed": 7, "repetition_penalty": 1.3, "n": 2}),
        ("long", LONG, {"temperature": 0.0}),
    )
    asked = [
        _request(name, source, vocabulary, length, ANSWER, logprobs=3, **params)
        for name, length, params in ways
    ]
    gated = _request("gated", source, vocabulary, 29, ANSWER, temperature=0.0, logprobs=3)
    return [*asked, replace(gated, gate=_gate(source, vocabulary))]


def _gate(source: random.Random, vocabulary: int) -> Gate:
    """One of two tokens behind a question, by the model's own head; writing follows either."""
    suffix = tuple(source.randrange(vocabulary) for _ in range(4))
    first, second = source.sample(range(vocabulary), 2)
    return Gate(
        branch="",
        probes=(GateProbe(suffix, wanted=(first, second)),),
        sequences=((first,), (second,)),
        headers=(suffix, suffix[:2]),
        thresholds=(None, None),
    )


def strangers(vocabulary: int, count: int, longest: int = 24) -> list[Request]:
    """Requests of others: of unlike lengths and ways of drawing."""
    source = random.Random(count)
    return [
        _request(
            f"stranger{index}",
            source,
            vocabulary,
            source.randint(1, longest),
            source.randint(1, ANSWER),
            temperature=(0.0, 0.7, 1.5)[index % 3],
            top_k=(0, 20)[index % 2],
            seed=index,
            logprobs=(None, 1)[index % 2],
        )
        for index in range(count)
    ]


def urgent(vocabulary: int) -> Request:
    """A long request that goes before all others."""
    request = _request("urgent", random.Random(9), vocabulary, LONG, 2, temperature=0.0)
    return replace(request, priority=-1)


def _request(
    name: str, source: random.Random, vocabulary: int, length: int, count: int, **params: Any
) -> Request:
    prompt = tuple(source.randrange(vocabulary) for _ in range(length))
    return Request(name, prompt, SamplingParams(max_tokens=count, **{"seed": 0, **params}))


def renamed(requests: Sequence[Request], suffix: str) -> list[Request]:
    """The same requests as somebody else's."""
    return [replace(request, id=f"{request.id} {suffix}") for request in requests]


@dataclass(slots=True)
class Ran:
    """What a run gave.

    Attributes:
        answers: of each request and choice, the tokens, the ids reported beside them, and the
            bits of every logprob and of a branch's outputs.
        cached: prompt tokens of each request that came from the prefix cache.
        steps, preemptions: of the engine, in this run.
    """

    answers: Answers
    cached: dict[str, int]
    steps: int
    preemptions: int

    def of(self, requests: Sequence[Request]) -> Answers:
        """The answers to these requests."""
        names = {request.id for request in requests}
        return {key: value for key, value in self.answers.items() if key.split("/")[0] in names}


def run(engine: Engine, work: Sequence[Request], late: Request | None = None) -> Ran:
    """Run requests to their end, all of them in the engine from the beginning.

    Args:
        late: arrives after three steps.

    Raises:
        LockstepError: the engine failed on one.
    """
    before = engine.stats()
    found: dict[tuple[str, int], list[SequenceOutput]] = defaultdict(list)

    def step() -> None:
        for output in engine.step():
            if output.finish is FinishReason.ERROR:
                raise LockstepError(f"the engine failed: {output.error}")
            found[output.request, output.choice].append(output)

    for request in work:
        engine.submit(request)
    if late is not None:
        for _ in range(3):
            step()
        engine.submit(late)
    while engine.has_work():
        step()
    after = engine.stats()
    return Ran(
        {f"{name}/{choice}": _packed(outputs) for (name, choice), outputs in found.items()},
        {name: outputs[0].cached_tokens for (name, _), outputs in found.items()},
        after.steps - before.steps,
        after.preemptions - before.preemptions,
    )


def alone(
    world: World,
    asked: Sequence[Request],
    runner: Runner | None = None,
    *,
    branches: bool = False,
) -> Answers:
    """Answers of each request alone, with a cold cache."""
    found: Answers = {}
    engine = world.engine(runner, branches=branches)
    for request in asked:
        engine.flush_cache()
        found |= run(engine, [request]).answers
    return found


def _packed(outputs: Sequence[SequenceOutput]) -> Answer:
    entries = [entry for output in outputs for entry in output.logprobs]
    for output in outputs:
        entries += [entry for entry in output.prompt_logprobs or () if entry is not None]
    values = [value for e in entries for value in (e.logprob, *(v for _, v in e.top))]
    named = [number for e in entries for number in (e.token, e.rank, *(t for t, _ in e.top))]
    for output in outputs:
        values += output.scores
        if output.gate is not None:
            named.append(output.gate.chosen)
            values += [*output.gate.logprobs, *output.gate.probabilities, output.gate.mass]
    tokens = tuple(token for output in outputs for token in output.tokens)
    return tokens, tuple(named), struct.pack(f"<{len(values)}d", *values)


class World:
    """A model that was loaded once, and engines over it.

    Args:
        options: what to load; graphs are used where they are by default.
        folders: of branches, by name.

    Attributes:
        branches: what their descriptions say, by name.

    Raises:
        LockstepError: it does not load.
    """

    def __init__(self, options: ModelOptions, folders: Mapping[str, str] | None = None) -> None:
        from lockstep.runner import load_runner

        self.options = options
        self._load = tuple((folders or {}).items())
        self.branches: dict[str, Branch] = {n: read_branch(folder) for n, folder in self._load}
        self._runner = load_runner(
            EngineConfig(
                model=options,
                # On a GPU the default would take all of its memory.
                cache=CacheConfig(memory_bytes=CUDA_POOL if _on_cuda(options) else 0),
                scheduler=SchedulerConfig(max_context=CONTEXT),
                branches=BranchOptions(load=self._load),
            )
        )
        self.info = self._runner.info()
        self.context = self._runner.max_context

    def engine(
        self,
        runner: Runner | None = None,
        *,
        branches: bool = False,
        depth: Literal["full", "exit"] = "full",
        **settings: Any,
    ) -> Engine:
        """An engine with a cold cache, on the model's own runner or another.

        Args:
            branches: whether it serves them. depth: see `BranchOptions`.
            settings: of its scheduler.
        """
        from lockstep.engine.loop import Engine

        taken = runner or self._runner
        served = BranchOptions(load=self._load if branches else (), depth=depth)
        return Engine(
            taken, SchedulerConfig(**settings), CacheConfig(), taken.info(), branches=served
        )

    def plain_runner(self, slabs: int = PLAIN_SLABS) -> Runner:
        """Another runner over the same weights, without graphs.

        Args:
            slabs: of its pool; 0 takes the fewest that hold one sequence of full length.

        Raises:
            ConfigError: the slabs hold no sequence.
        """
        count = slabs or 2
        while True:
            made = self._runner_of(count)
            if slabs and made is None:
                raise ConfigError(f"{slabs} slabs hold no sequence")
            if made is not None and (slabs or made.max_context >= self.context):
                return made
            count = count * 5 // 4 + 1

    def _runner_of(self, slabs: int) -> Runner | None:
        """None when the slabs hold not one page of every kind."""
        from lockstep.runner.runner import Runner

        try:
            return Runner(
                self._runner.model,
                self._runner.backend,
                page_tokens=self._runner.page_tokens,
                num_slabs=slabs,
                max_context=self.context,
                graphs=False,
            )
        except ConfigError:
            return None

    @contextmanager
    def sums_that_follow_the_batch(self) -> Iterator[None]:
        """Make every matrix product's tree depend on how many rows share it, as in libraries
        that are tuned by batch: for few rows K is cut in two, and the parts are added.

        This breaks the promise on purpose, for as long as the context is open.
        """
        backend: Any = self._runner.backend
        whole, adapted = backend.linear, backend.adapted_linear

        def linear(x: Any, weight: Any, bias: Any = None, residual: Any = None) -> Any:
            if x.shape[0] > FEW_ROWS:
                return whole(x, weight, bias, residual)
            low, high = _halves(x)
            out = whole(low, weight, bias) + whole(high, weight)
            return out if residual is None else residual + out

        def adapted_linear(
            x: Any, weight: Any, lora: Any, bias: Any = None, residual: Any = None
        ) -> Any:
            if x.shape[0] > FEW_ROWS:
                return adapted(x, weight, lora, bias, residual)
            low, high = _halves(x)
            out = adapted(low, weight, lora, bias) + adapted(high, weight, lora)
            return out if residual is None else residual + out

        backend.linear, backend.adapted_linear = linear, adapted_linear
        try:
            yield
        finally:
            del backend.linear, backend.adapted_linear


def _halves(x: Any) -> tuple[Any, Any]:
    """Rows in two, along K: the rest of either is zero."""
    low, high = x.clone(), x.clone()
    half = x.shape[1] // 2
    low[:, half:] = 0
    high[:, :half] = 0
    return low, high


def _on_cuda(options: ModelOptions) -> bool:
    """Whether the model will lie on a GPU, as `make_backend` decides."""
    from lockstep.kernels import make_backend

    return make_backend(options).kind == "cuda"
