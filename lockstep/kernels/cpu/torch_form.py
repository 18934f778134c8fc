"""The torch CPU form, for machines without a C++ compiler: right, not fast.

Products run through torch's own float32 matmul in tiles of exactly `TILE` rows,
zero-padded. A matmul of one shape on one thread count takes one tree, whichever
row of the tile an input stands in: that is not promised by anyone, so it is
proved here for every shape before its first use, and refused where it fails.
Everything else is made of correctly rounded steps (`lockstep.kernels.exact`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from lockstep.config import ConfigError
from lockstep.kernels import exact, paged, tree
from lockstep.kernels import lora as lora_ops
from lockstep.kernels.contract import (
    Activation,
    AttentionBatch,
    Backend,
    KVLayer,
    LoraPair,
    LoraRows,
    LoraSet,
    LoraWeight,
    QKNorm,
    RopeTable,
    SampleBatch,
    Weight,
)
from lockstep.kernels.cpu.operands import (
    BLOCK,
    check_columns,
    check_ids,
    check_page,
    check_pair,
    check_qkv,
    check_queries,
    check_tree,
    check_weight,
    code,
    like,
    logit_rows,
    rows_of,
)

TILE = 16
_ACTIVATIONS = {"silu": exact.silu, "gelu_tanh": exact.gelu_tanh}


def prove_tile(n: int, k: int) -> None:
    """Prove that a [TILE, k] by [k, n] product treats its rows alike.

    The same rows are computed at every position of the tile, among other
    neighbours each time (random, zero, huge and NaN): all bits must agree.

    Raises:
        ConfigError: they do not, so this form cannot keep its promise here.
    """
    generator = torch.Generator().manual_seed(n * 1_000_003 + k)
    weight = torch.randn(n, k, generator=generator)
    rows = torch.randn(TILE, k, generator=generator)
    expected = torch.mm(rows, weight.T)
    neighbours = (
        torch.randn(TILE, k, generator=generator),
        torch.zeros(TILE, k),
        torch.full((TILE, k), 1e30),
        torch.full((TILE, k), torch.nan),
    )
    for shift in range(TILE):
        order = [(i + shift) % TILE for i in range(TILE)]
        moved = torch.mm(rows[order], weight.T)
        alone = neighbours[shift % len(neighbours)].clone()
        alone[shift] = rows[0]
        single = torch.mm(alone, weight.T)[shift]
        if not (torch.equal(moved, expected[order]) and torch.equal(single, expected[0])):
            raise ConfigError(
                f"backend 'torch' cannot give equal bits here: torch {torch.__version__} with "
                f"{torch.get_num_threads()} threads computes a row of a [{TILE}, {k}] x [{k}, {n}] "
                "product differently by its place in the tile; install a C++ compiler and use "
                "backend='native', or try another thread count"
            )


class TorchBackend(Backend):
    """`Backend` on torch alone. Weights are held in float32 whatever their dtype.

    Sets torch's thread count for the process: it belongs to what is proved.
    """

    name = "torch"
    kind = "cpu"
    device = torch.device("cpu")

    def __init__(self, threads: int, chosen: str = "") -> None:
        check_tree()
        self.threads = threads
        self._chosen = chosen
        self._proved: set[tuple[int, int, int]] = set()
        torch.set_num_threads(threads)

    def describe(self) -> dict[str, str]:
        parts = {
            "backend": self.name,
            "torch": torch.__version__,
            "isa": torch.backends.cpu.get_cpu_capability(),
            "threads": str(self.threads),
            "tile": str(TILE),
        }
        return {**parts, "chosen": self._chosen} if self._chosen else parts

    def prove(self, n: int, k: int) -> None:
        """`prove_tile` for this shape on the current thread count, once."""
        key = (n, k, torch.get_num_threads())
        if key not in self._proved:
            prove_tile(n, k)
            self._proved.add(key)

    def _prove_heads(self, head_dim: int) -> None:
        """Prove the products of attention: scores, and sums of values."""
        self.prove(BLOCK, head_dim)
        self.prove(head_dim, BLOCK)

    def _product(self, x: Tensor, held: Tensor) -> Tensor:
        """x [R, K] times a held matrix transposed in float32, tile by tile: [R, its rows]."""
        rows, k = x.shape
        self.prove(*held.shape)
        padded = torch.zeros(-(-rows // TILE) * TILE, held.shape[1])
        padded[:rows, :k] = x
        out = torch.empty(padded.shape[0], held.shape[0])
        for begin in range(0, rows, TILE):
            end = begin + TILE
            torch.mm(padded[begin:end], held.T, out=out[begin:end])
        return out[:rows]

    # --- weights -----------------------------------------------------------

    def _hold(self, matrix: Tensor) -> Tensor:
        """Padded with zeros to whole tiles: narrow, odd shapes are those that fail the proof."""
        code(matrix)
        n, k = matrix.shape
        data = torch.zeros(-(-n // TILE) * TILE, -(-k // TILE) * TILE)
        data[:n, :k] = matrix.detach()
        self.prove(*data.shape)
        return data

    def pack(self, weight: Tensor) -> Weight:
        n, k = weight.shape
        return Weight(data=self._hold(weight), n=n, k=k, dtype=weight.dtype)

    def pack_gated(self, gate: Tensor, up: Tensor) -> Weight:
        check_pair(gate, up)
        n, k = 2 * gate.shape[0], gate.shape[1]
        data = self._hold(torch.cat([gate, up]))
        return Weight(data=data, n=n, k=k, dtype=gate.dtype, gated=True)

    def unpack(self, weight: Weight) -> Tensor:
        return weight.data[: weight.n, : weight.k].to(weight.dtype, copy=True)

    def pack_lora(self, pairs: Sequence[LoraPair], n: int, *, gated: bool = False) -> LoraWeight:
        return lora_ops.packed(pairs, n, gated, lambda a, b, begin: (self._hold(a), self._hold(b)))

    def lora_set(self, weights: Sequence[LoraWeight | None]) -> LoraSet:
        return lora_ops.make_set(weights, torch.empty(0))

    # --- layers ------------------------------------------------------------

    def linear(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        check_weight(x, weight, gated=False)
        return _finish(self._sums(x, weight), x.dtype, bias, residual)

    def _sums(self, x: Tensor, weight: Weight) -> Tensor:
        return self._product(x, weight.data)[:, : weight.n].contiguous()

    def logits(self, x: Tensor, weight: Weight) -> Tensor:
        check_weight(x, weight, gated=False)
        return self._sums(x, weight)

    def gated_linear(self, x: Tensor, weight: Weight, activation: Activation) -> Tensor:
        check_weight(x, weight, gated=True)
        return _gate(self._sums(x, weight), x.dtype, activation)

    def _adapted(self, x: Tensor, weight: Weight, lora: LoraRows) -> Tensor:
        lora_ops.check_rows(lora, weight, x.shape[0])
        return lora_ops.add_deltas(self._sums(x, weight), x, lora, self._product)

    def adapted_linear(
        self,
        x: Tensor,
        weight: Weight,
        lora: LoraRows,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        check_weight(x, weight, gated=False)
        return _finish(self._adapted(x, weight, lora), x.dtype, bias, residual)

    def adapted_gated_linear(
        self, x: Tensor, weight: Weight, lora: LoraRows, activation: Activation
    ) -> Tensor:
        check_weight(x, weight, gated=True)
        return _gate(self._adapted(x, weight, lora), x.dtype, activation)

    def embedding(self, ids: Tensor, weight: Weight, scale: float = 1.0) -> Tensor:
        check_ids(ids, weight)
        rows = weight.data[ids.long(), : weight.k]
        if scale != 1.0:
            rows = rows * torch.tensor(scale, dtype=weight.dtype).float()
        return rows.to(weight.dtype)

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        unit_offset: bool = False,
        residual: Tensor | None = None,
    ) -> Tensor:
        rows = rows_of(x, weight.shape[0], "x")
        out = exact.rms_norm(x, weight, eps, unit_offset)
        if residual is None:
            return out
        like(residual, (rows, weight.shape[0]), x.dtype, "residual")
        return (residual.float() + out.float()).to(x.dtype)

    def write_kv(
        self,
        qkv: Tensor,
        positions: Tensor,
        rope: RopeTable,
        kv: KVLayer,
        batch: AttentionBatch,
        q_heads: int,
        norm: QKNorm | None = None,
    ) -> Tensor:
        check_qkv(qkv, positions, rope, kv, batch, q_heads)
        return paged.write_kv(qkv, positions, rope, kv, batch, q_heads, norm, exact.rms_norm)

    def attention(
        self,
        q: Tensor,
        kv: KVLayer,
        batch: AttentionBatch,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        check_queries(q, kv)
        rows, q_heads, head_dim = q.shape
        if not rows:
            return q.new_empty(0, q_heads * head_dim)
        self._prove_heads(head_dim)
        return _Attention(q, kv, batch, scale, window).run()

    # --- cache memory --------------------------------------------------------

    def kv_layer(
        self,
        pool: Tensor,
        *,
        page_stride: int,
        offset: int,
        kv_heads: int,
        head_dim: int,
        page_tokens: int,
    ) -> KVLayer:
        check_page(page_tokens)
        self._prove_heads(head_dim)  # at start-up, not under the first request
        return paged.kv_layer(pool, page_stride, offset, kv_heads, head_dim, page_tokens)

    def copy_pages(self, pool: Tensor, page_stride: int, pairs: Tensor) -> None:
        paged.copy_pages(pool, page_stride, pairs)

    # --- sampling ------------------------------------------------------------

    def log_sum_exp(self, logits: Tensor) -> Tensor:
        logit_rows(logits)
        return exact.log_sum_exp(logits, tree.VOCAB_BLOCK)

    def argmax(self, logits: Tensor) -> Tensor:
        logit_rows(logits)
        return exact.argmax(logits)

    def sample(self, logits: Tensor, batch: SampleBatch) -> Tensor:
        rows = logit_rows(logits)
        check_columns(
            rows,
            batch.temperature,
            batch.top_k,
            batch.top_p,
            batch.min_p,
            batch.seed,
            batch.choice,
            batch.position,
        )
        drawn = [
            exact.sample_row(
                logits[row],
                float(batch.temperature[row]),
                int(batch.top_k[row]),
                float(batch.top_p[row]),
                float(batch.min_p[row]),
                partial(
                    exact.gumbel,
                    batch.seed[row].long(),
                    batch.choice[row].long(),
                    batch.position[row].long(),
                ),
            )
            for row in range(rows)
        ]
        return torch.tensor(drawn, dtype=torch.int64)


def _finish(
    acc: Tensor, dtype: torch.dtype, bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    """Bias, cast and residual of float32 accumulators [R, N]."""
    if bias is not None:
        like(bias, acc.shape[1:], bias.dtype, "bias")
    if residual is not None:
        like(residual, acc.shape, dtype, "residual")
    cast = (acc if bias is None else acc + bias.float()).to(dtype)
    return cast if residual is None else (residual.float() + cast.float()).to(dtype)


def _gate(acc: Tensor, dtype: torch.dtype, activation: Activation) -> Tensor:
    """The gated product of accumulators [R, 2F], gate columns first: [R, F]."""
    gate, up = (exact.round_to(half, dtype) for half in acc.chunk(2, dim=-1))
    active = exact.round_to(_ACTIVATIONS[activation](gate), dtype)
    return (active * up).to(dtype)


class _Attention:
    """One launch: online softmax over blocks, all rows that see a block at once.

    A lane is one query head of one row; lanes are numbered row * Hq + head.
    """

    def __init__(
        self, q: Tensor, kv: KVLayer, batch: AttentionBatch, scale: float, window: int | None
    ) -> None:
        rows, self.q_heads, self.head_dim = q.shape
        self.kv, self.batch, self.scale, self.dtype = kv, batch, scale, q.dtype
        self.group = self.q_heads // kv.v.shape[1]
        self.query = q.float().view(rows * self.q_heads, self.head_dim)
        self.starts, contexts = batch.query_start.tolist(), batch.context_len.tolist()
        high: list[int] = []
        for run, context in enumerate(contexts):
            length = self.starts[run + 1] - self.starts[run]
            high += range(context - length + 1, context + 1)
        self.high = high
        self.low = [max(0, end - window) if window else 0 for end in high]
        self.lane_high = torch.tensor(high).repeat_interleave(self.q_heads)
        self.lane_low = torch.tensor(self.low).repeat_interleave(self.q_heads)

    def run(self) -> Tensor:
        lanes = len(self.query)
        total = torch.zeros(lanes, self.head_dim)
        total_max, total_sum = torch.full((lanes,), -torch.inf), torch.zeros(lanes)
        begin, end = min(self.low), max(self.high)
        for segment in range(begin // tree.SEGMENT * tree.SEGMENT, end, tree.SEGMENT):
            stop = segment + tree.SEGMENT
            part, part_max, part_sum = self._segment(segment, min(stop, end))
            first = self.lane_low // tree.SEGMENT * tree.SEGMENT == segment
            seen = (self.lane_low < stop) & (self.lane_high > segment)
            top = torch.maximum(total_max, part_max)
            old, new = exact.exp(total_max - top), exact.exp(part_max - top)
            merged = total * old[:, None] + part * new[:, None]
            merged_sum = total_sum * old + part_sum * new
            total = torch.where(first[:, None], part, torch.where(seen[:, None], merged, total))
            total_sum = torch.where(first, part_sum, torch.where(seen, merged_sum, total_sum))
            total_max = torch.where(first, part_max, torch.where(seen, top, total_max))
        out = (total / total_sum[:, None]).to(self.dtype)
        return out.view(-1, self.q_heads * self.head_dim)

    def _segment(self, begin: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """Unnormalised sum [lanes, E], running maximum and sum of one segment."""
        lanes = len(self.query)
        acc = torch.zeros(lanes, self.head_dim)
        top, total = torch.full((lanes,), -torch.inf), torch.zeros(lanes)
        keys = torch.arange(BLOCK)
        for block in range(begin, end, BLOCK):
            active = ((self.lane_high > block) & (self.lane_low < block + BLOCK)).nonzero()[:, 0]
            if not len(active):
                continue
            tiles = self._tiles(block)
            scores = torch.zeros(lanes, BLOCK)
            for members, k, _ in tiles:
                scores[members] = self._tile(self.query[members], k)
            at = block + keys
            visible = (at >= self.lane_low[active, None]) & (at < self.lane_high[active, None])
            s = torch.where(visible, scores[active] * self.scale, -torch.inf)
            highest = torch.maximum(top[active], s.amax(dim=-1))
            keep = exact.exp(top[active] - highest)
            p = exact.exp(s - highest[:, None])
            scores[active] = p
            total[active] = total[active] * keep + exact.sum_lanes(p)
            top[active] = highest
            added = torch.zeros(lanes, self.head_dim)
            for members, _, v in tiles:
                added[members] = self._tile(scores[members], v)
            acc[active] = acc[active] * keep[:, None] + added[active]
        return acc, top, total

    @staticmethod
    def _tile(rows: Tensor, matrix: Tensor) -> Tensor:
        """rows [n <= TILE, K] times matrix [N, K] transposed, as a whole tile."""
        padded = torch.zeros(TILE, rows.shape[1])
        padded[: len(rows)] = rows
        return torch.mm(padded, matrix.T)[: len(rows)]

    def _tiles(self, block: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Lanes that see the same keys of the block, with keys [BLOCK, E], values [E, BLOCK].

        What they do not see reads as zero, so that no stale or later value enters.
        """
        tiles = []
        for run in range(len(self.starts) - 1):
            rows_of: dict[tuple[int, int], list[int]] = {}
            for row in range(self.starts[run], self.starts[run + 1]):
                low, high = max(self.low[row], block), min(self.high[row], block + BLOCK)
                if low < high:
                    rows_of.setdefault((low, high), []).append(row)
            for (low, high), rows in rows_of.items():
                k, v = paged.gather(self.kv, self.batch.page_table[run], low, high)
                first = torch.tensor(rows)[:, None] * self.q_heads
                for head in range(k.shape[1]):
                    members = (first + head * self.group + torch.arange(self.group)[None]).flatten()
                    keys = torch.zeros(BLOCK, self.head_dim)
                    keys[low - block : high - block] = k[:, head].float()
                    values = torch.zeros(self.head_dim, BLOCK)
                    values[:, low - block : high - block] = v[:, head].float().T
                    tiles += [(chunk, keys, values) for chunk in torch.split(members, TILE)]
        return tiles
