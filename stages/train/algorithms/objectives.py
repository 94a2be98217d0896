"""What is minimised: from the log-probs of the trained tokens to a loss per token and the numbers worth watching.

An objective is composed once from the configuration and called per micro-batch; a new one is a function and a row in OBJECTIVES.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from stages.train.algorithms.kl import KLType, kl_estimate
from stages.train.algorithms.policy_loss import clipped_surrogate


@dataclass
class TokenStreams:
    """What is known of the N trained tokens of a micro-batch besides the current policy's log-probs."""

    advantages: Tensor  # [N]
    rollout_logprobs: Tensor  # [N] engine's, at sampling
    old_logprobs: Tensor | None = None  # [N] trainer's before the update; None = the current ones (one optimizer step a rollout)
    ref_logprobs: Tensor | None = None  # [N] the frozen reference's


class ObjectiveOptions(Protocol):
    """The fields of the configuration that an objective reads."""

    eps_clip: float
    eps_clip_high: float | None
    use_kl_loss: bool
    kl_loss_coef: float
    kl_loss_type: KLType
    entropy_coef: float


Objective = Callable[
    [Tensor, Tensor, TokenStreams], tuple[Tensor, dict[str, Tensor]]
]  # logprobs, entropy, streams -> loss [N], metrics


def policy_objective(options: ObjectiveOptions) -> Objective:
    """Clipped policy gradient, minus an entropy bonus, plus KL to a frozen reference."""
    clip_low = options.eps_clip
    clip_high = options.eps_clip if options.eps_clip_high is None else options.eps_clip_high

    def objective(logprobs: Tensor, entropy: Tensor, streams: TokenStreams) -> tuple[Tensor, dict[str, Tensor]]:
        old = logprobs.detach() if streams.old_logprobs is None else streams.old_logprobs
        surrogate, clipped = clipped_surrogate(logprobs, old, streams.advantages, clip_low=clip_low, clip_high=clip_high)
        loss = surrogate - options.entropy_coef * entropy
        metrics = {
            "train/pg_loss": surrogate,
            "train/pg_clipfrac": clipped,
            "train/ppo_kl": old - logprobs,
            "train/entropy_loss": entropy,
            "train/train_rollout_logprob_abs_diff": (old - streams.rollout_logprobs).abs(),
            "rollout/log_probs": old,
            "rollout/rollout_log_probs": streams.rollout_logprobs,
        }
        if options.use_kl_loss:
            assert streams.ref_logprobs is not None
            kl = kl_estimate(logprobs, streams.ref_logprobs, options.kl_loss_type)
            loss = loss + options.kl_loss_coef * kl
            metrics["train/kl_loss"] = kl
        return loss, metrics

    return objective


def sft_objective(options: ObjectiveOptions) -> Objective:
    """Supervised fine-tuning: the negative log-prob of every demonstrated token."""

    def objective(logprobs: Tensor, entropy: Tensor, streams: TokenStreams) -> tuple[Tensor, dict[str, Tensor]]:
        return -logprobs, {"train/entropy_loss": entropy}

    return objective


OBJECTIVES: dict[str, Callable[[ObjectiveOptions], Objective]] = {"policy_loss": policy_objective, "sft_loss": sft_objective}
