"""An executor without a model that knows exactly what every page should hold.

Each slot of each page holds a hash of the whole prefix up to and including its token,
so a wrong page, a stale copy, a page freed too early or a token at a wrong position
is found by the first query that would have read it. The next token is a function of
the prefix, so it is equal however the work was scheduled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from lockstep.runner.bans import forbidden, without
from lockstep.runner.groups import own_groups
from lockstep.runner.plan import Launched, Plan, RunResult, SampleSpec, StepResult, TokenRun
from lockstep.text.grammar_matcher import has
from lockstep.types import LayerGroup, TokenLogprob

FULL = LayerGroup("full", "full", (0, 1), 1, 8)
EMPTY = -1
_MASK = (1 << 61) - 1


def mix(prefix: int, token: int) -> int:
    """Hash of a prefix extended by a token; `prefix` is 0 for the empty one."""
    mixed = prefix * 6364136223846793005 + token * 1442695040888963407 + 12345
    return (mixed ^ (prefix >> 29)) & _MASK


def hashes(tokens: Sequence[int]) -> list[int]:
    """The slot content at every position of a sequence."""
    found = []
    value = 0
    for token in tokens:
        value = mix(value, token)
        found.append(value)
    return found


def draw(prefix: int, vocab_size: int, choice: int = 0, seed: int = 0) -> int:
    """What the fake draws after a prefix of this hash, however it was computed."""
    return (mix(prefix, choice * 31 + seed) >> 7) % vocab_size


def expected_tokens(
    prompt: Sequence[int], count: int, vocab_size: int, choice: int = 0, seed: int = 0
) -> list[int]:
    """What the fake generates for a prompt, alone or in any company."""
    value = hashes(prompt)[-1]
    tokens = []
    for _ in range(count):
        tokens.append(draw(value, vocab_size, choice, seed))
        value = mix(value, tokens[-1])
    return tokens


class ContractViolation(BaseException):
    """A plan broke its contract. No `Exception`, so that the engine does not take it for a
    step that failed and carry on."""


class FakeExecutor:
    """Satisfies `Executor`; raises `ContractViolation` when a plan breaks its contract.

    Args:
        script: (history, prompt_len, position) -> token id to draw; None draws
            `draw` of the history.
        latency: seconds that a step takes.
        fails: plan -> whether this step raises RuntimeError (after writing half of its pages).
    """

    def __init__(
        self,
        *,
        groups: tuple[LayerGroup, ...] = (FULL,),
        num_layers: int = 2,
        vocab_size: int = 1000,
        max_context: int = 4096,
        page_tokens: int = 16,
        num_slabs: int = 256,
        pages_per_slab: tuple[int, ...] = (),
        script: Callable[[Sequence[int], int, int], int] | None = None,
        latency: float = 0.0,
        fails: Callable[[Plan], bool] | None = None,
    ) -> None:
        self.groups = groups
        self.num_layers = num_layers
        self.vocab_size = vocab_size
        self.max_context = max_context
        self.page_tokens = page_tokens
        self.num_slabs = num_slabs
        self.pages_per_slab = pages_per_slab or (1,) * len(groups)
        self.script = script
        self.latency = latency
        self.fails = fails
        self.plans: list[Plan] = []
        self.keep_plans = True
        self.ahead = 0  # steps that followed one whose result was not known
        self._drawn: list[int | None] = []  # by the step that was begun last
        self._failed = False  # that step
        self._content: list[dict[int, list[int]]] = [{} for _ in groups]
        self._own = range(len(own_groups(groups)))
        # sequence -> its history, and the hashes of it
        self._known: dict[int, tuple[Sequence[int], list[int]]] = {}

    def execute(self, plan: Plan) -> StepResult:
        try:
            return self._execute(plan)
        except (AssertionError, LookupError, TypeError) as error:
            raise ContractViolation(f"step {plan.step}: {error}") from error

    def launch(self, plan: Plan) -> Launched:
        """As a device does it: steps run in the order in which they are begun, on what the
        plan said then; what came of one, or went wrong, is told when it is asked for."""
        follows = any(run.follows is not None for run in plan.runs)
        self.ahead += follows
        if follows and self._failed:  # on a device it would compute what nobody asks for
            return Launched(False, _raises("the step before failed"))
        settled = replace(plan, runs=tuple(self._settled(run) for run in plan.runs))
        self._failed = False
        try:
            result = self.execute(settled)
        except RuntimeError as error:
            self._failed = True
            return Launched(True, _raises(str(error)))
        self._drawn = [run.token for run in result.runs]
        return Launched(all(map(_only_draws, plan.runs)), lambda: result)

    def _settled(self, run: TokenRun) -> TokenRun:
        run = replace(run, pages=tuple(list(table) for table in run.pages))
        if run.follows is None:
            return run
        token, spec = self._drawn[run.follows], run.sample
        assert token is not None, "a run follows one that drew nothing"
        assert spec is not None, "a run that follows draws"
        assert tuple(run.tokens) == (0,)
        return replace(
            run, tokens=(token,), sample=replace(spec, history=[*spec.history, token]), follows=None
        )

    def _execute(self, plan: Plan) -> StepResult:
        if self.keep_plans:
            self.plans.append(plan)
        if self.latency:
            time.sleep(self.latency)
        targets = {(copy.group, copy.target) for copy in plan.copies}
        assert len(targets) == len(plan.copies), "two copies into one page"
        for copy in plan.copies:
            assert (copy.group, copy.source) not in targets, "copies depend on their order"
            self._content[copy.group][copy.target] = list(self._page(copy.group, copy.source))
        failing = self.fails is not None and self.fails(plan)
        written: set[tuple[int, int]] = set()
        for run in plan.runs[: len(plan.runs) // 2] if failing else plan.runs:
            self._write(run, written)
        if failing:
            raise RuntimeError("the fake was told to fail")
        return StepResult(plan.step, tuple(self._read(run) for run in plan.runs))

    def _write(self, run: TokenRun, written: set[tuple[int, int]]) -> None:
        """Fill the run's slots. Runs are taken in the plan's order: one that shares a page
        comes after the one that fills it."""
        assert run.layers == (0, self.num_layers), "trunk runs only"
        assert run.source is None, "trunk runs only"
        assert len(run.tokens) >= 1
        assert run.start + len(run.tokens) <= self.max_context
        value = self._prefix(run)
        for position, token in enumerate(run.tokens, run.start):
            value = mix(value, token)
            for group in self._own:
                page, slot = self._place(run, group, position)
                assert (group, page * self.page_tokens + slot) not in written, "written twice"
                written.add((group, page * self.page_tokens + slot))
                self._page(group, page)[slot] = value

    def _prefix(self, run: TokenRun) -> int:
        """Hash of everything before the run, as its pages hold it."""
        if run.start == 0:
            return 0
        found = set()
        for group in self._own:
            if self.groups[group].window != 1:
                page, slot = self._place(run, group, run.start - 1)
                found.add(self._page(group, page)[slot])
        assert len(found) == 1, f"groups of sequence {run.sequence} hold different prefixes"
        (value,) = found
        assert value != EMPTY, f"sequence {run.sequence} builds on a slot never written"
        return value

    def _read(self, run: TokenRun) -> RunResult:
        """Check every slot that the run's queries see, then draw."""
        end = run.start + len(run.tokens)
        expected = self._history(run, run.sample) if run.sample is not None else None
        seen: list[int] | None = None
        for group in self._read_groups(run):
            window = self.groups[group].window
            first = 0 if window is None else max(0, run.start - window + 1)
            stored = self._stored(run, group, first, end)
            assert EMPTY not in stored, f"sequence {run.sequence} reads a slot never written"
            if expected is not None:
                assert stored == expected[first:end], f"sequence {run.sequence} reads foreign rows"
            if seen is not None:
                assert stored[-len(seen) :] == seen[-len(stored) :], "groups disagree"
            seen = stored
        params = run.sample.params if run.sample is not None else None
        wanted = [target for target in run.prompt_targets if target >= 0]
        assert not run.prompt_targets or len(run.prompt_targets) == run.logits
        assert run.logits <= len(run.tokens)
        given = run.prompt_params.logprob_token_ids if run.prompt_params is not None else ()
        scores = tuple(_logprob(target, given) for target in wanted)
        if run.pooling:
            assert run.logits >= 1, "a pooled run without rows"
            assert run.sample is None, "a pooled run draws nothing"
            return RunResult(prompt_logprobs=scores, pooled=self._pool(run))
        if run.sample is None or params is None:
            return RunResult(prompt_logprobs=scores)
        assert run.logits >= 1, "a sampled run needs logits"
        assert len(run.sample.history) == end, "a sampled run ends the history"
        spec = run.sample
        value = self._known[run.sequence][1][-1]
        if self.script is not None:
            token = self.script(spec.history, spec.prompt_len, spec.position)
        else:
            token = draw(value, self.vocab_size, spec.choice, spec.seed)
        if spec.allowed is not None:
            words = without(spec.allowed.words(), forbidden(spec))
            if not words.any():
                return RunResult(prompt_logprobs=scores, stuck=True)
            if not has(words, token):  # any other function of the prefix
                ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
                token = int(ids[draw(value, len(ids), spec.choice, spec.seed)])
        reports = params.logprobs is not None or params.logprob_token_ids
        logprob = _logprob(token, params.logprob_token_ids) if reports else None
        return RunResult(token, logprob, scores)

    def _read_groups(self, run: TokenRun) -> Sequence[int]:
        """The groups that the run's queries see."""
        return self._own

    def _pool(self, run: TokenRun) -> bytes:
        """Of every pooled row its prefix's hash: all of them added, or the last one."""
        value = self._prefix(run)
        rows = []
        for token in run.tokens:
            value = mix(value, token)
            rows.append(value)
        total = sum(rows[-run.logits :]) if run.pooling == "mean" else rows[-1]
        return total.to_bytes(16, "little")

    def _place(self, run: TokenRun, group: int, position: int) -> tuple[int, int]:
        index, slot = divmod(position, self.page_tokens)
        page = run.pages[group][index]
        assert page >= 0, f"sequence {run.sequence} lacks page {index} of group {group}"
        return page, slot

    def _page(self, group: int, page: int) -> list[int]:
        assert 0 <= page < self.num_slabs * self.pages_per_slab[group], f"page {page}"
        return self._content[group].setdefault(page, [EMPTY] * self.page_tokens)

    def _stored(self, run: TokenRun, group: int, first: int, end: int) -> list[int]:
        size = self.page_tokens
        table = run.pages[group]
        found: list[int] = []
        for index in range(first // size, (end - 1) // size + 1):
            assert table[index] >= 0, f"sequence {run.sequence} reads a page it has released"
            found.extend(self._page(group, table[index]))
        skipped = first // size * size
        return found[first - skipped : end - skipped]

    def _history(self, run: TokenRun, spec: SampleSpec) -> list[int]:
        history, known = self._known.setdefault(run.sequence, (spec.history, []))
        if history[: len(known)] != spec.history[: len(known)]:  # it turned to another prompt
            known.clear()
            self._known[run.sequence] = (spec.history, known)
        value = known[-1] if known else 0
        for token in spec.history[len(known) :]:
            value = mix(value, token)
            known.append(value)
        return known


def logprob_of(token: int) -> float:
    """What the fake reports of a token, wherever it stands."""
    return -1.0 - token % 7


def _logprob(token: int, given: Sequence[int] = ()) -> TokenLogprob:
    value = logprob_of(token)
    return TokenLogprob(token, value, 1, ((token, value),), tuple(map(logprob_of, given)))


def _only_draws(run: TokenRun) -> bool:
    """Whether a runner draws it on the device, from logits as they are."""
    spec = run.sample
    return (
        spec is not None
        and spec.allowed is None
        and spec.params.logprobs is None
        and not spec.params.logprob_token_ids
        and not run.prompt_targets
    )


def _raises(text: str) -> Callable[[], StepResult]:
    def result() -> StepResult:
        raise RuntimeError(text)

    return result
