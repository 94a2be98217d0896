"""Sums over the trained tokens of one sample, also where context parallelism has spread them over ranks.

The only place where a loss meets a process group. Sums are taken in float64, so that their order, and with it the layout, is
lost in the rounding to float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class SampleSums:
    """The S samples of a micro-batch, of whose trained tokens n are here."""

    index: Tensor  # [n] int64, which sample of the micro-batch, 0 .. S-1
    num_tokens: Tensor  # [S] trained tokens of each sample, over all ranks
    group: dist.ProcessGroup | None = None  # ranks that hold the other tokens of the same samples; all make the same calls

    def total(self, values: Tensor) -> Tensor:  # [n] -> [S] float64
        """Sum over all tokens of each sample, differentiable."""
        sums = values.new_zeros(len(self.num_tokens), dtype=torch.float64).index_add(0, self.index, values.double())
        return sums if self.group is None else _SumOverRanks.apply(sums, self.group)

    def mean(self, values: Tensor) -> Tensor:  # [n] -> [n]
        """Mean over all tokens of the sample, at every one of them; differentiable."""
        return self.at_tokens(self.total(values) / self.num_tokens.clamp(min=1)).to(values.dtype)

    def at_tokens(self, per_sample: Tensor) -> Tensor:  # [S] -> [n]
        """A number of each sample at every token of it."""
        return per_sample[self.index]


class _SumOverRanks(torch.autograd.Function):
    """All-reduce both ways: every rank's loss depends on every rank's share, so a share's gradient is the sum over ranks."""

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
