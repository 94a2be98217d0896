"""Estimators without a critic: a sample's number on every token, or the discounted return of each token."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from stages.train.algorithms.experience import Estimate, Experience
from stages.train.algorithms.returns import discounted_sums, token_rewards


class ReturnOptions(Protocol):
    """Fields of the configuration read here."""

    gamma: float


def outcome(rewards: Tensor, penalty: Tensor, experience: Experience, options: object) -> Estimate:
    """The sample's (normalised) reward on each of its tokens; the penalty has no place here (grpo, gspo, cispo, rloo)."""
    return Estimate(rewards[experience.sample_index])


def penalized_outcome(rewards: Tensor, penalty: Tensor, experience: Experience, options: object) -> Estimate:
    """The sample's reward above its group on each token, less that token's penalty (REINFORCE++-baseline, arXiv 2501.03262)."""
    return Estimate(rewards[experience.sample_index] - penalty)


def discounted_returns(rewards: Tensor, penalty: Tensor, experience: Experience, options: ReturnOptions) -> Estimate:
    """Sum of gamma^k x the token rewards that follow, the reward on the last token (REINFORCE++, arXiv 2501.03262)."""
    return Estimate(discounted_sums(token_rewards(rewards, penalty, experience), experience.sample_index, options.gamma))
