"""How the page pool is laid out, and how large it may be.

The pool is one flat tensor. Page i of group g starts at element i * strides[g],
whichever group owns that stretch at the time; slabs of one size make this safe: slab
s holds exactly pages s * pages_per_slab[g] .. (s + 1) * pages_per_slab[g] - 1 of any
one group, and no page of another slab. The slab is chosen for the model's own groups;
those of branches take it as it is.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lockstep.config import ConfigError
from lockstep.runner.groups import own_groups
from lockstep.runner.plan import Plan, SampleSpec, TokenRun
from lockstep.types import LayerGroup, SamplingParams

_MIB = 1024 * 1024
_ALIGN = 64  # elements; pages start on cache lines and on 16-byte boundaries
_MOST_PAGES = 128  # of the largest size, in a slab that is looked at
_CPU_DEFAULT = 512 * _MIB  # touched as it fills: an idle engine does not hold it
# What steps may take beside what the largest ones have taken already: the allocator's
# fragments and rounding, kernels loaded later, scratch of long contexts.
_CUDA_RESERVE = 2048 * _MIB


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """Layout of the pool, in elements of the cache's dtype.

    Attributes:
        page_tokens: tokens a page, alike in every group.
        slab: elements of a slab. strides: elements from a group's page to its next.
        pages_per_slab: per group. num_slabs: how many there are.
        num_own: how many of the groups, the first ones, are the model's.
    """

    page_tokens: int
    slab: int
    strides: tuple[int, ...]
    pages_per_slab: tuple[int, ...]
    num_slabs: int
    num_own: int

    @property
    def elements(self) -> int:
        return self.slab * self.num_slabs

    def tokens(self) -> int:
        """Most tokens of the trunk that the pool holds at once, in sequences that keep every
        page."""
        per_slab = sum(1 / pages for pages in self.pages_per_slab[: self.num_own])
        return int(self.num_slabs / per_slab) * self.page_tokens

    def slabs_needed(self, groups: Sequence[LayerGroup], tokens: int, step_tokens: int) -> int:
        """Slabs of one sequence of `tokens` that computes up to `step_tokens` a step, in the
        model's `groups`."""
        total = 0
        for group, per_slab in zip(groups, self.pages_per_slab[: self.num_own], strict=True):
            pages = -(-tokens // self.page_tokens)
            if group.window is not None:
                # A window and a step's rows, each begun and ended inside a page.
                pages = min(pages, (group.window + step_tokens) // self.page_tokens + 2)
            total += -(-(pages + 1) // per_slab)  # and a page to copy on a shared write
        return total

    def longest_sequence(self, groups: Sequence[LayerGroup], limit: int, step_tokens: int) -> int:
        """Most tokens, at most `limit`, of a sequence that has the pool to itself."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.slabs_needed(groups, middle, step_tokens) <= self.num_slabs:
                low = middle
            else:
                high = middle - 1
        return low


def page_elements(group: LayerGroup, page_tokens: int) -> int:
    """Elements of one page: keys and values of all the group's layers, or one hidden row."""
    rows = 1 if group.kind == "activations" else 2 * len(group.layers)
    return rows * group.kv_heads * group.head_dim * page_tokens


def plan_pool(groups: Sequence[LayerGroup], page_tokens: int, elements: int) -> PoolGeometry:
    """The geometry of a pool of at most `elements` elements.

    The slab is the one by which the model's own groups lose least: what their pages leave empty
    of it, and of each group half a slab that is not filled (one page, when there is one
    group). Other groups change neither it nor what the model's groups hold, unless their page is
    larger: then it is a multiple of that.

    Raises:
        ConfigError: not even one page of every group fits.
    """
    own = len(own_groups(groups))
    pages = [page_elements(group, page_tokens) for group in groups]
    # Pages are whole numbers of heads apart: kernels address a pool by them.
    align = math.lcm(_ALIGN, *(group.head_dim for group in groups[:own]))
    slab, per_slab = _choose_slab(pages[:own], align, elements)
    wider = -(-max(pages) // slab)
    slab, per_slab = slab * wider, [count * wider for count in per_slab]
    per_slab += [_fitting(slab, page, align) for page in pages[own:]]
    num_slabs = elements // slab
    if num_slabs < len(pages):
        raise ConfigError(
            f"a pool of {elements} elements is too small: one page of every layer group needs "
            f"{slab * len(pages)} (raise cache_bytes)"
        )
    return PoolGeometry(
        page_tokens=page_tokens,
        slab=slab,
        strides=tuple(slab // count for count in per_slab),
        pages_per_slab=tuple(per_slab),
        num_slabs=num_slabs,
        num_own=own,
    )


def _fitting(slab: int, page: int, align: int) -> int:
    """The most pages of a size into which a slab can be cut evenly, aligned."""
    units = slab // align
    return next(count for count in range(slab // page, 0, -1) if units % count == 0)


def _choose_slab(pages: Sequence[int], align: int, elements: int) -> tuple[int, list[int]]:
    """Elements of a slab and, per group, how many pages it holds."""
    largest = max(pages)
    rooms = {
        count * page
        for page in pages
        if page * 8 >= largest  # smaller ones fit anywhere
        for count in range(-(-largest // page), _MOST_PAGES * largest // page + 1)
    }
    best: tuple[float, int, list[int]] | None = None
    for room in sorted(rooms):
        if best is not None and len(pages) * room / elements > 2 * best[0]:
            break
        counts = [room // page for page in pages]
        unit = math.lcm(*counts) * align
        slab = -(-room // unit) * unit
        used = min(count * page / slab for count, page in zip(counts, pages, strict=True))
        lost = len(pages) * slab / elements / 2 + 1 - used
        if best is None or lost < best[0]:
            best = (lost, slab, counts)
    assert best is not None
    return best[1], best[2]


def largest_steps(
    geometry: PoolGeometry,
    num_layers: int,
    max_context: int,
    step_tokens: int,
    max_sequences: int,
) -> tuple[Plan, Plan]:
    """Two steps that need the most memory: a prompt of every row scored, and as many runs as
    there can be, all drawn from with logprobs. All rows share one page of each group, whose
    contents are worthless afterwards."""
    pages = [index * per_slab for index, per_slab in enumerate(geometry.pages_per_slab)]
    reports = SamplingParams(temperature=1.0, top_p=0.9, logprobs=20, prompt_logprobs=20)

    def run(number: int, length: int, scored: bool) -> TokenRun:
        columns = -(-length // geometry.page_tokens)
        return TokenRun(
            number,
            0,
            (0,) * length,
            tuple((page,) * columns for page in pages),
            (0, num_layers),
            logits=length if scored else 1,
            prompt_targets=(0,) * length if scored else (),
            sample=None if scored else SampleSpec(reports, 0, 0, 0, (0,) * length, length),
            prompt_params=reports if scored else None,
        )

    lengths = [max_context] * (step_tokens // max_context)
    if step_tokens % max_context:
        lengths.append(step_tokens % max_context)
    scored = tuple(run(i, length, True) for i, length in enumerate(lengths))
    runs = min(max_sequences, step_tokens)
    share = min(max_context, step_tokens // runs)
    return Plan(0, scored), Plan(0, tuple(run(i, share, False) for i in range(runs)))


def default_pool_bytes(device: torch.device) -> int:
    """Bytes of the pool when the configuration names none.

    On a CPU 512 MiB or half of the free memory, whichever is less; the system hands
    pages over as they are first written. On CUDA what the device has free now, less
    2 GiB or a quarter, whichever is less: run the largest steps before, so that the
    allocator holds their activations already.
    """
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return free - min(_CUDA_RESERVE, free // 4)
    return min(_CPU_DEFAULT, _free_memory() // 2)


def _free_memory() -> int:
    """Bytes that this process may still take: of the machine, or of its control group."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: the machine's whole memory is the only figure there is
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text(), (group / "memory.current").read_text()
        free = min(free, int(limit) - int(used))
    except (OSError, ValueError):
        pass  # no control group, or one without a limit ("max")
    return max(free, 0)
