"""Policy surrogates per trained token. Which tokens count, and how much, is the business of `reductions`."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_surrogate(
    logprobs: Tensor,  # [N] current policy, with gradient
    old_logprobs: Tensor,  # [N] trainer's, before the update
    advantages: Tensor,  # [N]
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:  # [N] loss, [N] 1.0 where the clip took effect
    """PPO: max(-ratio A, -clip(ratio, 1 - clip_low, 1 + clip_high) A). The clip may be asymmetric (DAPO's clip-higher)."""
    ratio = (logprobs - old_logprobs).exp()
    plain = -ratio * advantages
    clipped = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return torch.maximum(plain, clipped), (clipped > plain).to(plain.dtype)
