"""The two passes over logits that log-probs need: sums of the softmax forwards, its gradient backwards.

On a GPU each is one kernel (`softmax_kernels.py`), which reads the logits once and keeps nothing of their size but the gradient. What
follows here is the same in plain torch, for other devices and float64.
"""

from __future__ import annotations

import torch
from torch import Tensor


def widened(logits: Tensor, temperature: float) -> Tensor:
    """logits / temperature, in float32 at least. May be `logits` itself."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if temperature == 1.0 else wide / temperature


def softmax_sums(
    logits: Tensor,  # [t, V]
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:  # [t] each, float32 or wider
    """With x = logits / temperature: peak = max x, total = sum exp(x - peak), weighted = sum exp(x - peak) (x - peak)."""
    if _has_kernel(logits):
        from stages.train.algorithms import softmax_kernels

        return softmax_kernels.sums(logits, temperature)
    x = widened(logits, temperature)
    peak = x.amax(-1)
    x = x - peak[:, None]
    powers = x.exp()
    return peak, powers.sum(-1), x.mul_(powers).sum(-1)  # three times as fast as the einsum on a CPU


def softmax_gradient(
    logits: Tensor,  # [t, V]
    temperature: float,
    peak: Tensor,  # [t]
    flat: Tensor,  # [t]
    tilted: Tensor | None,  # [t]; None: zeros
    columns: Tensor,  # [t] int64, one place in every row
    at_columns: Tensor,  # [t] what is added there
) -> Tensor:  # [t, V] in the dtype of logits, rounded once
    """exp(x - peak) (flat + tilted (x - peak)), with x = logits / temperature, plus `at_columns`."""
    if _has_kernel(logits):
        from stages.train.algorithms import softmax_kernels

        return softmax_kernels.gradient(logits, temperature, peak, flat, tilted, columns, at_columns)
    x = widened(logits, temperature) - peak[:, None]
    if tilted is None:
        gradient = x.exp_().mul_(flat[:, None])
    else:
        gradient = x.exp() * (flat[:, None] + tilted[:, None] * x)
    return gradient.scatter_add_(-1, columns[:, None], at_columns[:, None]).to(logits.dtype)


def _has_kernel(logits: Tensor) -> bool:
    return logits.is_cuda and logits.dtype != torch.float64
