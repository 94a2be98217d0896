"""Policy surrogates per trained token. Which tokens count, and how much, is the business of `reductions` and `corrections`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from stages.train.algorithms.experience import EstimatorName
from stages.train.algorithms.ratios import bounded_exp

# log-probs [n] with gradient, log ratio [n] with gradient, advantages [n] -> loss [n], 1.0 where the clip took effect [n]
Surrogate = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class ClipOptions(Protocol):
    """Fields of the configuration read here."""

    advantage_estimator: EstimatorName
    eps_clip: float
    eps_clip_high: float | None
    eps_clip_c: float | None


def clipped_surrogate(
    log_ratio: Tensor,  # [n] with gradient
    advantages: Tensor,  # [n]
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:  # [n] loss, [n] 1.0 where the clip took effect
    """PPO (arXiv 1707.06347): max(-ratio A, -clip(ratio, 1 - clip_low, 1 + clip_high) A).

    The clip may be asymmetric (DAPO's clip-higher, arXiv 2503.14476). With `dual_clip` c > 1 the loss of a negative advantage
    is at most -c A, however large the ratio (arXiv 1912.09729).
    """
    ratio = bounded_exp(log_ratio)
    plain = -ratio * advantages
    clipped = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = torch.maximum(plain, clipped)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    return loss, (clipped > plain).to(plain.dtype)


def clipped_weight(
    logprobs: Tensor,  # [n] with gradient
    log_ratio: Tensor,  # [n]
    advantages: Tensor,  # [n]
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:  # [n] loss, [n] 1.0 where the clip took effect
    """CISPO (arXiv 2506.13585): -sg(clip(ratio, 1 - clip_low, 1 + clip_high)) A log pi; every token keeps a gradient."""
    ratio = bounded_exp(log_ratio.detach())
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight * advantages * logprobs, (weight != ratio).to(weight.dtype)


def policy_surrogate(options: ClipOptions) -> Surrogate:
    """The surrogate of the configured estimator."""
    low = options.eps_clip
    high = options.eps_clip if options.eps_clip_high is None else options.eps_clip_high
    if options.advantage_estimator == "cispo":
        return lambda logprobs, log_ratio, advantages: clipped_weight(
            logprobs, log_ratio, advantages, clip_low=low, clip_high=high
        )
    return lambda logprobs, log_ratio, advantages: clipped_surrogate(
        log_ratio, advantages, clip_low=low, clip_high=high, dual_clip=options.eps_clip_c
    )
