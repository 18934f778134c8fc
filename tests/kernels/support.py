"""What the kernel tests share: backends, bit comparison and a paged cache to attend over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from lockstep.kernels import cpu
from lockstep.kernels.contract import AttentionBatch, Backend, QKNorm, RopeTable
from lockstep.kernels.plain import PlainBackend

DTYPES = (torch.float32, torch.bfloat16)
FORMS = ("native", "torch")


@cache
def backend(name: str, threads: int = 2) -> Backend:
    """One backend of each kind for the whole run; the torch form is proved on one thread."""
    if name == "plain":
        return PlainBackend("cpu")
    return cpu.make_backend(name, 1 if name == "torch" else threads)


@cache
def isa() -> str:
    """Instruction set of the native form, which fixes bfloat16 products."""
    return backend("native").describe()["isa"]


def bits(x: Tensor) -> Tensor:
    """The bit patterns of a floating-point tensor, with every NaN as one."""
    x = torch.where(torch.isnan(x), torch.full_like(x, torch.nan), x)
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and bits; -0 is not +0, NaN is NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool((bits(a) == bits(b)).all()) if a.dtype.is_floating_point else torch.equal(a, b)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal values that depend on the seed alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def moving_rows(
    operation: Callable[[Tensor], Tensor], x: Tensor, counts: Sequence[int]
) -> set[int]:
    """Row counts M for which some row of operation(x[:M]) has other bits than alone."""
    alone = [operation(x[i : i + 1].contiguous()) for i in range(max(counts))]
    return {
        count
        for count in counts
        if not same_bits(operation(x[:count].contiguous()), torch.cat(alone[:count]))
    }


def rope_table(positions: int, head_dim: int) -> RopeTable:
    """Rotary angles with base 10,000."""
    inverse = 10000.0 ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    angles = torch.outer(torch.arange(positions).double(), inverse)
    return RopeTable(cos=angles.cos().float(), sin=angles.sin().float())


class Sequences:
    """Some sequences with their inputs, and a paged cache whose unused slots hold NaN.

    Launches take (sequence, begin, end) runs: write keys and values of these
    positions, then attend. Pages are given out in an order that `seed` shuffles.
    """

    def __init__(
        self,
        ops: Backend,
        lengths: Sequence[int],
        *,
        dtype: torch.dtype,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        page_tokens: int = 16,
        window: int | None = None,
        page_seed: int = 0,
        norm: QKNorm | None = None,
        filler: float = float("nan"),
    ) -> None:
        self.ops, self.dtype, self.window, self.norm = ops, dtype, window, norm
        self.q_heads, self.kv_heads, self.head_dim = q_heads, kv_heads, head_dim
        self.page_tokens, self.scale = page_tokens, head_dim**-0.5
        table = rope_table(max(lengths), head_dim)
        device = ops.device
        self.rope = RopeTable(cos=table.cos.to(device), sin=table.sin.to(device))
        width = (q_heads + 2 * kv_heads) * head_dim
        self.inputs = [
            randn(n, width, dtype=dtype, seed=100 + i).to(device) for i, n in enumerate(lengths)
        ]
        needed = [-(-n // page_tokens) for n in lengths]
        count = sum(needed) + 3
        stride = (2 * kv_heads * page_tokens + 1) * head_dim
        self.pool = torch.full((count * stride + 16,), filler, dtype=dtype, device=device)
        self.kv = ops.kv_layer(
            self.pool,
            page_stride=stride,
            offset=16,
            kv_heads=kv_heads,
            head_dim=head_dim,
            page_tokens=page_tokens,
        )
        generator = torch.Generator().manual_seed(page_seed)
        free = torch.randperm(count, generator=generator).tolist()
        self.tables = [[free.pop() for _ in range(n)] for n in needed]

    def batch(self, runs: Sequence[tuple[int, int, int]]) -> AttentionBatch:
        """The launch's bookkeeping; pages that the window has left are -1."""
        starts, contexts, slots = [0], [], []
        width = max(len(self.tables[run[0]]) for run in runs)
        table = torch.full((len(runs), width), -1, dtype=torch.int32)
        for row, (sequence, begin, end) in enumerate(runs):
            pages = self.tables[sequence]
            starts.append(starts[-1] + end - begin)
            contexts.append(end)
            slots += [
                pages[p // self.page_tokens] * self.page_tokens + p % self.page_tokens
                for p in range(begin, end)
            ]
            first = 0 if self.window is None else max(0, begin + 1 - self.window)
            kept = range(first // self.page_tokens, -(-end // self.page_tokens))
            for entry in kept:
                table[row, entry] = pages[entry]
        device = self.ops.device
        return AttentionBatch(
            query_start=torch.tensor(starts, dtype=torch.int32, device=device),
            context_len=torch.tensor(contexts, dtype=torch.int32, device=device),
            page_table=table.to(device),
            slots=torch.tensor(slots, dtype=torch.int32, device=device),
            max_query=max(end - begin for _, begin, end in runs),
            max_context=max(contexts),
        )

    def launch(self, *runs: tuple[int, int, int]) -> list[Tensor]:
        """Write and attend: one [end - begin, Hq * E] result a run."""
        batch = self.batch(runs)
        qkv = torch.cat([self.inputs[s][begin:end] for s, begin, end in runs])
        positions = torch.cat([torch.arange(begin, end) for _, begin, end in runs]).int()
        positions = positions.to(self.ops.device)
        q = self.ops.write_kv(qkv, positions, self.rope, self.kv, batch, self.q_heads, self.norm)
        out = self.ops.attention(q, self.kv, batch, self.scale, self.window)
        return list(out.split([end - begin for _, begin, end in runs]))

    def last_rows(self, counts: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        """All sequences written in one launch, then the last `counts` rows of each attending in
        one of their own; and, first, what these rows give where every row attends."""
        runs = [(s, 0, len(own)) for s, own in enumerate(self.inputs)]
        batch = self.batch(runs)
        positions = torch.cat([torch.arange(end) for _, _, end in runs]).int()
        q = self.ops.write_kv(
            torch.cat(self.inputs),
            positions.to(self.ops.device),
            self.rope,
            self.kv,
            batch,
            self.q_heads,
            self.norm,
        )
        lengths = [end for _, _, end in runs]
        out = self.ops.attention(q, self.kv, batch, self.scale, self.window).split(lengths)
        few = self.batch([(s, n - c, n) for (s, _, n), c in zip(runs, counts, strict=True)])
        chosen = torch.cat(
            [own[len(own) - c :] for own, c in zip(q.split(lengths), counts, strict=True)]
        )
        found = self.ops.attention(chosen, self.kv, few, self.scale, self.window)
        expected = [own[len(own) - c :] for own, c in zip(out, counts, strict=True)]
        return expected, list(found.split(list(counts)))

    def whole(self, sequence: int) -> Tensor:
        """The sequence alone, in one launch."""
        return self.launch((sequence, 0, len(self.inputs[sequence])))[0]

    def in_chunks(self, sequence: int, size: int) -> Tensor:
        """The sequence alone, `size` positions a launch."""
        length = len(self.inputs[sequence])
        return torch.cat(
            [
                self.launch((sequence, begin, min(begin + size, length)))[0]
                for begin in range(0, length, size)
            ]
        )
