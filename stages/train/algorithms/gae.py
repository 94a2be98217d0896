"""Generalized advantage estimation (Schulman et al., arXiv 1506.02438), for PPO with a critic."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from stages.train.algorithms.experience import Estimate, Experience
from stages.train.algorithms.returns import discounted_sums, following, token_rewards


class GAEOptions(Protocol):
    """Fields of the configuration read here."""

    gamma: float
    lambd: float


def gae(
    rewards: Tensor,  # [B] as graded
    penalty: Tensor,  # [N] kl_coef x kl
    experience: Experience,  # with values
    options: GAEOptions,
) -> Estimate:
    """delta_t = r_t + gamma V_{t+1} - V_t, V = 0 after the end; A_t = sum of (gamma lambd)^k delta_{t+k}; returns A_t + V_t."""
    assert experience.values is not None, "ppo needs the critic's values"
    values, index = experience.values.double(), experience.sample_index
    delta = token_rewards(rewards, penalty, experience) + options.gamma * following(values, index) - values
    advantages = discounted_sums(delta, index, options.gamma * options.lambd)
    returns = advantages + values
    return Estimate(advantages, returns, {"rollout/returns": returns, "rollout/values": values})
