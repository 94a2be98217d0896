"""Estimators of KL(policy || reference) from the log-probs of sampled tokens, after Schulman (joschu.net/blog/kl-approx)."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from stages.train.algorithms.ratios import bounded_exp

KLType = Literal["k1", "k2", "k3", "low_var_kl"]
KL_TYPES = get_args(KLType)
LOW_VAR_BOUND = 10.0


def kl_estimate(
    logprobs: Tensor,  # [N] of the policy
    ref_logprobs: Tensor,  # [N] of the reference
    kind: KLType,
    ratio: Tensor | None = None,  # [N] pi / pi_old, with gradient
) -> Tensor:  # [N]
    """Per token, with d = log pi - log pi_ref: k1 = d, k2 = d^2/2, k3 = exp(-d) - 1 + d, low_var_kl = k3 within +-10.

    `ratio` corrects for the tokens' having been sampled by the policy before the update, which also makes the gradient of k3
    that of the KL (DeepSeek-V3.2, arXiv 2512.02556). It multiplies before low_var_kl is bounded.
    """
    difference = logprobs - ref_logprobs
    if kind == "k1":
        estimate = difference
    elif kind == "k2":
        estimate = difference.square() / 2
    else:
        estimate = bounded_exp(-difference) - 1 + difference
    if ratio is not None:
        estimate = ratio * estimate
    return estimate.clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND) if kind == "low_var_kl" else estimate
