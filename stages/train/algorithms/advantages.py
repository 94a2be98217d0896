"""From rewards to advantages. One number per sample; which samples belong together is an argument, never a reshape."""

from __future__ import annotations

import torch
from torch import Tensor

STD_EPSILON = 1e-6


def grpo_advantages(
    rewards: Tensor,  # [B] one per sample; NaN = was not graded
    group_index: Tensor,  # [B] which prompt, 0 .. num_groups-1, in any order
    *,
    normalize_std: bool = True,
) -> Tensor:  # [B] float32
    """Group-relative advantages: (r - mean of the group) / (unbiased std of the group + 1e-6).

    Groups may have any size; a group of one gives 0. Samples without a reward take no part in their group's mean and get 0.
    All in float64: in float32 eight rewards of 0.9 leave a tiny remainder after the mean, which the 1e-6 then blows up.
    """
    graded = ~rewards.isnan()
    values = torch.where(graded, rewards, 0.0).double()
    num_groups = int(group_index.max()) + 1 if len(group_index) else 0
    counts = _group_sum(graded.double(), group_index, num_groups)
    means = _group_sum(values, group_index, num_groups) / counts.clamp(min=1)
    centered = torch.where(graded, values - means[group_index], 0.0)
    if normalize_std:
        variance = _group_sum(centered.square(), group_index, num_groups) / (counts - 1).clamp(min=1)
        centered = centered / (variance.sqrt()[group_index] + STD_EPSILON)
    return torch.where(counts[group_index] > 1, centered, 0.0).float()


def _group_sum(values: Tensor, group_index: Tensor, num_groups: int) -> Tensor:
    return values.new_zeros(num_groups).index_add_(0, group_index, values)


# One row per estimator: rewards and groups in, one advantage per sample out.
ESTIMATORS = {"grpo": grpo_advantages}
