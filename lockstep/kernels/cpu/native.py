"""The native CPU form: fixed-tree operations in C++, called by address.

Bits are the same for every thread count, tile and batch; they depend on the
instruction set only through bfloat16 products (`describe()["isa"]`). See
`tiles.h`, `attention.cpp`, `norm.h` and `sampling.cpp` for the trees as written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.config import ConfigError
from lockstep.kernels import lora as lora_ops
from lockstep.kernels import tree
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
from lockstep.kernels.cpu.library import HugePages, load_library
from lockstep.kernels.cpu.operands import (
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

_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
_MAX_HEAD_DIM = 1024


class NativeBackend(Backend):
    """`Backend` over the compiled library, with its own pool of threads.

    Raises:
        ConfigError: no compiler, or it failed, or `tree.py` names blocks that this
            library was not written for, or the system grants fewer threads.
    """

    name = "native"
    kind = "cpu"
    device = torch.device("cpu")

    def __init__(self, threads: int) -> None:
        check_tree()
        self.threads = threads
        self._lib, self._built = load_library()
        self._pool = self._lib.lk_pool_new(threads)
        if not self._pool:
            raise ConfigError(
                f"threads: the system does not grant {threads}; ask for fewer, or raise its limit "
                "of processes (ulimit -u) or of memory"
            )
        self._memory = HugePages(self._lib)

    def __del__(self) -> None:
        pool = getattr(self, "_pool", None)
        if pool:
            self._lib.lk_pool_free(pool)
            self._pool = None

    def describe(self) -> dict[str, str]:
        return {
            "backend": self.name,
            "isa": self._lib.lk_isa().decode(),
            "compiler": self._built.compiler,
            "sources": self._built.sources,
        }

    # --- weights -----------------------------------------------------------

    def pack(self, weight: Tensor) -> Weight:
        n, k = weight.shape
        data = self._pack_parts((weight,))
        return Weight(data=data, n=n, k=k, dtype=weight.dtype)

    def pack_gated(self, gate: Tensor, up: Tensor) -> Weight:
        check_pair(gate, up)
        f, k = gate.shape
        data = self._pack_parts((gate, up))
        return Weight(data=data, n=2 * f, k=k, dtype=gate.dtype, gated=True)

    def _pack_parts(self, parts: tuple[Tensor, ...]) -> Tensor:
        n, k = parts[0].shape
        kind = code(parts[0])
        size = self._lib.lk_packed_size(kind, n, k)
        data = self._memory.empty(size * len(parts), parts[0].dtype)
        for index, part in enumerate(parts):
            source = part.detach().to("cpu").contiguous()
            self._lib.lk_pack(
                self._pool, kind, source.data_ptr(), n, k, data.data_ptr(), index, len(parts)
            )
        return data

    def unpack(self, weight: Weight) -> Tensor:
        parts = 2 if weight.gated else 1
        rows = weight.n // parts
        out = torch.empty(parts, rows, weight.k, dtype=weight.dtype)
        for index in range(parts):
            self._lib.lk_unpack(
                self._pool,
                code(weight.data),
                weight.data.data_ptr(),
                rows,
                weight.k,
                out[index].data_ptr(),
                index,
                parts,
            )
        return out.view(weight.n, weight.k)

    def pack_lora(self, pairs: Sequence[LoraPair], n: int, *, gated: bool = False) -> LoraWeight:
        def lay_out(a: Tensor, b: Tensor, begin: int) -> tuple[Tensor, Tensor]:
            lead = begin - self._panel_at(begin, n, gated)
            shifted = torch.nn.functional.pad(b.to("cpu"), (0, 0, lead, 0))
            return self._pack_parts((a,)), self._pack_parts((shifted,))

        return lora_ops.packed(pairs, n, gated, lay_out)

    def _panel_at(self, output: int, n: int, gated: bool) -> int:
        """The first output of the weight's panel that holds this one."""
        start = n // 2 if gated and output >= n // 2 else 0
        panel = int(self._lib.lk_panel())
        return start + (output - start) // panel * panel

    def lora_set(self, weights: Sequence[LoraWeight | None]) -> LoraSet:
        """The table: adapters + 1 places of first pairs, then the pairs as in lora.cpp."""
        first, rows = [0], []
        for weight in weights:
            if weight is None:
                first.append(first[-1])
                continue
            for pair in weight.pairs:
                origin = self._panel_at(pair.begin, weight.n, weight.gated)
                addresses = pair.a.data_ptr(), pair.b.data_ptr()
                rows += [pair.begin, pair.n, pair.rank, origin, *addresses]
            first.append(len(rows) // 6)
        return lora_ops.make_set(weights, torch.tensor([*first, *rows], dtype=torch.int64))

    # --- layers ------------------------------------------------------------

    def linear(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        rows = check_weight(x, weight, gated=False)
        out = torch.empty(rows, weight.n, dtype=x.dtype)
        self._lib.lk_linear(
            self._pool,
            code(x),
            x.data_ptr(),
            rows,
            weight.data.data_ptr(),
            weight.n,
            weight.k,
            *_bias(bias, weight.n),
            _residual(residual, rows, weight.n, x.dtype),
            out.data_ptr(),
        )
        return out

    def logits(self, x: Tensor, weight: Weight) -> Tensor:
        rows = check_weight(x, weight, gated=False)
        out = torch.empty(rows, weight.n, dtype=torch.float32)
        self._lib.lk_logits(
            self._pool,
            code(x),
            x.data_ptr(),
            rows,
            weight.data.data_ptr(),
            weight.n,
            weight.k,
            out.data_ptr(),
        )
        return out

    def gated_linear(self, x: Tensor, weight: Weight, activation: Activation) -> Tensor:
        rows = check_weight(x, weight, gated=True)
        out = torch.empty(rows, weight.n // 2, dtype=x.dtype)
        self._lib.lk_gated(
            self._pool,
            code(x),
            x.data_ptr(),
            rows,
            weight.data.data_ptr(),
            weight.n // 2,
            weight.k,
            _ACTIVATIONS[activation],
            out.data_ptr(),
        )
        return out

    def _adapters(self, lora: LoraRows, weight: Weight, rows: int) -> tuple[int, int, int, int]:
        """Addresses of index, first pairs and pairs, and the number of adapters."""
        lora_ops.check_rows(lora, weight, rows)
        count = len(lora.adapters.weights)
        if rows and not -1 <= int(lora.index.min()) <= int(lora.index.max()) < count:
            raise ValueError(f"LoRA index outside its {count} adapters: {lora.index.tolist()}")
        table = lora.adapters.table.data_ptr()
        return lora.index.data_ptr(), table, table + 8 * (count + 1), count

    def adapted_linear(
        self,
        x: Tensor,
        weight: Weight,
        lora: LoraRows,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        rows = check_weight(x, weight, gated=False)
        out = torch.empty(rows, weight.n, dtype=x.dtype)
        self._lib.lk_adapted_linear(
            self._pool,
            code(x),
            x.data_ptr(),
            rows,
            weight.data.data_ptr(),
            weight.n,
            weight.k,
            *self._adapters(lora, weight, rows),
            *_bias(bias, weight.n),
            _residual(residual, rows, weight.n, x.dtype),
            out.data_ptr(),
        )
        return out

    def adapted_gated_linear(
        self, x: Tensor, weight: Weight, lora: LoraRows, activation: Activation
    ) -> Tensor:
        rows = check_weight(x, weight, gated=True)
        out = torch.empty(rows, weight.n // 2, dtype=x.dtype)
        self._lib.lk_adapted_gated(
            self._pool,
            code(x),
            x.data_ptr(),
            rows,
            weight.data.data_ptr(),
            weight.n // 2,
            weight.k,
            *self._adapters(lora, weight, rows),
            _ACTIVATIONS[activation],
            out.data_ptr(),
        )
        return out

    def embedding(self, ids: Tensor, weight: Weight, scale: float = 1.0) -> Tensor:
        check_ids(ids, weight)
        ids = ids.to(torch.int32).contiguous()
        rounded = float(torch.tensor(scale, dtype=weight.dtype)) if scale != 1.0 else 1.0
        out = torch.empty(ids.shape[0], weight.k, dtype=weight.dtype)
        self._lib.lk_embedding(
            self._pool,
            code(weight.data),
            ids.data_ptr(),
            ids.shape[0],
            weight.data.data_ptr(),
            weight.n,
            weight.k,
            rounded,
            out.data_ptr(),
        )
        return out

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        unit_offset: bool = False,
        residual: Tensor | None = None,
    ) -> Tensor:
        width = weight.shape[0]
        rows = rows_of(x, width, "x")
        out = torch.empty_like(x)
        self._lib.lk_rms_norm(
            self._pool,
            code(x),
            x.data_ptr(),
            rows,
            width,
            like(weight, (width,), weight.dtype, "norm weight").data_ptr(),
            code(weight),
            eps,
            unit_offset,
            _residual(residual, rows, width, x.dtype),
            out.data_ptr(),
        )
        return out

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
        _, kv_heads, _, head_dim = kv.v.shape
        rows = check_qkv(qkv, positions, rope, kv, batch, q_heads)
        out = torch.empty(rows, q_heads, head_dim, dtype=qkv.dtype)
        q_norm = k_norm = norm_dtype = unit_offset = 0
        eps = 0.0
        if norm is not None:
            q_norm = like(norm.q, (head_dim,), norm.q.dtype, "query norm").data_ptr()
            k_norm = like(norm.k, (head_dim,), norm.q.dtype, "key norm").data_ptr()
            norm_dtype, eps, unit_offset = code(norm.q), norm.eps, norm.unit_offset
        self._lib.lk_write_kv(
            self._pool,
            code(qkv),
            qkv.data_ptr(),
            rows,
            positions.data_ptr(),
            rope.cos.data_ptr(),
            rope.sin.data_ptr(),
            rope.cos.shape[0],
            kv.k.data_ptr(),
            kv.v.data_ptr(),
            kv.v.stride(0),
            kv.page_tokens,
            head_dim,
            batch.slots.data_ptr(),
            q_heads,
            kv_heads,
            q_norm,
            k_norm,
            norm_dtype,
            eps,
            unit_offset,
            out.data_ptr(),
        )
        return out

    def attention(
        self,
        q: Tensor,
        kv: KVLayer,
        batch: AttentionBatch,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        rows, q_heads, head_dim = q.shape
        pages, kv_heads, page_tokens, _ = kv.v.shape
        check_queries(q, kv)
        runs, columns = batch.page_table.shape
        out = torch.empty(rows, q_heads * head_dim, dtype=q.dtype)
        self._lib.lk_attention(
            self._pool,
            code(q),
            q.data_ptr(),
            kv.k.data_ptr(),
            kv.v.data_ptr(),
            out.data_ptr(),
            kv.v.stride(0),
            page_tokens,
            head_dim,
            q_heads,
            kv_heads,
            pages,
            columns,
            batch.query_start.data_ptr(),
            batch.context_len.data_ptr(),
            batch.page_table.data_ptr(),
            runs,
            window or 0,
            tree.SEGMENT,
            scale,
        )
        return out

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
        """See `Backend.kv_layer`; keys lie as [E][tokens], in bfloat16 as [E / 2][tokens][2].

        Raises:
            ConfigError: a head size or page length that the kernels cannot take.
        """
        if head_dim % 16 or head_dim > _MAX_HEAD_DIM:
            raise ConfigError(
                f"head_dim must be a multiple of 16, at most {_MAX_HEAD_DIM}, got {head_dim}"
            )
        check_page(page_tokens)
        if offset == 0:
            self._memory.advise(pool)
        size = kv_heads * page_tokens * head_dim
        pages = pool.numel() // page_stride
        return KVLayer(
            k=pool.as_strided(
                (pages, kv_heads, head_dim, page_tokens),
                (page_stride, head_dim * page_tokens, page_tokens, 1),
                offset,
            ),
            v=pool.as_strided(
                (pages, kv_heads, page_tokens, head_dim),
                (page_stride, head_dim * page_tokens, head_dim, 1),
                offset + size,
            ),
            page_tokens=page_tokens,
        )

    def copy_pages(self, pool: Tensor, page_stride: int, pairs: Tensor) -> None:
        pairs = pairs.to(torch.int64).contiguous()
        pages = pool.numel() // page_stride
        if pairs.numel() and not 0 <= int(pairs.min()) <= int(pairs.max()) < pages:
            raise ValueError(f"page outside the pool of {pages} in {pairs.tolist()}")
        self._lib.lk_copy_pages(
            pool.data_ptr(), page_stride * pool.element_size(), pairs.data_ptr(), pairs.shape[0]
        )

    # --- sampling ------------------------------------------------------------

    def log_sum_exp(self, logits: Tensor) -> Tensor:
        rows = logit_rows(logits)
        out = torch.empty(rows, dtype=torch.float32)
        self._lib.lk_log_sum_exp(
            self._pool, logits.data_ptr(), rows, logits.shape[1], tree.VOCAB_BLOCK, out.data_ptr()
        )
        return out

    def argmax(self, logits: Tensor) -> Tensor:
        rows = logit_rows(logits)
        out = torch.empty(rows, dtype=torch.int64)
        self._lib.lk_argmax(self._pool, logits.data_ptr(), rows, logits.shape[1], out.data_ptr())
        return out

    def sample(self, logits: Tensor, batch: SampleBatch) -> Tensor:
        rows = logit_rows(logits)
        temperature = batch.temperature.to(torch.float32).contiguous()
        top_k = batch.top_k.to(torch.int32).contiguous()
        top_p = batch.top_p.to(torch.float32).contiguous()
        min_p = batch.min_p.to(torch.float32).contiguous()
        seed = batch.seed.to(torch.int64).contiguous()
        choice = batch.choice.to(torch.int32).contiguous()
        position = batch.position.to(torch.int32).contiguous()
        check_columns(rows, temperature, top_k, top_p, min_p, seed, choice, position)
        out = torch.empty(rows, dtype=torch.int64)
        self._lib.lk_sample(
            self._pool,
            logits.data_ptr(),
            rows,
            logits.shape[1],
            temperature.data_ptr(),
            top_k.data_ptr(),
            top_p.data_ptr(),
            min_p.data_ptr(),
            seed.data_ptr(),
            choice.data_ptr(),
            position.data_ptr(),
            out.data_ptr(),
        )
        return out


def _bias(bias: Tensor | None, n: int) -> tuple[int, int]:
    """Address and dtype of an optional bias."""
    if bias is None:
        return 0, 0
    return like(bias, (n,), bias.dtype, "bias").data_ptr(), code(bias)


def _residual(residual: Tensor | None, rows: int, width: int, dtype: torch.dtype) -> int:
    """Address of an optional residual."""
    return 0 if residual is None else like(residual, (rows, width), dtype, "residual").data_ptr()
