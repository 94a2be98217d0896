"""Estimators that compare the samples of a prompt: GRPO, Dr. GRPO, RLOO, MaxRL, GDPO, REINFORCE++-baseline.

A group is the samples of one prompt; groups may have different sizes, and the samples may be in any order. A sample
without a reward (NaN) is excluded from its group and gets the advantage 0. Samples of a group of one, or with equal
rewards, get exactly 0: the lowest reward of the group is subtracted before the mean, because the mean of eight rewards
of 0.9 is not exactly 0.9 in floating point, and dividing by a std of 1e-16 would blow up.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.stages.train.algorithm_config import AlgorithmConfig
from penstock.stages.train.algorithms.advantages import whiten
from penstock.stages.train.algorithms.experience import Estimate, Experience
from penstock.storage.errors import RunError

STD_EPSILON = 1e-6  # also added to the mean that MaxRL divides by


def grpo(experience: Experience, kl_penalty: Tensor, config: AlgorithmConfig) -> Estimate:
    """Assign to each token the reward of its sample, standardized within the group (GRPO, arXiv 2402.03300), or only
    centered with --disable-grpo-std-normalization (Dr. GRPO, arXiv 2503.20783)."""
    normalize = center if config.disable_grpo_std_normalization else standardize
    return Estimate(_normalize_rewards(normalize, experience, config)[experience.sample_index])


def rloo(experience: Experience, kl_penalty: Tensor, config: AlgorithmConfig) -> Estimate:
    """Assign to each token the reward of its sample minus the mean reward of the group's other samples (RLOO, arXiv
    2402.14740)."""
    return Estimate(_normalize_rewards(leave_one_out, experience, config)[experience.sample_index])


def maxrl(experience: Experience, kl_penalty: Tensor, config: AlgorithmConfig) -> Estimate:
    """Assign to each token the reward of its sample minus the mean of the group, divided by this mean (MaxRL, arXiv
    2602.02710)."""
    return Estimate(_normalize_rewards(divide_by_mean, experience, config)[experience.sample_index])


def gdpo(experience: Experience, kl_penalty: Tensor, config: AlgorithmConfig) -> Estimate:
    """Assign to each token the weighted sum of the reward components of its sample, each standardized within the group;
    the sums are then whitened over all samples with a reward (GDPO, arXiv 2601.05242, Eq. 4, 7 and 6)."""
    normalize = center if config.disable_grpo_std_normalization else standardize
    sums = torch.zeros_like(experience.rewards, dtype=torch.float64)
    for name, weight in sorted(config.gdpo_reward_weights.items()):
        sums += weight * normalize(experience.reward_components[name], experience.group_index)
    graded = ~experience.rewards.isnan()
    sums[graded] = whiten(sums[graded])
    return Estimate(sums[experience.sample_index])


def reinforce_plus_plus_baseline(experience: Experience, kl_penalty: Tensor, config: AlgorithmConfig) -> Estimate:
    """Assign to each token the reward of its sample minus the mean of the group, minus the KL penalty of the token
    (REINFORCE++-baseline, arXiv 2501.03262)."""
    return Estimate(_normalize_rewards(center, experience, config)[experience.sample_index] - kl_penalty)


def _normalize_rewards(
    normalize: Callable[[Tensor, Tensor], Tensor], experience: Experience, config: AlgorithmConfig
) -> Tensor:  # [B] float64
    if config.disable_rewards_normalization or not experience.normalize_rewards:
        return experience.rewards.double()
    return normalize(experience.rewards, experience.group_index)


def center(
    rewards: Tensor,  # [B] float64; NaN = not graded
    group_index: Tensor,  # [B] prompt of each sample, 0 .. num_groups-1, in any order
) -> Tensor:  # [B] float64
    """Return each reward minus the mean of its group, or 0 for a sample without a reward."""
    return _deviations(rewards, group_index)[0]


def standardize(rewards: Tensor, group_index: Tensor) -> Tensor:  # [B], [B] -> [B] float64
    """Return (r - mean of the group) / (unbiased standard deviation of the group + 1e-6)."""
    deviations, counts = _deviations(rewards, group_index)
    variance = _sum_over_group(deviations.square(), group_index) / (counts - 1).clamp(min=1)
    return deviations / (variance.sqrt() + STD_EPSILON)


def leave_one_out(rewards: Tensor, group_index: Tensor) -> Tensor:  # [B], [B] -> [B] float64
    """Return each reward minus the mean of the group's other samples, which is n / (n - 1) x (reward - group mean)."""
    deviations, counts = _deviations(rewards, group_index)
    return deviations * counts / (counts - 1).clamp(min=1)


def divide_by_mean(rewards: Tensor, group_index: Tensor) -> Tensor:  # [B], [B] -> [B] float64
    """Return (r - mean of the group) / (mean of the group + 1e-6).

    Raises:
        RunError: a reward is negative, so the mean may be close to 0 or negative.
    """
    if (rewards < 0).any():
        raise RunError(
            f"a sample has the reward {rewards[rewards < 0][0]:g}, but --advantage-estimator maxrl divides by the mean "
            "reward of a prompt's samples: start a new run with a reward of 0 or more, or with another estimator"
        )
    deviations, counts = _deviations(rewards, group_index)
    means = _sum_over_group(rewards.double().nan_to_num(), group_index) / counts.clamp(min=1)
    return deviations / (means + STD_EPSILON)


def _deviations(rewards: Tensor, group_index: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each sample [B] its reward minus the mean of its group (0 without a reward), and the number of samples
    with a reward in its group."""
    rewards = rewards.double()
    graded = ~rewards.isnan()
    num_groups = int(group_index.max()) + 1 if len(group_index) else 0
    lowest = rewards.new_full((num_groups,), torch.inf)
    lowest.scatter_reduce_(0, group_index, torch.where(graded, rewards, torch.inf), "amin")
    above = torch.where(graded, rewards - lowest[group_index], 0.0)
    counts = _sum_over_group(graded.double(), group_index)
    means = _sum_over_group(above, group_index) / counts.clamp(min=1)
    return torch.where(graded, above - means, 0.0), counts


def _sum_over_group(values: Tensor, group_index: Tensor) -> Tensor:  # [B], [B] -> [B]
    """Return, for each sample, the sum of `values` over its group."""
    num_groups = int(group_index.max()) + 1 if len(group_index) else 0
    return values.new_zeros(num_groups).index_add_(0, group_index, values)[group_index]
