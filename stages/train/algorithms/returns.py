"""Rewards in time: on which token a sample's reward falls, and sums of what follows a token.

Time runs over the trained tokens of a sample, which are its actions. Tokens of tools and environments are no steps: nothing is
discounted for them and no reward falls on them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stages.train.algorithms.experience import Experience


def token_rewards(
    rewards: Tensor,  # [B]
    penalty: Tensor,  # [N] taken from the reward of each token
    experience: Experience,
) -> Tensor:  # [N] float64
    """-penalty on every token, and the sample's reward on its last one."""
    index = experience.sample_index
    last = torch.ones_like(index, dtype=torch.bool)
    last[:-1] = index[1:] != index[:-1]
    return torch.where(last, rewards[index], 0.0) - penalty


def discounted_sums(
    values: Tensor,  # [N]
    sample_index: Tensor,  # [N] ascending
    decay: float,
) -> Tensor:  # [N]
    """sum over k >= 0 of decay^k x values[t + k], as far as the sample of t goes.

    By doubling: once a token holds the sum of its next 2^i tokens, adding the sum that stands 2^i further makes it 2^(i+1). So
    a sample of 32k tokens takes 15 passes over [N], where a loop takes 32k.
    """
    sums, reach = values, 1
    longest = int(torch.bincount(sample_index).max()) if len(sample_index) else 0
    while reach < longest:
        same = sample_index[reach:] == sample_index[:-reach]
        further = torch.where(same, sums[reach:], 0.0) * decay**reach
        sums = torch.cat([sums[:-reach] + further, sums[-reach:]])
        reach *= 2
    return sums


def following(values: Tensor, sample_index: Tensor) -> Tensor:  # [N], [N] -> [N]
    """The value at the next token of the same sample, 0 after the last."""
    shifted = torch.zeros_like(values)
    shifted[:-1] = torch.where(sample_index[1:] == sample_index[:-1], values[1:], 0.0)
    return shifted
