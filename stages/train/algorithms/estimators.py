"""Advantage estimators: those that compare the samples of a prompt (GRPO, Dr. GRPO, RLOO, MaxRL, GDPO,
REINFORCE++-baseline), and those from discounted returns (REINFORCE++ and, with a critic, PPO).

A group is the samples of one prompt; groups may have different sizes, and the samples may be in any order. A sample
without a reward (NaN) is excluded from its group and gets the advantage 0. Samples of a group of one, or with equal
rewards, get exactly 0: the lowest reward of the group is subtracted before the mean, because the mean of eight rewards
of 0.9 is not exactly 0.9 in floating point, and dividing by a std of 1e-16 would blow up.

The time steps of returns are the trained tokens of a sample. Tokens from tools and environments are not time steps:
they add no discount and get no reward.
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

# ---- from comparisons of a prompt's samples --------------------------------------------------------------------------


def grpo(experience: Experience, kl_penalty: Tensor, config: AlgorithmConfig) -> Estimate:
    """Assign to each token the reward of its sample, standardized within the group (GRPO, arXiv 2402.03300), or only
    centered with --disable-grpo-std-normalization (Dr. GRPO, arXiv 2503.20783)."""
    normalize = center if config.disable_grpo_std_normalization else standardize
    return Estimate(_normalized_rewards(normalize, experience, config))


def rloo(experience: Experience, kl_penalty: Tensor, config: AlgorithmConfig) -> Estimate:
    """Assign to each token the reward of its sample minus the mean reward of the group's other samples (RLOO, arXiv
    2402.14740)."""
    return Estimate(_normalized_rewards(leave_one_out, experience, config))


def maxrl(experience: Experience, kl_penalty: Tensor, config: AlgorithmConfig) -> Estimate:
    """Assign to each token the reward of its sample minus the mean of the group, divided by this mean (MaxRL, arXiv
    2602.02710)."""
    return Estimate(_normalized_rewards(divide_by_mean, experience, config))


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
    return Estimate(_normalized_rewards(center, experience, config) - kl_penalty)


def _normalized_rewards(
    normalize: Callable[[Tensor, Tensor], Tensor], experience: Experience, config: AlgorithmConfig
) -> Tensor:  # [N] float64
    """Return for each token the reward of its sample, normalized within the group unless that is disabled."""
    rewards = experience.rewards.double()
    if experience.normalize_rewards and not config.disable_rewards_normalization:
        rewards = normalize(rewards, experience.group_index)
    return rewards[experience.sample_index]


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
    """Return (r - mean of the group) / (mean of the group + 1e-6). Raises RunError if a reward is negative, so the mean
    may be close to 0 or negative."""
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


# ---- from discounted returns -----------------------------------------------------------------------------------------


def reinforce_plus_plus(experience: Experience, kl_penalty: Tensor, config: AlgorithmConfig) -> Estimate:
    """Assign to each token the discounted sum of the rewards of this and all later tokens of its sample (REINFORCE++,
    arXiv 2501.03262)."""
    rewards = token_rewards(experience, kl_penalty)
    return Estimate(discounted_cumsum(rewards, experience.sample_index, config.gamma))


def gae(experience: Experience, kl_penalty: Tensor, config: AlgorithmConfig) -> Estimate:
    """Compute generalized advantage estimates (arXiv 1506.02438): delta_t = r_t + gamma V_{t+1} - V_t with V = 0 after
    the end, A_t = sum of (gamma lambda)^k delta_{t+k}, returns A_t + V_t."""
    assert experience.values is not None, "ppo needs the critic's values"
    values, index = experience.values.double(), experience.sample_index
    next_values = torch.zeros_like(values)  # 0 for the last token of a sample
    next_values[:-1] = torch.where(index[1:] == index[:-1], values[1:], 0.0)
    delta = token_rewards(experience, kl_penalty) + config.gamma * next_values - values
    advantages = discounted_cumsum(delta, index, config.gamma * config.lambd)
    returns = advantages + values
    return Estimate(advantages, returns, {"rollout/returns": returns, "rollout/values": values})


def token_rewards(experience: Experience, kl_penalty: Tensor) -> Tensor:  # [N] float64
    """Return the reward of each token: the sample's reward for its last trained token, 0 for the others, minus the KL
    penalty of the token."""
    index = experience.sample_index
    last = torch.ones_like(index, dtype=torch.bool)
    last[:-1] = index[1:] != index[:-1]
    return torch.where(last, experience.rewards.double()[index], 0.0) - kl_penalty


def discounted_cumsum(
    values: Tensor,  # [N]
    sample_index: Tensor,  # [N] ascending
    decay: float,
) -> Tensor:  # [N]
    """Return the sum over k >= 0 of decay^k * values[t + k] within the sample of t.

    Uses doubling: after i passes each entry is the discounted sum over 2^i tokens, and the next pass adds decay^(2^i)
    times the entry 2^i tokens later. A sample of 32k tokens takes 15 passes over [N] instead of a loop with 32k steps.
    """
    sums, reach = values, 1
    longest = int(torch.bincount(sample_index).max()) if len(sample_index) else 0
    while reach < longest:
        same_sample = sample_index[reach:] == sample_index[:-reach]
        further = torch.where(same_sample, sums[reach:], 0.0) * decay**reach
        sums = torch.cat([sums[:-reach] + further, sums[-reach:]])
        reach *= 2
    return sums
