"""Random driving with branches and gates beside generation, on the fake that knows which rows
wrote which layers of every slot: see `test_simulator`."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from lockstep.branch import Branch
from lockstep.config import BranchOptions, SchedulerConfig
from lockstep.engine.sequence import Sequence
from lockstep.options import log_softmax, normalise, probes
from lockstep.types import (
    FinishReason,
    Gate,
    GateOutcome,
    GateProbe,
    LayerGroup,
    Request,
    RequestError,
    SamplingParams,
    SequenceOutput,
)
from tests.branch_fake import BranchExecutor, make_branch, scores_of
from tests.engine.test_simulator import PAGE, Driver
from tests.fakes import expected_tokens, logprob_of

LAYERS = 4
FULL = (LayerGroup("full", "full", (0, 1, 2, 3), 1, 8),)


def mixed(window: int) -> tuple[LayerGroup, ...]:
    return (
        LayerGroup("full", "full", (0, 2), 1, 8),
        LayerGroup("sliding", "sliding", (1, 3), 1, 8, window),
    )


BRANCHES = {
    "suffix": ("suffix", 1, 3),
    "deep": ("suffix", 0, 4),
    "context": ("context", 1, 3),
    "other": ("context", 1, 3),
    "from0": ("context", 0, 2),
    "late": ("context", 3, 4),
}


class BranchDriver(Driver):
    """Decisions, gates and generation at once, on branches that come and go."""

    def __init__(
        self, seed: int, executor: BranchExecutor, config: SchedulerConfig, options: BranchOptions
    ) -> None:
        super().__init__(seed, executor, config, keep=seed % 3 != 2, branches=options)
        self.host = executor
        self.folders = dict(options.load)
        self.decided: dict[str, tuple[float, ...]] = {}
        self.gates: dict[tuple[str, int], GateOutcome] = {}
        self.asked: dict[str, Branch] = {}

    def submit(self) -> None:
        chance = self.random
        what = chance.choice(("generate", "decide", "gate", "gate"))
        names = sorted(self.engine.branches)
        if what == "generate" or (what == "decide" and not names):
            super().submit()
            return
        shared = chance.choice(self.prefixes)
        context = shared[: chance.randint(1, len(shared))] + self.draw(chance.randint(0, 6))
        priority, salt = chance.choice((0, 0, 0, 1, -1)), chance.choice(("", "", "b"))
        name = f"r{len(self.requests)}"
        if what == "decide":
            branch = chance.choice(names)
            begins = chance.choice((len(context), len(context), 0))
            request = Request(
                name,
                context + self.draw(chance.randint(1, 6)),
                SamplingParams(max_tokens=0, seed=0),
                priority=priority,
                salt=salt,
                branch=branch,
                branch_from=begins,
            )
        else:
            params = SamplingParams(
                max_tokens=chance.choice((0, 1, 5)),
                n=chance.choice((1, 1, 3)),
                seed=chance.randrange(3),
                prompt_logprobs=chance.choice((None, None, None, 1)),
            )
            branch = chance.choice([*names, ""])
            request = Request(
                name,
                context,
                params,
                priority=priority,
                salt=salt,
                score_from=chance.choice((1, chance.randint(1, len(context)))),
                gate=self.gate(branch),
            )
        try:
            self.engine.submit(request)
        except RequestError as error:
            assert error.code == "context_length_exceeded"  # noqa: PT017
            return
        self.requests[name] = request
        self.open.update((name, choice) for choice in range(request.sampling.n))
        self.submitted += request.sampling.n
        if branch:
            self.asked[name] = self.engine.branches[branch]

    def gate(self, branch: str) -> Gate:
        chance = self.random
        count = 3 if branch else chance.choice((2, 4))
        headers = [
            chance.choice((None, (), self.draw(1), self.draw(chance.randint(2, 6))))
            for _ in range(count)
        ]
        if branch:
            probe = GateProbe(self.draw(chance.randint(1, 6)))
            return Gate(branch, (probe,), tuple(headers), (None,) * 3, outputs=(0, 1, 2))
        paths = (
            chance.choice((((0,), (1,)), ((0, 1), (0, 2))))
            if count == 2
            else ((0, 1, 2), (0, 2, 1), (1, 0), (2,))
        )
        suffix = self.draw(chance.randint(0, 5))
        asked = tuple(GateProbe(suffix, probe.path, probe.wanted) for probe in probes(paths))
        return Gate("", asked, tuple(headers), (None,) * count, sequences=paths)

    def reload(self) -> None:
        name = self.random.choice(sorted(self.folders))
        if name in self.engine.branches and self.random.random() < 0.5:
            self.engine.unload_branch(name)
        else:
            self.engine.load_branch(name, self.folders[name])

    def take(self, output: SequenceOutput) -> None:
        key = (output.request, output.choice)
        if output.scores:
            assert output.request not in self.decided
            self.decided[output.request] = output.scores
        if output.gate is not None:
            assert key not in self.gates
            assert key not in self.finish
            assert not self.tokens[key]
            self.gates[key] = output.gate
        elif output.tokens or output.finish is FinishReason.LENGTH:
            gated = self.requests[output.request].gate is not None
            assert not gated or key in self.gates, "it writes before it has decided"

    def left(self, sequence: Sequence) -> int:
        gate = sequence.gate
        if gate is None:
            return super().left(sequence)
        probes_left = sum(len(p.suffix) + len(p.path) + 1 for p in gate.gate.probes)
        # A writer that reports its prompt computes that again.
        return gate.prompt_len + probes_left + 2 * max(gate.max_lens) + 2 * PAGE

    def drain(self) -> int:
        steps = 0
        while self.engine.has_work():
            self.step()
            steps += 1
            assert steps < 4000, "no progress"
        return steps

    def check_answers(self) -> None:
        plain = {}
        for name, request in self.requests.items():
            if request.branch:
                self.check_decision(name, request)
            elif request.gate is not None:
                for choice in range(request.sampling.n):
                    self.check_gate((name, choice), request)
            else:
                plain[name] = request
        finished = {key: why for key, why in self.finish.items() if key[0] in plain}
        self.requests, self.finish = plain, finished
        super().check_answers()
        assert self.engine.stats().pages_tail == 0
        for name in list(self.engine.branches):
            self.engine.unload_branch(name)
        assert not self.host.loaded

    def check_decision(self, name: str, request: Request) -> None:
        finish = self.finish[(name, 0)]
        assert (name in self.decided) == (finish is FinishReason.LENGTH)
        if finish is FinishReason.LENGTH:
            branch = self.asked[name]
            assert self.decided[name] == scores_of(request.prompt, request.branch_from, branch)

    def check_gate(self, key: tuple[str, int], request: Request) -> None:
        gate, finish = request.gate, self.finish[key]
        assert gate is not None
        outcome = self.gates.get(key)
        if outcome is None:
            assert finish in (FinishReason.CANCELLED, FinishReason.ERROR)
            return
        if gate.branch:
            prompt = (*request.prompt, *gate.probes[0].suffix)
            scores = scores_of(prompt, len(request.prompt), self.asked[key[0]])
            logprobs = log_softmax(scores)
        else:
            logprobs = tuple(float(sum(map(logprob_of, path))) for path in gate.sequences)
        assert outcome.logprobs == logprobs
        assert outcome.probabilities == normalise(logprobs)
        header = gate.headers[outcome.chosen]
        assert (finish is FinishReason.GATE) == (header is None)
        if header is None:
            assert not self.tokens[key]
            return
        whole = expected_tokens(
            (*request.prompt, *header),
            request.sampling.max_tokens or 0,
            self.executor.vocab_size,
            key[1],
            request.sampling.seed or 0,
        )
        got = self.tokens[key]
        assert got == whole[: len(got)]
        if finish is FinishReason.LENGTH:
            assert len(got) == len(whole)
            if request.sampling.prompt_logprobs is not None and key[1] == 0:
                written = replace(request, prompt=(*request.prompt, *header))
                self.check_scores(written, self.scores[key[0]])


SHAPES = [
    (FULL, (1,), 26),
    (FULL, (3,), 60),
    (mixed(5), (1, 2), 30),
    (mixed(9), (3, 2), 20),
    (mixed(20), (4, 4), 12),
]
OPTIONS = [
    {},
    {"depth": "exit"},
    {"keep_activations": True},
    {"keep_tails": True},
    {"keep_activations": True, "keep_tails": True},
]
SEEDS = range(3)


@cache
def drive(shape: int, option: int, seed: int) -> Counter[str]:
    """One engine driven to the end; how often it was pressed."""
    groups, per_slab, slabs = SHAPES[shape]
    chance = random.Random(seed * 1000 + slabs + option)
    with TemporaryDirectory() as folder:
        load = tuple(
            (name, make_branch(Path(folder), name, fork=fork, exit_=exit_, adapt=adapt))  # type: ignore[arg-type]
            for name, (adapt, fork, exit_) in BRANCHES.items()
        )
        options = BranchOptions(load=load, **OPTIONS[option])  # type: ignore[arg-type]
        executor = BranchExecutor(
            folders=[at for _, at in load],
            groups=groups,
            num_layers=LAYERS,
            vocab_size=3,
            max_context=48,
            page_tokens=PAGE,
            num_slabs=slabs,
            pages_per_slab=per_slab,
        )
        config = SchedulerConfig(
            max_step_tokens=chance.choice((3, 8, 24)),
            max_sequences=chance.choice((2, 6)),
            max_chunk_tokens=chance.choice((3, 8)),
            overlap=bool(seed % 2),
        )
        driver = BranchDriver(seed, executor, config, options)
        if seed % 4 == 1:
            driver.engine._scheduler._has_room = lambda *_: True  # type: ignore[method-assign]
        for _ in range(150):
            action = chance.random()
            if action < 0.4:
                driver.submit()
            elif action < 0.47 and driver.open:
                name, choice = chance.choice(sorted(driver.open))
                driver.engine.cancel(name, chance.choice((None, choice)))
            elif action < 0.49:
                driver.reload()
            else:
                driver.step(fail=action > 0.985)
        driver.drain()
        driver.check_answers()
    assert not driver.open
    stats = driver.engine.stats()
    return Counter(
        preemptions=stats.preemptions,
        evictions=driver.engine._cache.stats.evictions,
        copies=driver.engine._cache.stats.copies,
        ahead=executor.ahead,
        decided=len(driver.decided),
        gates=len(driver.gates),
    )


@pytest.mark.parametrize("shape", range(len(SHAPES)))
@pytest.mark.parametrize("option", range(len(OPTIONS)))
@pytest.mark.parametrize("seed", SEEDS)
def test_random_driving(shape: int, option: int, seed: int) -> None:
    drive(shape, option, seed)


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_the_drives_press_every_pool(shape: int) -> None:
    total: Counter[str] = Counter()
    for option in range(len(OPTIONS)):
        for seed in SEEDS:
            total.update(drive(shape, option, seed))
    wanted = ("preemptions", "evictions", "copies", "ahead", "decided", "gates")
    assert all(total[what] > 10 for what in wanted), total
