"""RMSNorm for Megatron layers without TransformerEngine, and RMSNorm of query and key heads together with RoPE.

Megatron-core's own torch norm does not support sequence parallelism, where each tensor-parallel rank normalizes only
its part of the tokens. This norm does, by an attribute: `weight.sequence_parallel = True` makes Megatron all-reduce
the weight's gradient over the tensor-parallel ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.engines.megatron.model.rotary import apply_rope


class RMSNorm(nn.Module):
    """Computes x / rms(x) * weight over the last dimension, where rms(x) = sqrt(mean(x^2) + eps) in fp32."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            from penstock.engines.megatron.kernels.norm import normalize_and_rotate

            return normalize_and_rotate(x.reshape(-1, 1, x.shape[-1]), self.weight, self.eps).view(x.shape)
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class HeadNorm(RMSNorm):
    """The norm of query or key heads. Megatron's attention layer calls it before RoPE; to compute both with one kernel,
    this call returns the heads unchanged, and `CoreAttention` calls `normalize_and_rotate`."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def normalize_and_rotate(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
        """Return RoPE(x / rms(x) * weight). [t, heads, head_dim]; arguments as of `apply_rope`"""
        if x.is_cuda and cos_sin[0].shape[-1] == x.shape[-1]:
            from penstock.engines.megatron.kernels import norm

            return norm.normalize_and_rotate(x, self.weight, self.eps, cos_sin, interleaved)
        return apply_rope(super().forward(x), cos_sin, interleaved)
