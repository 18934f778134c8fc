"""Torch's own matmul, attention and softmax behind the same interface, on any device.

Values are right and bits depend on the batch: the control that the bit tests must
catch, and the yardstick for what the fixed trees cost.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from lockstep.kernels import exact, paged
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


class PlainBackend(Backend):
    """`Backend` without fixed trees. Logits are rounded to the model's dtype on a CPU."""

    name = "plain"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.kind = self.device.type

    def describe(self) -> dict[str, str]:
        return {"backend": self.name, "torch": torch.__version__}

    # --- weights -----------------------------------------------------------

    def pack(self, weight: Tensor) -> Weight:
        data = weight.detach().to(self.device).contiguous()
        return Weight(data=data, n=data.shape[0], k=data.shape[1], dtype=data.dtype)

    def pack_gated(self, gate: Tensor, up: Tensor) -> Weight:
        data = torch.cat([gate.detach(), up.detach()]).to(self.device)
        return Weight(data=data, n=data.shape[0], k=data.shape[1], dtype=data.dtype, gated=True)

    def unpack(self, weight: Weight) -> Tensor:
        return weight.data.clone()

    def pack_lora(self, pairs: Sequence[LoraPair], n: int, *, gated: bool = False) -> LoraWeight:
        return lora_ops.packed(
            pairs, n, gated, lambda a, b, begin: (a.to(self.device), b.to(self.device))
        )

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
        out = functional.linear(x, weight.data, None if bias is None else bias.to(x.dtype))
        return out if residual is None else residual + out

    def logits(self, x: Tensor, weight: Weight) -> Tensor:
        if self.kind == "cuda" and x.dtype != torch.float32:
            return torch.mm(x, weight.data.T, out_dtype=torch.float32)
        return functional.linear(x, weight.data).float()

    def gated_linear(self, x: Tensor, weight: Weight, activation: Activation) -> Tensor:
        return _gate(functional.linear(x, weight.data), activation)

    def _adapted(self, x: Tensor, weight: Weight, lora: LoraRows) -> Tensor:
        lora_ops.check_rows(lora, weight, x.shape[0])
        return lora_ops.add_deltas(
            functional.linear(x, weight.data).float(), x, lora, _float_linear
        )

    def adapted_linear(
        self,
        x: Tensor,
        weight: Weight,
        lora: LoraRows,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        acc = self._adapted(x, weight, lora)
        out = (acc if bias is None else acc + bias.float()).to(x.dtype)
        return out if residual is None else residual + out

    def adapted_gated_linear(
        self, x: Tensor, weight: Weight, lora: LoraRows, activation: Activation
    ) -> Tensor:
        return _gate(self._adapted(x, weight, lora).to(x.dtype), activation)

    def embedding(self, ids: Tensor, weight: Weight, scale: float = 1.0) -> Tensor:
        rows = functional.embedding(ids, weight.data)
        return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=rows.dtype)

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        unit_offset: bool = False,
        residual: Tensor | None = None,
    ) -> Tensor:
        values = x.float()
        values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
        if unit_offset:
            out = (values * (1.0 + weight.float())).to(x.dtype)
        else:
            out = (values.to(x.dtype).float() * weight.float()).to(x.dtype)
        return out if residual is None else residual + out

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
        return paged.write_kv(qkv, positions, rope, kv, batch, q_heads, norm, self.rms_norm)

    def attention(
        self,
        q: Tensor,
        kv: KVLayer,
        batch: AttentionBatch,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        out = torch.empty_like(q)
        starts, contexts = batch.query_start.tolist(), batch.context_len.tolist()
        for run, (begin, end, context) in enumerate(
            zip(starts[:-1], starts[1:], contexts, strict=True)
        ):
            first = context - (end - begin)
            low = 0 if window is None else max(0, first + 1 - window)
            k, v = paged.gather(kv, batch.page_table[run], low, context)
            at = torch.arange(first, context, device=q.device)[:, None]
            keys = torch.arange(low, context, device=q.device)[None]
            visible = keys <= at
            if window is not None:
                visible &= keys > at - window
            out[begin:end] = functional.scaled_dot_product_attention(
                q[begin:end].transpose(0, 1)[None],
                k.transpose(0, 1)[None],
                v.transpose(0, 1)[None],
                attn_mask=visible,
                scale=scale,
                enable_gqa=True,
            )[0].transpose(0, 1)
        return out.flatten(1)

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
        return paged.kv_layer(pool, page_stride, offset, kv_heads, head_dim, page_tokens)

    def copy_pages(self, pool: Tensor, page_stride: int, pairs: Tensor) -> None:
        paged.copy_pages(pool, page_stride, pairs)

    # --- sampling ------------------------------------------------------------

    def log_sum_exp(self, logits: Tensor) -> Tensor:
        return torch.logsumexp(logits, dim=-1)

    def argmax(self, logits: Tensor) -> Tensor:
        return exact.argmax(logits)

    def sample(self, logits: Tensor, batch: SampleBatch) -> Tensor:
        values = torch.where(torch.isnan(logits), -torch.inf, logits)
        vocab = values.shape[-1]
        temperature = batch.temperature.float()[:, None]
        z = (values - values.amax(-1, keepdim=True)) / temperature.clamp(min=1e-30)
        z, ids = torch.sort(z, dim=-1, descending=True, stable=True)
        ranks = torch.arange(vocab, device=z.device)[None]
        top_k = batch.top_k[:, None]
        keep = (ranks < torch.where(top_k > 0, top_k, vocab)) & (z > -torch.inf)
        p = torch.softmax(torch.where(keep, z, -torch.inf), dim=-1)
        top_p = batch.top_p.float()[:, None]
        keep &= (p.cumsum(-1) - p < top_p) | (top_p >= 1.0) | (ranks == 0)
        keep &= p >= batch.min_p.float()[:, None] * p[:, :1]
        seed, choice, position = (
            column.long()[:, None] for column in (batch.seed, batch.choice, batch.position)
        )
        noise = exact.gumbel(seed, choice, position, ids)
        scores = torch.where(keep, z + noise, -torch.inf)
        drawn = ids.gather(-1, scores.argmax(-1, keepdim=True))[:, 0]
        return torch.where(batch.temperature > 0, drawn, self.argmax(logits))


def _gate(both: Tensor, activation: Activation) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    if activation == "silu":
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate="tanh") * up


def _float_linear(x: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(x, weight).float()
