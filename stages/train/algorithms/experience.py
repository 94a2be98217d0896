"""Inputs of advantage estimators (`Experience`, a whole rollout) and of losses (`TokenFields`, a micro-batch).

`step.py` fills these records. Estimators get the whole rollout, so their results do not depend on ranks or
micro-batches. Losses get the trained tokens on this rank; only `SegmentReducer` communicates, if context parallelism
splits samples over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Experience:
    """A rollout before the update: B samples, N trained tokens ordered by sample and position, equal on every rank."""

    sample_index: Tensor  # [N] int64, sample of each trained token, ascending
    rewards: Tensor  # [B] float64; NaN = not graded (such a sample has no trained tokens)
    group_index: Tensor  # [B] int64, group (prompt) of each sample
    rollout_logprobs: Tensor  # [N] float64, log-probs of the inference engine at sampling
    old_logprobs: Tensor | None = None  # [N] log-probs of the policy before the update, from the trainer
    ref_logprobs: Tensor | None = None  # [N] log-probs of the frozen reference
    teacher_logprobs: Tensor | None = None  # [N] log-probs of the teacher, for distillation
    values: Tensor | None = None  # [N] values of the critic before its update
    reward_components: dict[str, Tensor] = field(default_factory=dict)  # [B] float64 each: --gdpo-reward-weights
    trajectory_index: Tensor | None = None  # [B] int64, trajectory (agent execution) of each sample
    normalize_rewards: bool = True  # False: a user-defined function of the rollout has set the rewards (TRAIN_REWARD)

    def policy_logprobs(self, use_rollout_logprobs: bool) -> Tensor:  # [N]
        """Return the old log-probs (of the policy before the update), computed by the engine with
        --use-rollout-logprobs, otherwise by the trainer."""
        if use_rollout_logprobs:
            return self.rollout_logprobs
        assert self.old_logprobs is not None, "the log-probs before the update were not computed"
        return self.old_logprobs


@dataclass
class Estimate:
    """Advantages of the N trained tokens of a rollout."""

    advantages: Tensor  # [N] float64
    returns: Tensor | None = None  # [N] float64, the critic's target (ppo only)
    metrics: dict[str, Tensor] = field(default_factory=dict)  # metric -> [N], averaged with the loss weights


@dataclass
class TokenFields:
    """Inputs of a loss besides the model's output, for the n trained tokens of a micro-batch; float32 on the device."""

    advantages: Tensor  # [n]
    rollout_logprobs: Tensor  # [n] log-probs of the inference engine at sampling
    old_logprobs: Tensor | None = None  # [n] log-probs before the update, from the trainer; None = use current ones
    ref_logprobs: Tensor | None = None  # [n] log-probs of the frozen reference
    returns: Tensor | None = None  # [n] targets of the critic
    values: Tensor | None = None  # [n] values of the critic before its update
    pg_scale: Tensor | None = None  # [n] weight in the policy-gradient loss / weight in the other terms
    divergence: Tensor | None = None  # [n] from the teacher, with gradient (--opd-divergence)


@dataclass(frozen=True)
class SegmentReducer:
    """Computes sums and means over the trained tokens of each sample, for a micro-batch with S samples and n trained
    tokens on this rank. Collective over `group`.

    Sums are computed in float64: the rounding to float32 then hides differences from the order of summation, which
    depends on the parallel layout.
    """

    index: Tensor  # [n] int64, sample of each token, 0 .. S-1
    num_tokens: Tensor  # [S] number of trained tokens of each sample, over all ranks
    group: dist.ProcessGroup | None = None  # context-parallel ranks with the other tokens of these samples

    def total(self, values: Tensor) -> Tensor:  # [n] -> [S] float64
        """Return the sum over all trained tokens of each sample, all-reduced over `group`; differentiable."""
        sums = values.new_zeros(len(self.num_tokens), dtype=torch.float64).index_add(0, self.index, values.double())
        return sums if self.group is None else _AllReduceSum.apply(sums, self.group)

    def mean(self, values: Tensor) -> Tensor:  # [n] -> [n]
        """Return, for each token, the mean over all trained tokens of its sample; differentiable."""
        return self.at_tokens(self.total(values) / self.num_tokens.clamp(min=1)).to(values.dtype)

    def at_tokens(self, per_sample: Tensor) -> Tensor:  # [S] -> [n]
        """Return, for each token, the entry of `per_sample` that belongs to the token's sample."""
        return per_sample[self.index]


class _AllReduceSum(torch.autograd.Function):
    """All-reduce sum in the forward and in the backward pass: the loss of every rank depends on the values of all
    ranks, so the gradients are summed over the ranks, too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        values = values.clone()
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None
