"""The trunk's rows as they enter the fork, computed once by the engine's own runner.

They are what a served branch starts from, bit for bit, since no row of the trunk depends on how
it was batched. A folder per set of rows in the cache keeps them between runs of training.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from lockstep.branch import BranchError
from lockstep.config import cache_folder
from lockstep.prefixes import common_prefix
from lockstep.runner.plan import Plan, TokenRun
from lockstep.runner.probe import Pages, Probe
from lockstep.runner.runner import Runner

Progress = Callable[[int, int], None]

_ROWS = "rows.bin"
_KEPT = 8  # sets of rows on disk; the least recently used one goes


@dataclass(frozen=True, slots=True)
class Tokens:
    """One example as the model reads it: the branch's adapters may touch the suffix alone."""

    context: tuple[int, ...]
    suffix: tuple[int, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """Context and suffix."""
        return self.context + self.suffix


@dataclass(frozen=True, slots=True)
class Activations:
    """Hidden rows of many examples at the entrance of one layer.

    Attributes:
        rows: [total, D] in the model's dtype; a map of a file.
        starts: where each example's rows begin, and the total behind the last.
    """

    rows: Tensor
    starts: tuple[int, ...]

    def of(self, index: int) -> Tensor:
        """Rows [n, D] of one example: its context's and its suffix's."""
        return self.rows[self.starts[index] : self.starts[index + 1]]


def activations(
    runner: Runner,
    examples: Sequence[Tokens],
    forks: Sequence[int],
    *,
    folder: Path | None = None,
    step_tokens: int = 512,
    progress: Progress | None = None,
) -> dict[int, Activations]:
    """The rows of every example at each of the layers `forks`, from disk where they are there.

    What is missing is computed in one pass to the last fork.

    Args:
        folder: where sets of rows lie; by default in the cache (`config.cache_folder`).
        step_tokens: most rows of one step; no bit depends on it.
        progress: called with tokens done and tokens in all.

    Raises:
        BranchError: an example is longer than the runner's pages hold, or the disk is full.
    """
    lengths = [len(example.ids) for example in examples]
    longest = max(lengths)
    if longest > runner.max_context:
        raise BranchError(
            f"example {lengths.index(longest)} has {longest} tokens, the context holds "
            f"{runner.max_context}"
        )
    starts = (0, *accumulate(lengths))
    folder = folder or cache_folder() / "activations"
    sets = {fork: _Set(runner, folder / _key(runner, examples, fork), starts) for fork in forks}
    missing = sorted(fork for fork, rows in sets.items() if not rows.complete)
    if missing:
        try:
            _compute(
                runner, examples, [sets[fork] for fork in missing], missing, step_tokens, progress
            )
            _forget(folder, keep=max(_KEPT, len(sets)))
        except OSError as error:
            raise BranchError(f"{folder}: {error.strerror or error}") from None
    return {fork: rows.open() for fork, rows in sets.items()}


class _Set:
    """Where one set of rows lies, and its draft: it is there as a whole or not at all."""

    def __init__(self, runner: Runner, place: Path, starts: tuple[int, ...]) -> None:
        self.place, self.starts = place, starts
        self._shape = (starts[-1], runner.model.hidden_size)
        self._dtype = runner.model.dtype
        self.draft = place.with_name(f"{place.name}.{os.getpid()}")
        self.bytes = self._shape[0] * self._shape[1] * self._dtype.itemsize

    @property
    def complete(self) -> bool:
        file = self.place / _ROWS
        return file.exists() and file.stat().st_size == self.bytes

    def open(self) -> Activations:
        os.utime(self.place)
        return Activations(self._map(self.place, writable=False), self.starts)

    def begin(self) -> Tensor:
        """Rows to be filled."""
        self.draft.mkdir(parents=True, exist_ok=True)
        return self._map(self.draft, writable=True)

    def finish(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        self.draft.rename(self.place)

    def _map(self, folder: Path, *, writable: bool) -> Tensor:
        size = self._shape[0] * self._shape[1]
        file = str(folder / _ROWS)
        return torch.from_file(file, shared=writable, size=size, dtype=self._dtype).view(
            self._shape
        )


def _key(runner: Runner, examples: Sequence[Tokens], fork: int) -> str:
    """Names rows that are the same bits: same ids, weights, dtype, kernels and fork."""
    digest = hashlib.sha256()
    digest.update(json.dumps([runner.info().fingerprint, runner.identity.weights_hash]).encode())
    digest.update(json.dumps([fork, [example.ids for example in examples]]).encode())
    return digest.hexdigest()[:32]


def _compute(
    runner: Runner,
    examples: Sequence[Tokens],
    sets: Sequence[_Set],
    forks: Sequence[int],
    step_tokens: int,
    progress: Progress | None,
) -> None:
    needed = sum(one.bytes for one in sets)
    try:
        mapped = [one.begin() for one in sets]
        free = shutil.disk_usage(sets[0].draft).free
        if needed > free:  # a map of a file on a full disk ends the process, not the call
            raise BranchError(
                f"{sets[0].place.parent}: {needed >> 20} MiB of activations, {free >> 20} are free"
            )
        done = 0
        for parts in trunk_rows(runner, examples, forks, step_tokens):
            length = len(parts[0])
            for rows, part in zip(mapped, parts, strict=True):
                rows[done : done + length].copy_(part)
            done += length
            if progress is not None:
                progress(done, sets[0].starts[-1])
        for one in sets:
            one.finish()
    finally:
        for one in sets:
            shutil.rmtree(one.draft, ignore_errors=True)


def _forget(folder: Path, keep: int) -> None:
    sets = sorted((entry for entry in folder.iterdir() if entry.is_dir()), key=_last_used)
    for old in sets[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def _last_used(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:  # another process forgot it first
        return 0.0


def trunk_rows(
    runner: Runner, examples: Sequence[Tokens], forks: Sequence[int], step_tokens: int
) -> Iterator[list[Tensor]]:
    """Rows [n, D] at the entrance of each of the ascending `forks`, example after example.

    Whole pages of tokens that all examples begin with (a system prompt) are computed once.
    """
    reader = _Reader(runner, forks, step_tokens)
    shared = _shared(examples, runner.page_tokens)
    lead: list[list[Tensor]] = [[] for _ in forks]
    if shared:
        (lead,) = reader.read([examples[0].ids[:shared]], [reader.probe.pages(shared)], 0)
    for batch in _batches(examples, shared, step_tokens):
        # A probe hands out the same pages again: those of the shared tokens keep their contents.
        reader.probe.reset()
        first = reader.probe.pages(shared)
        pages = [_joined(first, reader.probe.pages(len(one.ids) - shared)) for one in batch]
        for parts in reader.read([one.ids for one in batch], pages, shared):
            yield [torch.cat([*before, *part]) for before, part in zip(lead, parts, strict=True)]


class _Reader:
    """Runs sequences through the trunk to the last of some forks and keeps rows at each."""

    def __init__(self, runner: Runner, forks: Sequence[int], step_tokens: int) -> None:
        self.runner, self.forks, self.step_tokens = runner, forks, step_tokens
        self.probe = Probe(runner)
        self._step = 0

    def read(
        self, sequences: Sequence[Sequence[int]], pages: Sequence[Pages], first: int
    ) -> list[list[list[Tensor]]]:
        """Rows from position `first` on, whose earlier ones lie in the pages already: of every
        sequence and fork the tensors [n, D] of one step after the other.
        """
        found: list[list[list[Tensor]]] = [[[] for _ in self.forks] for _ in sequences]
        longest = max(len(ids) for ids in sequences)
        for start in range(first, longest, self.step_tokens):
            self._step += 1
            runs: list[TokenRun] = []
            parts = [tuple(ids[start : start + self.step_tokens]) for ids in sequences]
            for index, ids in enumerate(parts):
                if ids:
                    runs += _chain(index, ids, start, pages[index], self.forks, len(runs))
            rows = iter(self.runner.rows(Plan(self._step, tuple(runs))) if runs else ())
            for index, ids in enumerate(parts):
                for place, fork in enumerate(self.forks if ids else ()):
                    row = next(rows) if fork else _embedded(self.runner, ids)
                    found[index][place].append(row)
        return found


def _shared(examples: Sequence[Tokens], page_tokens: int) -> int:
    """Tokens that all examples begin with, in whole pages; every example has more."""
    first = examples[0].ids
    count = min(len(example.ids) for example in examples) - 1
    for example in examples:
        count = min(count, common_prefix(first, example.ids))
    return count - count % page_tokens


def _joined(first: Pages, rest: Pages) -> Pages:
    return tuple([*head, *tail] for head, tail in zip(first, rest, strict=True))


def _chain(
    sequence: int,
    ids: Sequence[int],
    start: int,
    pages: Pages,
    forks: Sequence[int],
    first: int,
) -> list[TokenRun]:
    """One run to the first fork, and from fork to fork another that takes its rows on."""
    runs: list[TokenRun] = []
    before = 0
    for fork in forks:
        if fork:  # what enters layer 0 needs no run
            source = first + len(runs) - 1 if before else None
            layers = (before, fork)
            runs.append(TokenRun(sequence, start, ids, pages, layers, source, logits=len(ids)))
        before = fork
    return runs


def _embedded(runner: Runner, ids: Sequence[int]) -> Tensor:
    return runner.model.embed(torch.tensor(ids, dtype=torch.int32, device=runner.backend.device))


def _batches(examples: Sequence[Tokens], shared: int, step_tokens: int) -> Iterator[list[Tokens]]:
    """As many whole examples as fit into a step without what is shared; a longer one is alone."""
    batch: list[Tokens] = []
    size = 0
    for example in examples:
        length = len(example.ids) - shared
        if batch and size + length > step_tokens:
            yield batch
            batch, size = [], 0
        batch.append(example)
        size += length
    if batch:
        yield batch
