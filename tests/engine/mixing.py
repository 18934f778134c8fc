"""Generation, decisions and gates in one engine, and the bits of what comes of each."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.branch import TARGETS, Branch
from lockstep.config import BranchOptions, CacheConfig, SchedulerConfig
from lockstep.engine.loop import Engine
from lockstep.kernels.contract import Backend
from lockstep.model import DecoderModel
from lockstep.runner.runner import Identity, Runner
from lockstep.types import (
    FinishReason,
    Gate,
    GateProbe,
    Request,
    SamplingParams,
    SequenceOutput,
)
from lockstep.weights.branch import write_package
from tests.model.branches import random_tensors

BASE = "hash of the weights"
OPTIONS = ("answer", "search", "refuse")
QUESTION = 6  # tokens of a suffix

Bits = tuple[object, ...]


@dataclass(frozen=True)
class Mixed:
    """A model and what to make engines of; branch folders by name.

    Attributes:
        context: most tokens of a sequence. pool: bytes of the page pool.
    """

    model: DecoderModel
    backend: Backend
    folders: dict[str, str]
    branches: dict[str, Branch]
    context: int
    pool: int
    page_tokens: int = 16

    def engine(self, *, branches: bool = True, keep: bool = True, **settings: Any) -> Engine:
        """An engine with a cold cache, with the branches loaded or without any."""
        scheduler = SchedulerConfig(**{"max_sequences": 128, **settings}).resolved(
            self.backend.kind
        )
        runner = Runner(
            self.model,
            self.backend,
            page_tokens=self.page_tokens,
            memory_bytes=self.pool,
            max_context=self.context,
            step_tokens=scheduler.max_step_tokens,
            max_sequences=scheduler.max_sequences,
            identity=Identity("mixed", BASE),
            branches=list(self.branches.values()) if branches else [],
        )
        load = tuple(self.folders.items()) if branches else ()
        return Engine(
            runner,
            scheduler,
            CacheConfig(prefix_caching=keep),
            runner.info(),
            branches=BranchOptions(load=load),
        )


def mixed(
    model: DecoderModel,
    backend: Backend,
    folder: Path,
    layers: dict[str, tuple[int, int]],
    *,
    context: int,
    pool: int,
    page_tokens: int = 16,
) -> Mixed:
    """Random branches over these layers; names begin with "suffix" or "context"."""
    folders, branches = {}, {}
    for seed, (name, (fork, exit_)) in enumerate(layers.items()):
        described = Branch(
            base=BASE,
            base_name="mixed",
            fork=fork,
            exit=exit_,
            adapt="context" if name.startswith("context") else "suffix",
            rank=8,
            scale=0.5,
            targets=TARGETS,
            head="options",
            options=OPTIONS,
            suffix="?",
        )
        tensors = random_tensors(model, described, seed)
        for key in tensors:  # adapters that matter, and do not drown what they are added to
            if "lora_A" in key:
                tensors[key] = tensors[key] * model.hidden_size**-0.5
        folders[name] = str(folder / name)
        branches[name] = write_package(described, tensors, folders[name])
    return Mixed(model, backend, folders, branches, context, pool, page_tokens)


def ids(source: random.Random, count: int, vocabulary: int) -> tuple[int, ...]:
    return tuple(source.randrange(vocabulary) for _ in range(count))


def generation(count: int, vocabulary: int, longest: int, new: int = 4) -> list[Request]:
    """Greedy and drawn, with logprobs, some of two choices; lengths are unlike."""
    source = random.Random(11)
    ways: tuple[dict[str, object], ...] = (
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
        {"temperature": 1.2, "repetition_penalty": 1.3, "n": 2},
    )
    return [
        Request(
            f"write{i}",
            ids(source, source.randint(1, longest), vocabulary),
            SamplingParams(max_tokens=new, seed=i, logprobs=2, **ways[i % 4]),  # type: ignore[arg-type]
        )
        for i in range(count)
    ]


def decisions(
    count: int, names: Sequence[str], about: Sequence[Request], vocabulary: int
) -> list[Request]:
    """Each branch in turn, about what the writers go on from and about other texts."""
    source = random.Random(12)
    found = []
    for i in range(count):
        of = about[source.randrange(len(about))].prompt
        own = ids(source, source.randint(1, len(of)), vocabulary)
        context = of if i % 2 else own
        found.append(
            Request(
                f"decide{i}",
                (*context, *ids(source, QUESTION, vocabulary)),
                SamplingParams(max_tokens=0, seed=0),
                branch=names[i % len(names)],
                branch_from=len(context),
            )
        )
    return found


def gated(request: Request, name: str, suffix: tuple[int, ...], header: tuple[int, ...]) -> Request:
    """Write only if the branch's first option is the most probable; else by another header."""
    gate = Gate(
        branch=name,
        probes=(GateProbe(suffix),),
        headers=(header, None, header),
        thresholds=(None, None, None),
        outputs=(0, 1, 2),
    )
    return replace(request, id=f"gate {request.id}", gate=gate)


def run(engine: Engine, arrivals: Iterable[Sequence[Request]]) -> dict[str, Bits]:
    """Answers by request; one group of requests arrives before each step."""
    outputs: dict[tuple[str, int], list[SequenceOutput]] = {}
    waiting = iter(arrivals)
    more = True
    while more or engine.has_work():
        group = next(waiting, None)
        more = group is not None
        for request in group or ():
            engine.submit(request)
        for out in engine.step() if engine.has_work() else ():
            assert out.finish is not FinishReason.ERROR, out.error
            outputs.setdefault((out.request, out.choice), []).append(out)
    engine.check_integrity()
    return {f"{name} {choice}": bits(found) for (name, choice), found in outputs.items()}


def bits(outputs: Sequence[SequenceOutput]) -> Bits:
    """Tokens, and the bits of every logprob, score and probability."""
    entries = [entry for out in outputs for entry in out.logprobs]
    values = [v for e in entries for v in (e.logprob, *(value for _, value in e.top))]
    values += [value for out in outputs for value in out.scores]
    gates = [out.gate for out in outputs if out.gate is not None]
    values += [v for gate in gates for v in (*gate.logprobs, *gate.probabilities, gate.mass)]
    tokens = tuple(token for out in outputs for token in out.tokens)
    assert values
    return tokens, struct.pack(f"<{len(values)}d", *values), outputs[-1].finish


def interleaved(writers: Sequence[Request], judged: Sequence[Request]) -> list[list[Request]]:
    """Writers two by two, and with them their share of the decisions."""
    share = -(-len(judged) // max(1, len(writers)))
    groups = []
    for i in range(0, len(writers), 2):
        groups.append([*judged[i * share : (i + 2) * share], *writers[i : i + 2]])
    return groups


def writes(answers: dict[str, Bits]) -> dict[str, Bits]:
    return {name: found for name, found in answers.items() if name.startswith("write")}


def decides(answers: dict[str, Bits]) -> dict[str, Bits]:
    return {name: found for name, found in answers.items() if name.startswith("decide")}


def differ(answers: dict[str, Bits]) -> bool:
    """Whether most answers are unlike each other: a comparison of constants proves nothing."""
    return len({found[1] for found in answers.values()}) > len(answers) // 2


def check_gates(world: Mixed, writers: Sequence[Request]) -> tuple[int, int]:
    """Gated requests, every writer through every branch, against what they stand for: a
    decision and an ungated answer, each alone on a cold cache.

    Returns: how many gates opened, of how many.
    """
    header, question = (7, 8, 9), (11, 12, 13, 14)
    work = []
    for one in writers:
        for name in world.branches:
            made = gated(one, name, question, header)
            work.append(replace(made, id=f"{name} {made.id}"))
    found = run(world.engine(), interleaved(work, writers))
    engine, opened = world.engine(), 0
    for one in writers:
        engine.flush_cache()
        plain = run(engine, [[replace(one, prompt=(*one.prompt, *header))]])
        for name in world.branches:
            asked = Request(
                "decide",
                (*one.prompt, *question),
                SamplingParams(max_tokens=0, seed=0),
                branch=name,
                branch_from=len(one.prompt),
            )
            engine.flush_cache()
            engine.submit(asked)
            outputs = []
            while engine.has_work():
                outputs += engine.step()
            (scores,) = [out.scores for out in outputs if out.scores]
            opens = max(range(3), key=lambda i: (scores[i], -i)) != 1
            opened += opens
            for choice in range(one.sampling.n):
                tokens, values, finish = found[f"{name} gate {one.id} {choice}"]
                assert isinstance(values, bytes)
                if not opens:
                    assert (tokens, finish) == ((), FinishReason.GATE)
                    continue
                expected, logprobs, end = plain[f"{one.id} {choice}"]
                assert isinstance(logprobs, bytes)
                assert (tokens, finish) == (expected, end)
                assert values.startswith(logprobs)  # behind them stand those of the gate
    return opened, len(work)
