"""`TritonBackend`: the contract's operations on one NVIDIA GPU, in Triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from lockstep.config import ConfigError
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
from lockstep.kernels.cuda import attention as attention_ops
from lockstep.kernels.cuda import linear as linear_ops
from lockstep.kernels.cuda import lora as lora_ops
from lockstep.kernels.cuda import norm as norm_ops
from lockstep.kernels.cuda import pages, sampling
from lockstep.kernels.cuda import rope as rope_ops
from lockstep.kernels.cuda.common import INTERPRETED

_DTYPES = (torch.float32, torch.bfloat16)
_CAPABILITY = (8, 0)


class TritonBackend(Backend):
    """`Backend` over the Triton kernels. Reads no device value on the host, so every
    operation can be captured in a CUDA graph once it has been compiled for its shapes.

    Raises:
        ConfigError: no CUDA device (or the CPU without Triton's interpreter), or one
            older than compute capability 8.0 (no bfloat16 tensor cores).
    """

    name = "triton"
    kind = "cuda"

    def __init__(self, device: str | torch.device) -> None:
        self.device = torch.device(device)
        if self.device.type == "cpu" and INTERPRETED:
            return
        if self.device.type != "cuda" or not torch.cuda.is_available():
            raise ConfigError(f"the Triton backend needs a CUDA device, got {self.device}")
        capability = torch.cuda.get_device_capability(self.device)
        if capability < _CAPABILITY:
            raise ConfigError(
                f"{torch.cuda.get_device_name(self.device)} has compute capability "
                f"{capability[0]}.{capability[1]}; the kernels need {_CAPABILITY[0]}.0"
            )

    def describe(self) -> dict[str, str]:
        parts = {"backend": self.name, "triton": triton.__version__, "torch": torch.__version__}
        if self.device.type != "cuda":
            return {**parts, "device": "Triton's interpreter"}
        major, minor = torch.cuda.get_device_capability(self.device)
        return {
            **parts,
            "device": torch.cuda.get_device_name(self.device),
            "capability": f"{major}.{minor}",
        }

    # --- weights -----------------------------------------------------------

    def pack(self, weight: Tensor) -> Weight:
        """Rows as they are, [N, K] contiguous on the device."""
        n, k = weight.shape
        return Weight(data=self._place(weight), n=n, k=k, dtype=weight.dtype)

    def pack_gated(self, gate: Tensor, up: Tensor) -> Weight:
        """Gate and up rows in turn: [2F, K] contiguous on the device."""
        if gate.shape != up.shape or gate.dtype != up.dtype:
            raise ValueError(f"gate {tuple(gate.shape)} and up {tuple(up.shape)} must match")
        f, k = gate.shape
        data = torch.empty(2 * f, k, dtype=gate.dtype, device=self.device)
        data[0::2].copy_(gate.detach())
        data[1::2].copy_(up.detach())
        return Weight(data=data, n=2 * f, k=k, dtype=self._dtype(gate), gated=True)

    def _place(self, weight: Tensor) -> Tensor:
        self._dtype(weight)
        return weight.detach().to(self.device).contiguous()

    @staticmethod
    def _dtype(tensor: Tensor) -> torch.dtype:
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"expected float32 or bfloat16, got {tensor.dtype}")
        return tensor.dtype

    def unpack(self, weight: Weight) -> Tensor:
        if weight.gated:
            return torch.cat([weight.data[0::2], weight.data[1::2]])
        return weight.data

    def pack_lora(self, pairs: Sequence[LoraPair], n: int, *, gated: bool = False) -> LoraWeight:
        return lora_ops.pack_lora(pairs, n, gated, self.device)

    def lora_set(self, weights: Sequence[LoraWeight | None]) -> LoraSet:
        return lora_ops.lora_set(weights, self.device)

    # --- layers ------------------------------------------------------------

    def linear(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        return linear_ops.linear(x, weight, bias, residual)

    def logits(self, x: Tensor, weight: Weight) -> Tensor:
        return linear_ops.logits(x, weight)

    def gated_linear(self, x: Tensor, weight: Weight, activation: Activation) -> Tensor:
        return linear_ops.gated_linear(x, weight, activation)

    def adapted_linear(
        self,
        x: Tensor,
        weight: Weight,
        lora: LoraRows,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        return lora_ops.adapted_linear(x, weight, lora, bias, residual)

    def adapted_gated_linear(
        self, x: Tensor, weight: Weight, lora: LoraRows, activation: Activation
    ) -> Tensor:
        return lora_ops.adapted_gated_linear(x, weight, lora, activation)

    def embedding(self, ids: Tensor, weight: Weight, scale: float = 1.0) -> Tensor:
        if weight.gated:
            raise ValueError("a gated pair is not a table of embeddings")
        rounded = float(torch.tensor(scale, dtype=weight.dtype))
        return norm_ops.embedding(ids, weight.data, rounded)

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        unit_offset: bool = False,
        residual: Tensor | None = None,
    ) -> Tensor:
        return norm_ops.rms_norm(x, weight, eps, unit_offset, residual)

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
        return rope_ops.write_kv(qkv, positions, rope, kv, batch, q_heads, norm)

    def attention(
        self,
        q: Tensor,
        kv: KVLayer,
        batch: AttentionBatch,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        return attention_ops.attention(q, kv, batch, scale, window)

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
        return pages.kv_layer(pool, page_stride, offset, kv_heads, head_dim, page_tokens)

    def copy_pages(self, pool: Tensor, page_stride: int, pairs: Tensor) -> None:
        pages.copy_pages(pool, page_stride, pairs.to(self.device))

    # --- sampling ------------------------------------------------------------

    def log_sum_exp(self, logits: Tensor) -> Tensor:
        return sampling.log_sum_exp(logits)

    def argmax(self, logits: Tensor) -> Tensor:
        return sampling.argmax(logits)

    def sample(self, logits: Tensor, batch: SampleBatch) -> Tensor:
        return sampling.sample(logits, batch)
