"""What is minimised: from the log-probs of the trained tokens to a loss per token and the numbers worth watching.

An objective is composed once from the configuration and called per micro-batch; a new one is a function and a row in
OBJECTIVES. Means are the step's business: every number here is one of [n] tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from stages.plugins import load_function
from stages.train.algorithms.corrections import CorrectionOptions, correction
from stages.train.algorithms.kl import KLType, kl_estimate
from stages.train.algorithms.off_policy_masking import off_policy_mask
from stages.train.algorithms.policy_loss import ClipOptions, policy_surrogate
from stages.train.algorithms.ratios import LOG_RATIOS, bounded_exp, token_log_ratio
from stages.train.algorithms.sequences import SampleSums
from stages.train.algorithms.streams import TokenStreams
from stages.train.algorithms.value_loss import value_objective
from storage.errors import PluginError

__all__ = ["OBJECTIVES", "Objective", "ObjectiveOptions", "TokenStreams", "policy_objective", "value_objective"]


class ObjectiveOptions(ClipOptions, CorrectionOptions, Protocol):
    """The fields of the configuration that an objective reads."""

    custom_loss_function_path: str | None
    use_rollout_logprobs: bool
    use_opsm: bool
    opsm_delta: float
    use_kl_loss: bool
    kl_loss_coef: float
    kl_loss_type: KLType
    use_unbiased_kl: bool
    entropy_coef: float


# log-probs [n] with gradient, entropy [n], streams, samples -> loss [n], metrics [n] each
Objective = Callable[[Tensor, Tensor, TokenStreams, SampleSums], tuple[Tensor, dict[str, Tensor]]]


def policy_objective(options: ObjectiveOptions) -> Objective:
    """Policy gradient, weighed by how far it is to be trusted, minus an entropy bonus, plus KL to a frozen reference."""
    log_ratio_of = LOG_RATIOS.get(options.advantage_estimator, token_log_ratio)
    surrogate, trust, kl_of = policy_surrogate(options), _trust(options), _kl_to_reference(options)
    engine_only = options.use_rollout_logprobs  # then the gap to the engine is watched with the current log-probs

    def objective(
        logprobs: Tensor, entropy: Tensor, streams: TokenStreams, samples: SampleSums
    ) -> tuple[Tensor, dict[str, Tensor]]:
        trainers = logprobs.detach() if engine_only or streams.old_logprobs is None else streams.old_logprobs
        old = streams.rollout_logprobs if engine_only else trainers
        log_ratio = log_ratio_of(logprobs, old, samples)

        policy, clipped = surrogate(logprobs, log_ratio, streams.advantages)
        weights, mask, watched = trust(logprobs, old, trainers, streams, samples)
        policy = policy * weights * mask
        loss = policy
        if options.entropy_coef:
            loss = loss - options.entropy_coef * entropy * mask
        if kl_of is not None:
            kl, reference = kl_of(logprobs, old, streams)
            loss = loss + options.kl_loss_coef * kl * mask if options.kl_loss_coef else loss
            watched |= {"train/kl_loss": kl, "rollout/ref_log_probs": reference}
        return loss, watched | {
            "train/pg_loss": policy,
            "train/pg_clipfrac": clipped,
            "train/ppo_kl": -log_ratio,
            "train/ois": bounded_exp(log_ratio),
            "train/entropy_loss": entropy,
            "train/train_rollout_logprob_abs_diff": (trainers - streams.rollout_logprobs).abs(),
            "rollout/log_probs": trainers,
            "rollout/rollout_log_probs": streams.rollout_logprobs,
        }

    return objective


# log-probs, old log-probs, trainer's old log-probs [n] each, streams, samples
# -> weights [n] of the policy gradient, mask [n] of the whole loss, metrics [n] each
Trust = Callable[[Tensor, Tensor, Tensor, TokenStreams, SampleSums], tuple[Tensor, Tensor, dict[str, Tensor]]]


def _trust(options: ObjectiveOptions) -> Trust:
    """Sequence masking, the correction of the engine's log-probs, and a custom reducer's scale, as one weight per token."""
    correct = correction(options)

    def trust(
        logprobs: Tensor, old: Tensor, trainers: Tensor, streams: TokenStreams, samples: SampleSums
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        weights = mask = torch.ones_like(old)
        metrics = {}
        if options.use_opsm:
            kept = off_policy_mask(logprobs, old, streams.advantages, samples, delta=options.opsm_delta)
            weights, metrics["train/opsm_clipfrac"] = weights * kept, 1.0 - kept
        if correct is not None:
            corrected, unrejected, watched = correct(trainers, streams.rollout_logprobs, samples)
            metrics |= {f"train/{name}": values for name, values in watched.items()}
            if options.use_tis:  # otherwise --get-mismatch-metrics, which measures and changes nothing
                weights, mask = weights * corrected, mask if unrejected is None else unrejected
        return weights if streams.pg_scale is None else weights * streams.pg_scale, mask, metrics

    return trust


def _kl_to_reference(options: ObjectiveOptions) -> Callable[[Tensor, Tensor, TokenStreams], tuple[Tensor, Tensor]] | None:
    if not options.use_kl_loss:
        return None

    def kl_of(logprobs: Tensor, old: Tensor, streams: TokenStreams) -> tuple[Tensor, Tensor]:  # [n] KL, [n] reference
        assert streams.ref_logprobs is not None, "--use-kl-loss needs the reference's log-probs"
        ratio = bounded_exp(logprobs - old) if options.use_unbiased_kl else None
        return kl_estimate(logprobs, streams.ref_logprobs, options.kl_loss_type, ratio), streams.ref_logprobs

    return kl_of


def sft_objective(options: ObjectiveOptions) -> Objective:
    """Supervised fine-tuning: the negative log-prob of every demonstrated token."""

    def objective(
        logprobs: Tensor, entropy: Tensor, streams: TokenStreams, samples: SampleSums
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return -logprobs, {"train/entropy_loss": entropy}

    return objective


def custom_objective(options: ObjectiveOptions) -> Objective:
    """The user's: f(logprobs, entropy, streams, samples, options) -> loss [n], metrics [n] each."""
    path = options.custom_loss_function_path
    assert path is not None, "--loss-type custom_loss needs --custom-loss-function-path"
    function = load_function(path, usual_name="loss")

    def objective(
        logprobs: Tensor, entropy: Tensor, streams: TokenStreams, samples: SampleSums
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = function(logprobs, entropy, streams, samples, options)
        for name, found in {"a loss": loss, **metrics}.items():
            if found.shape != logprobs.shape:
                raise PluginError(
                    f"{path} returned {name} of shape {list(found.shape)}: return one number for each of {len(logprobs)} tokens"
                )
        return loss, {name if "/" in name else f"train/{name}": found for name, found in metrics.items()}

    return objective


OBJECTIVES: dict[str, Callable[[ObjectiveOptions], Objective]] = {
    "policy_loss": policy_objective,
    "sft_loss": sft_objective,
    "custom_loss": custom_objective,
}
