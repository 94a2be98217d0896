"""From rewards to advantages, for a whole rollout: normalise rewards, shape by KL, estimate, distil, whiten - in this order.

Composed from a table: an estimator is a function and a row. It sees rewards that are already compared with their group, if its
row in NORMALIZATIONS says so, and the KL penalty of each token. Who computes log-probs and values is the step's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from stages.plugins import load_function
from stages.train.algorithms.distillation import distil
from stages.train.algorithms.experience import Estimate, EstimatorName, Experience
from stages.train.algorithms.gae import gae
from stages.train.algorithms.group_relative import centered, leave_one_out, standardized
from stages.train.algorithms.kl import KLType, kl_estimate
from stages.train.algorithms.reinforce import discounted_returns, outcome, penalized_outcome
from stages.train.algorithms.whitening import whiten
from storage.errors import PluginError

# rewards [B], group_index [B] -> rewards [B]. An estimator without a row takes rewards as they were graded.
NORMALIZATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "grpo": standardized,
    "gspo": standardized,
    "cispo": standardized,
    "rloo": leave_one_out,
    "reinforce_plus_plus_baseline": centered,
}

# rewards [B], KL penalty [N], experience, options -> Estimate
ESTIMATORS: dict[str, Callable[[Tensor, Tensor, Experience, Any], Estimate]] = {
    "grpo": outcome,
    "gspo": outcome,
    "cispo": outcome,
    "rloo": outcome,
    "ppo": gae,
    "reinforce_plus_plus": discounted_returns,
    "reinforce_plus_plus_baseline": penalized_outcome,
}


class AdvantageOptions(Protocol):
    """The fields of the configuration that advantages depend on."""

    advantage_estimator: EstimatorName
    custom_advantage_function_path: str | None
    disable_rewards_normalization: bool
    disable_grpo_std_normalization: bool
    normalize_advantages: bool
    gamma: float
    lambd: float
    kl_coef: float
    kl_loss_type: KLType
    use_opd: bool
    opd_kl_coef: float
    use_rollout_logprobs: bool


def estimate(experience: Experience, options: AdvantageOptions) -> Estimate:
    """Advantages of all trained tokens of a rollout.

    Raises:
        PluginError: the user's estimator returned something else than a finite number per token.
    """
    if options.custom_advantage_function_path is not None:
        found = _custom(options.custom_advantage_function_path, experience, options)
    else:
        penalty, watched = _kl_penalty(experience, options)
        found = ESTIMATORS[options.advantage_estimator](_rewards(experience, options), penalty, experience, options)
        found = replace(found, metrics=found.metrics | watched)
    if options.use_opd:
        found = distil(found, experience, options)
    if options.normalize_advantages:
        found = replace(found, advantages=whiten(found.advantages))
    return found


def _rewards(experience: Experience, options: AdvantageOptions) -> Tensor:  # [B]
    name = options.advantage_estimator
    if options.disable_rewards_normalization or name not in NORMALIZATIONS:
        return experience.rewards.double()
    normalize = NORMALIZATIONS[name]
    if normalize is standardized and options.disable_grpo_std_normalization:
        normalize = centered
    return normalize(experience.rewards, experience.group_index)


def _kl_penalty(experience: Experience, options: AdvantageOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """[N] kl_coef x KL of the policy before the update to the reference, and that KL among the numbers worth watching."""
    if not options.kl_coef:
        return torch.zeros_like(experience.rollout_logprobs, dtype=torch.float64), {}
    assert experience.ref_logprobs is not None, "--kl-coef needs the reference's log-probs"
    policy = experience.policy_logprobs(options.use_rollout_logprobs)
    kl = kl_estimate(policy.double(), experience.ref_logprobs.double(), options.kl_loss_type)
    return options.kl_coef * kl, {"rollout/kl": kl}


def _custom(path: str, experience: Experience, options: AdvantageOptions) -> Estimate:
    found = load_function(path, usual_name="advantages")(experience, options)
    if isinstance(found, Tensor):
        found = Estimate(found.double())
    num_tokens = len(experience.sample_index)
    if not isinstance(found, Estimate) or found.advantages.shape != (num_tokens,) or not found.advantages.isfinite().all():
        raise PluginError(
            f"{path} returned something else than {num_tokens} finite advantages, one per trained token: "
            "return an Estimate or a tensor"
        )
    if options.advantage_estimator == "ppo" and found.returns is None:
        raise PluginError(f"{path} returned no returns, which the critic of ppo learns: return an Estimate with returns")
    return found
