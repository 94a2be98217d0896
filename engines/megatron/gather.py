"""Weights on their way after an optimizer step, under `overlap_param_gather`: each data-parallel rank has stepped a share of them,
and fetches the rest while it goes on.

Megatron fetches a bucket when a forward pass of the next training step needs it. Here weights are looked at in between (forward-only passes,
digests, snapshots, publishing), where it takes the old ones for new, silently. So all buckets set out at the end of the step, modules
wait for theirs, and everybody else for all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from torch import nn


class WeightGather:
    """Without `overlap_param_gather` there is never anything to wait for.

    Args:
        wrapped: model chunks.
    """

    def __init__(self, wrapped: list[DistributedDataParallel]) -> None:
        chunks = [chunk for chunk in wrapped if chunk.ddp_config.overlap_param_gather]
        for chunk in chunks:
            chunk.ddp_config.align_param_gather = True  # nobody but `start` sends for a bucket
        groups = [group for chunk in chunks for group in (chunk.bucket_groups, chunk.expert_parallel_bucket_groups)]
        self._buckets = [bucket for group in groups for bucket in reversed(group)]  # Megatron's are in the order of gradients
        self._bucket_of = {param: bucket for chunk in chunks for param, bucket in chunk.param_to_bucket_group.items()}

    def start(self) -> None:
        """Send for all buckets, the first layers' first."""
        for bucket in self._buckets:
            bucket.start_param_sync()

    def wait(self) -> None:
        """Until every weight is there."""
        _finish(self._buckets)

    def wait_for(self, module: nn.Module) -> None:
        """For one whose weights are used without a call of it: Megatron's hooks see calls only."""
        _finish(self._bucket_of[param] for param in module.parameters() if param in self._bucket_of)


def _finish(buckets: Iterable[Any]) -> None:
    for bucket in buckets:
        if bucket.param_gather_handle is not None:
            bucket.finish_param_sync(skip_next_bucket_dispatch=True)
