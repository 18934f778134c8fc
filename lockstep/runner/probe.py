"""Drives a runner by hand, without scheduler or cache: for checks, tests and measurements.

A probe hands out pages in order and never takes one back but by `reset`, so it can
place the same tokens on other pages, in other chunks, in other company.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lockstep.runner.plan import Plan, SampleSpec, TokenRun
from lockstep.runner.runner import Runner
from lockstep.types import SamplingParams

Pages = tuple[list[int], ...]


class Probe:
    """One runner and what its pages were given to.

    Raises (every method that allocates):
        ValueError: the runner's pool is exhausted.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._step = 0
        self.reset()

    def reset(self) -> None:
        """Forget every page handed out."""
        self._next_slab = 0
        self._free: list[list[int]] = [[] for _ in self.runner.groups]

    def pages(self, tokens: int) -> Pages:
        """Fresh pages for that many tokens, one table a group."""
        count = -(-tokens // self.runner.page_tokens)
        return tuple([self._page(group) for _ in range(count)] for group in range(len(self._free)))

    def _page(self, group: int) -> int:
        free = self._free[group]
        if not free:
            if self._next_slab == self.runner.num_slabs:
                raise ValueError(f"the pool's {self._next_slab} slabs are used up")
            per_slab = self.runner.pages_per_slab[group]
            first = self._next_slab * per_slab
            free.extend(range(first + per_slab - 1, first - 1, -1))
            self._next_slab += 1
        return free.pop()

    def run(
        self,
        tokens: Sequence[int],
        start: int,
        pages: Pages,
        *,
        logits: int | None = None,
    ) -> TokenRun:
        """A trunk run; by default all of its rows want logits."""
        return TokenRun(
            0,
            start,
            tuple(tokens),
            pages,
            (0, self.runner.num_layers),
            logits=len(tokens) if logits is None else logits,
        )

    def step(self, *runs: TokenRun) -> list[Tensor]:
        """Logits of one step over those runs."""
        self._step += 1
        return self.runner.logits(Plan(self._step, runs))

    def score(
        self,
        tokens: Sequence[int],
        *,
        chunk: int = 0,
        strangers: Sequence[Sequence[int]] = (),
        start: int = 0,
        pages: Pages | None = None,
    ) -> Tensor:
        """Logits float32 [len(tokens) - start, V] of a sequence's rows from `start` on.

        Args:
            chunk: rows of the sequence a step; 0 takes them all in one.
            strangers: other sequences that share every step. Half stand before it in
                the batch, half after; each goes on by another number of tokens a step
                and starts again when it ends.
            pages: where earlier positions lie already; fresh ones by default.
        """
        pages = pages or self.pages(len(tokens))
        others = [(list(other), self.pages(len(other)), [0]) for other in strangers]
        size = chunk or len(tokens)
        rows = []
        for begin in range(start, len(tokens), size):
            company = []
            for index, (other, own, at) in enumerate(others):
                length = min(1 + (index + begin) % 7, len(other) - at[0])
                company.append(self.run(other[at[0] : at[0] + length], at[0], own, logits=1))
                at[0] = (at[0] + length) % len(other)
            half = len(company) // 2
            run = self.run(tokens[begin : begin + size], begin, pages)
            rows.append(self.step(*company[:half], run, *company[half:])[half])
        return torch.cat(rows)

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int, stop: Sequence[int] = ()
    ) -> list[list[int]]:
        """Greedy continuations of all prompts together, through `Runner.execute`."""
        params = SamplingParams(temperature=0.0, max_tokens=None)
        histories = [list(prompt) for prompt in prompts]
        pages = [self.pages(len(prompt) + count) for prompt in prompts]
        starts = [0] * len(prompts)
        going = list(range(len(prompts)))
        for position in range(count):
            runs = []
            for index in going:
                history = histories[index]
                spec = SampleSpec(params, 0, 0, position, history, len(prompts[index]))
                run = self.run(history[starts[index] :], starts[index], pages[index], logits=1)
                runs.append(replace(run, sequence=index, sample=spec))
                starts[index] = len(history)
            self._step += 1
            results = self.runner.execute(Plan(self._step, tuple(runs))).runs
            drawn = dict(zip(going, results, strict=True))
            going = []
            for index, result in drawn.items():
                if result.token is not None and result.token not in stop:
                    histories[index].append(result.token)
                    going.append(index)
            if not going:
                break
        return [h[len(prompt) :] for h, prompt in zip(histories, prompts, strict=True)]
