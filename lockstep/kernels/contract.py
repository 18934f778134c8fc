"""What every backend offers: the operations of a decoder layer, each with its fixed tree.

The contract of every operation: **a row of the result depends only on that row's
inputs and on the weights**, bit for bit. Which other rows share the launch, how
many there are, where the row stands among them, how the work is tiled and how
many threads do it may not matter. `tests/kernels/` checks this by permuting,
splitting and padding the batch, with `plain.py` as the control that must fail.

Shapes: R rows (tokens), D hidden size, N output features, K input features, F
feed-forward size, V vocabulary, Hq query heads, Hk key/value heads, E head size.
Activations are contiguous [R, ...] in the model's dtype (float32 or bfloat16).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix [n, k] in the layout that its backend's operations read.

    Attributes:
        data: backend-specific storage; only the backend that packed it reads it.
        n, k: logical shape (rows are output features). For a gated pair n = 2F.
        dtype: of the logical values. `gated`: packed by `pack_gated`.
    """

    data: Tensor
    n: int
    k: int
    dtype: torch.dtype
    gated: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class LoraPair:
    """One low-rank pair as it comes from an adapter's file (Hu et al. 2021).

    It adds scale * (x a^T) b^T to the outputs begin .. begin + n of a linear: a fused
    weight (queries, keys, values) takes one pair for each of its parts that is adapted.

    Attributes:
        a: [rank, K]. b: [n, rank], both float32 or bfloat16.
        scale: folded into b when it is packed.
        begin: first output; of a gated pair gate rows come first, then up rows.
    """

    a: Tensor
    b: Tensor
    scale: float = 1.0
    begin: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class PackedLoraPair:
    """A pair in the layout of the backend that packed it; the outputs begin .. begin + n."""

    a: Tensor
    b: Tensor
    begin: int
    n: int
    rank: int


@dataclass(frozen=True, slots=True, eq=False)
class LoraWeight:
    """What one adapter does to one linear [n, k]: pairs on disjoint ranges of its outputs."""

    pairs: tuple[PackedLoraPair, ...]
    n: int
    k: int
    dtype: torch.dtype
    gated: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class LoraSet:
    """The adapters of one linear by index, made when adapters are loaded or unloaded.

    Attributes:
        weights: per adapter; None where it leaves this linear alone.
        table: where they lie; only the backend that made it reads it.
        pairs, rank, ranks: host-side maxima over the adapters, for launch sizes only: pairs
            of one, rank of a pair, and sum of one's ranks, these rounded up to 16 each.
    """

    weights: tuple[LoraWeight | None, ...]
    table: Tensor
    pairs: int
    rank: int
    ranks: int


@dataclass(frozen=True, slots=True)
class LoraRows:
    """Which adapter acts on each row of one launch.

    Attributes:
        index: int32 [R], places in `adapters.weights`; -1 is no adapter. Rows of one
            adapter are best next to each other; no bit depends on it.
    """

    index: Tensor
    adapters: LoraSet

    def __post_init__(self) -> None:
        _must_be(self.index, (self.index.shape[0],), torch.int32, "LoRA index")


@dataclass(frozen=True, slots=True)
class RopeTable:
    """cos and sin, float32 [positions, E / 2] each; one table serves every form.

    Rotation is the half-split form (Hugging Face `rotate_half`): out[i] = x[i] cos -
    x[i + E/2] sin; out[i + E/2] = x[i + E/2] cos + x[i] sin, in float32, then cast.
    """

    cos: Tensor
    sin: Tensor

    def __post_init__(self) -> None:
        positions, half = self.cos.shape
        _must_be(self.cos, (positions, half), torch.float32, "cos")
        _must_be(self.sin, (positions, half), torch.float32, "sin")


@dataclass(frozen=True, slots=True)
class QKNorm:
    """Per-head RMS norm of queries and keys before rotation (Qwen 3, Gemma 3)."""

    q: Tensor  # [E] float32 or model dtype
    k: Tensor  # [E]
    eps: float
    unit_offset: bool = False


@dataclass(frozen=True, slots=True)
class KVLayer:
    """One layer's keys and values: strided views into the pool, made by `Backend.kv_layer`.

    v is [pages, Hk, page_tokens, E]. k is whatever inner layout the backend's
    `write_kv` and `attention` agree on (the native CPU form keeps keys
    transposed, [pages, Hk, E, page_tokens]).
    """

    k: Tensor
    v: Tensor
    page_tokens: int


@dataclass(frozen=True, slots=True)
class SharedSegments:
    """Runs of one row whose first pages are the same, so that attention may read them once.

    Attributes:
        segments: int32 [B]; whole segments (`tree.SEGMENT`) that a run shares, all of them
            before the one in which its row stands; 0 for none.
        members: int32 [G, W]; the runs of each bunch, the first one real, -1 behind the last.
        bunch_segments: int32 [G]; `segments` of a bunch's members, 0 for an empty bunch.
    """

    segments: Tensor
    members: Tensor
    bunch_segments: Tensor


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where the rows of one launch stand, for one cache group.

    Attributes:
        query_start: int32 [B + 1]; run b owns rows query_start[b] .. query_start[b+1].
        context_len: int32 [B]; key positions visible to the run's last row. The rows
            of run b stand at positions context_len[b] - len_b + i.
        page_table: int32 [B, P]; -1 where the window has moved on.
        slots: int32 [R]; page * page_tokens + offset, where each row's K and V go.
        max_query, max_context: host-side maxima over the runs, for launch sizes only.
        shared: what a backend may read once for several runs; no bit depends on it.
    """

    query_start: Tensor
    context_len: Tensor
    page_table: Tensor
    slots: Tensor
    max_query: int
    max_context: int
    shared: SharedSegments | None = None

    def __post_init__(self) -> None:
        runs = self.context_len.shape[0]
        _must_be(self.query_start, (runs + 1,), torch.int32, "query_start")
        _must_be(self.context_len, (runs,), torch.int32, "context_len")
        _must_be(self.page_table, (runs, self.page_table.shape[-1]), torch.int32, "page_table")
        _must_be(self.slots, (self.slots.shape[0],), torch.int32, "slots")


def _must_be(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> None:
    """Refuse what a kernel would read out of bounds: checked once, not in every layer."""
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous {tuple(shape)} {dtype}, got {tuple(tensor.shape)} "
            f"{tensor.dtype}"
        )


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Sampling parameters of R rows, all tensors [R] on the logits' device.

    temperature > 0 draws, 0 is greedy; top_k 0 is off; seed int64 (bit pattern),
    choice and position int32. `cuts_by_count` and `cuts_by_mass` are known to the host:
    False says that no row has a top_k, or a top_p below 1.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    choice: Tensor
    position: Tensor
    cuts_by_count: bool = True
    cuts_by_mass: bool = True


class Backend(ABC):
    """Fixed-tree operations on one device. Stateless but for scratch memory and threads.

    Attributes:
        name: "native", "torch", "triton" or "plain".
        device: where every tensor lives.
        kind: "cpu" or "cuda", the key of the tables in `tree.py`.
    """

    name: str
    kind: str
    device: torch.device

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """What fixes the bits beside the tree: instruction set, library versions."""

    # --- weights -----------------------------------------------------------

    @abstractmethod
    def pack(self, weight: Tensor) -> Weight:
        """Lay out a matrix [N, K] (any device, float32 or bfloat16) for `linear`."""

    @abstractmethod
    def pack_gated(self, gate: Tensor, up: Tensor) -> Weight:
        """Lay out gate [F, K] and up [F, K] for `gated_linear`."""

    @abstractmethod
    def unpack(self, weight: Weight) -> Tensor:
        """The logical matrix [n, k] again (gate rows first for a gated pair)."""

    @abstractmethod
    def pack_lora(self, pairs: Sequence[LoraPair], n: int, *, gated: bool = False) -> LoraWeight:
        """Lay out one adapter's pairs for a linear with n outputs (2F for a gated pair).

        b times scale is computed in float32 and rounded once to b's dtype, which is exact
        where the scale is a power of two.

        Raises:
            ValueError: pairs that do not fit each other or n, naming the first.
        """

    @abstractmethod
    def lora_set(self, weights: Sequence[LoraWeight | None]) -> LoraSet:
        """The adapters of one linear, by the index that rows name them with.

        Raises:
            ValueError: they are for linears of different shapes.
        """

    # --- layers ------------------------------------------------------------

    @abstractmethod
    def linear(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """x [R, K] times weight [N, K] transposed: [R, N] in x's dtype.

        Tree: each element sums K ascending into one float32 accumulator per slice
        (`tree.k_slices`), slices added ascending; then + bias (float32), then cast;
        then, with `residual` [R, N], cast(residual + cast value).
        """

    @abstractmethod
    def logits(self, x: Tensor, weight: Weight) -> Tensor:
        """As `linear` without bias, but the float32 accumulator is the result: [R, V],
        contiguous."""

    @abstractmethod
    def gated_linear(self, x: Tensor, weight: Weight, activation: Activation) -> Tensor:
        """act(x gate^T) * (x up^T): [R, F] in x's dtype.

        Tree: both products as in `linear`, each cast to x's dtype; the activation in
        float32 on the cast value, cast; the product of the two cast values, cast.
        """

    @abstractmethod
    def adapted_linear(
        self,
        x: Tensor,
        weight: Weight,
        lora: LoraRows,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """As `linear`, with a low-rank pair added to the rows that have an adapter: [R, N].

        Tree: acc is `linear`'s float32 sum. Of a row with an adapter, for each of its pairs:
        t = x a^T, K ascending in one float32 sum whatever `tree.k_slices` says, cast to x's
        dtype; delta = t b^T, rank ascending in one float32 sum from zero; acc + delta on the
        pair's outputs. Then bias, cast and residual as in `linear`. Rows without an adapter,
        and outputs outside its pairs, skip the addition (adding 0 would turn -0 into +0).
        """

    @abstractmethod
    def adapted_gated_linear(
        self, x: Tensor, weight: Weight, lora: LoraRows, activation: Activation
    ) -> Tensor:
        """As `gated_linear`, with deltas as in `adapted_linear` added to both products
        before their casts: [R, F]."""

    @abstractmethod
    def embedding(self, ids: Tensor, weight: Weight, scale: float = 1.0) -> Tensor:
        """Rows of the packed table for ids int32 [R]: [R, K]; times `scale` rounded to dtype."""

    @abstractmethod
    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        unit_offset: bool = False,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Root-mean-square norm (Zhang & Sennrich 2019) of each row of x [R, D].

        Tree: squares summed in the fixed blocks of `tree.NORM_BLOCK`, float32.
        Without `unit_offset` (Llama): cast(x * inv), then * weight, cast. With it
        (Gemma): x * inv * (1 + weight) in float32, cast. With `residual` [R, D]:
        cast(residual + that).
        """

    @abstractmethod
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
        """Split, norm, rotate; store K and V at `batch.slots`; return rotated queries.

        qkv [R, (Hq + 2 Hk) * E], positions int32 [R]; returns [R, Hq, E] in qkv's dtype.
        """

    @abstractmethod
    def attention(
        self,
        q: Tensor,
        kv: KVLayer,
        batch: AttentionBatch,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """Causal attention of q [R, Hq, E] over paged keys and values: [R, Hq * E].

        A row at position p sees positions max(0, p + 1 - window) .. p, reading K and
        V only as stored. Tree: segments of `tree.SEGMENT` positions at absolute
        multiples, each a fresh online softmax over blocks of `tree.BLOCK` positions
        ascending; segment partials merged ascending. Masked keys are exact zeros, a
        wholly masked block or segment is an exact identity, masked V loads as zero.
        """

    # --- cache memory --------------------------------------------------------

    @abstractmethod
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
        """Views of one layer inside a flat pool (1-D, model dtype).

        Page i of the group starts at element i * page_stride; this layer's keys lie
        at `offset` within the page, its values right after (kv_heads * page_tokens *
        head_dim elements each).
        """

    @abstractmethod
    def copy_pages(self, pool: Tensor, page_stride: int, pairs: Tensor) -> None:
        """Copy whole pages, pairs int64 [C, 2] of (source, target), in the given order."""

    # --- sampling ------------------------------------------------------------

    @abstractmethod
    def log_sum_exp(self, logits: Tensor) -> Tensor:
        """log(sum(exp(row))) of float32 [R, V]: [R]; sum over `tree.VOCAB_BLOCK` blocks."""

    @abstractmethod
    def argmax(self, logits: Tensor) -> Tensor:
        """Lowest index of the largest value of each row: int64 [R]."""

    @abstractmethod
    def sample(self, logits: Tensor, batch: SampleBatch) -> Tensor:
        """Draw one id a row from float32 logits [R, V] (-inf means forbidden): int64 [R].

        Order: z = (logit - max) / temperature; keep the top_k largest (ties: lower id
        first); of these the shortest prefix, in descending order, whose probability
        (softmax of z over what top_k kept) reaches top_p, at least one; of these the
        ones with p >= min_p * max p. Draw by Gumbel-max: argmax over kept ids of
        z + g(seed, choice, position, id), ties to the lower id.

        g = -log(-log1p(-u)), u = min((x + 0.5) * 2^-32, 1 - 2^-24), x = word 0 of
        Philox-4x32-10 (Salmon et al. 2011), key (seed low, seed high), counter
        (id, position, choice, 0). Temperature 0 rows take the argmax.
        """
