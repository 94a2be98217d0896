"""Baselines from the other samples of the same prompt. One number per sample; which belong together is an argument, no reshape.

Groups may have any size and any order. A sample that was not graded (NaN) takes no part in its group and gets 0; a group of one
gives 0, and so does a group of equal rewards: exactly, because deviations are taken from the group's lowest reward first. (The
mean of eight rewards of 0.9 is not 0.9, in float64 neither, and a standard deviation of 1e-16 is a poor divisor.)
"""

from __future__ import annotations

import torch
from torch import Tensor

STD_EPSILON = 1e-6


def centered(
    rewards: Tensor,  # [B] float64; NaN = not graded
    group_index: Tensor,  # [B] which prompt, 0 .. num_groups-1, in any order
) -> Tensor:  # [B] float64
    """Reward minus the mean of its group (Dr. GRPO, arXiv 2503.20783)."""
    return _deviations(rewards, group_index)[0]


def standardized(rewards: Tensor, group_index: Tensor) -> Tensor:  # [B], [B] -> [B] float64
    """(r - mean of the group) / (unbiased standard deviation of the group + 1e-6), after GRPO (arXiv 2402.03300)."""
    deviations, counts = _deviations(rewards, group_index)
    variance = _group_sum(deviations.square(), group_index)[group_index] / (counts - 1).clamp(min=1)
    return deviations / (variance.sqrt() + STD_EPSILON)


def leave_one_out(rewards: Tensor, group_index: Tensor) -> Tensor:  # [B], [B] -> [B] float64
    """Reward minus the mean of the others of its group (RLOO, arXiv 2402.14740): n / (n - 1) times the deviation."""
    deviations, counts = _deviations(rewards, group_index)
    return deviations * counts / (counts - 1).clamp(min=1)


def _deviations(rewards: Tensor, group_index: Tensor) -> tuple[Tensor, Tensor]:
    """[B] reward minus the mean of its group, 0 where not graded; [B] how many of its group were graded."""
    rewards = rewards.double()
    graded = ~rewards.isnan()
    lowest = rewards.new_full((_num_groups(group_index),), torch.inf)
    lowest.scatter_reduce_(0, group_index, torch.where(graded, rewards, torch.inf), "amin")
    above = torch.where(graded, rewards - lowest[group_index], 0.0)
    counts = _group_sum(graded.double(), group_index)[group_index]
    means = _group_sum(above, group_index)[group_index] / counts.clamp(min=1)
    return torch.where(graded, above - means, 0.0), counts


def _group_sum(values: Tensor, group_index: Tensor) -> Tensor:  # [B], [B] -> [num_groups]
    return values.new_zeros(_num_groups(group_index)).index_add_(0, group_index, values)


def _num_groups(group_index: Tensor) -> int:
    return int(group_index.max()) + 1 if len(group_index) else 0
