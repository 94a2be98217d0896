"""RMSNorm for Megatron layers without TransformerEngine.

Megatron-core's own torch norm does not support sequence parallelism, where each tensor-parallel rank normalizes only
its part of the tokens. This norm does, by an attribute: `weight.sequence_parallel = True` makes Megatron all-reduce
the weight's gradient over the tensor-parallel ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Computes x / rms(x) * weight over the last dimension, where rms(x) = sqrt(mean(x^2) + eps) in fp32."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
