"""Whitening: advantages of a rollout with mean 0 and variance 1 over its trained tokens."""

from __future__ import annotations

from torch import Tensor

VARIANCE_EPSILON = 1e-8


def whiten(advantages: Tensor) -> Tensor:  # [N] -> [N]
    """(A - mean) / sqrt(variance + 1e-8), the variance with Bessel's correction. Equal advantages, or one, give exactly 0."""
    if not len(advantages):
        return advantages
    above = advantages - advantages.min()  # equal ones are 0 here, where their mean need not be any of them
    deviations = above - above.mean()
    variance = deviations.square().sum() / max(len(advantages) - 1, 1)
    return deviations * (variance + VARIANCE_EPSILON).rsqrt()
