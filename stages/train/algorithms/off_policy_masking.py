"""Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556): no push away from what the policy hardly says any more."""

from __future__ import annotations

import torch
from torch import Tensor

from stages.train.algorithms.sequences import SampleSums


@torch.no_grad()
def off_policy_mask(
    logprobs: Tensor,  # [n] current policy
    old_logprobs: Tensor,  # [n] before the update
    advantages: Tensor,  # [n]
    samples: SampleSums,
    *,
    delta: float,
) -> Tensor:  # [n] 0.0 where the token is left out, else 1.0
    """0 where A < 0 and the sample's mean of (log pi_old - log pi) is above `delta`."""
    drift = samples.mean(old_logprobs - logprobs)
    return 1.0 - ((advantages < 0) & (drift > delta)).to(logprobs.dtype)
