"""Estimators from discounted returns: REINFORCE++ and, with a critic, generalized advantage estimation (PPO).

The time steps are the trained tokens of a sample. Tokens from tools and environments are not time steps: they add no
discount and get no reward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.stages.train.algorithm_config import AlgorithmConfig
from penstock.stages.train.algorithms.experience import Estimate, Experience


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
    delta = token_rewards(experience, kl_penalty) + config.gamma * next_values(values, index) - values
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


def next_values(values: Tensor, sample_index: Tensor) -> Tensor:  # [N], [N] -> [N]
    """Return, for each token, the value of the next token of the same sample, or 0 for the last token."""
    shifted = torch.zeros_like(values)
    shifted[:-1] = torch.where(sample_index[1:] == sample_index[:-1], values[1:], 0.0)
    return shifted
