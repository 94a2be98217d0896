"""Estimators of KL(policy || reference) from the log-probs of sampled tokens, after Schulman (joschu.net/blog/kl-approx)."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

KLType = Literal["k1", "k2", "k3", "low_var_kl"]
KL_TYPES = get_args(KLType)
LOW_VAR_BOUND = 10.0


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: KLType) -> Tensor:  # [N], [N] -> [N]
    """Per-token estimate with d = log pi - log pi_ref: k1 = d, k2 = d^2/2, k3 = exp(-d) - 1 + d, low_var_kl = k3 within +-10."""
    difference = logprobs - ref_logprobs
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    k3 = (-difference).exp() - 1 + difference
    return k3 if kind == "k3" else k3.clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND)
