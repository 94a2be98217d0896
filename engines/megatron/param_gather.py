"""Parameter all-gather after an optimizer step with Megatron's option `overlap_param_gather`: each data-parallel rank
updates its shard of the weights, and the all-gather of the other ranks' shards overlaps with the next computation.

Megatron itself gathers a bucket of parameters only when a forward pass of the next training step needs it. Penstock
also reads weights between steps (forward-only passes, digests, snapshots, publishing), and would then silently read
stale weights. So the all-gathers of all buckets are started at the end of the optimizer step; a module's forward pass
waits for the module's bucket, and every other reader waits for all buckets.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from torch import nn


class ParamGather:
    """Starts the parameter all-gathers of a model and waits for them; a no-op without `overlap_param_gather`.

    Args:
        wrapped: this rank's pipeline chunks of the model, wrapped in DistributedDataParallel.
    """

    def __init__(self, wrapped: list[DistributedDataParallel]) -> None:
        chunks = [chunk for chunk in wrapped if chunk.ddp_config.overlap_param_gather]
        for chunk in chunks:
            chunk.ddp_config.align_param_gather = True  # only `start_all` starts all-gathers
        groups = [group for chunk in chunks for group in (chunk.bucket_groups, chunk.expert_parallel_bucket_groups)]
        # Megatron lists the buckets of the last layers first.
        self._buckets = [bucket for group in groups for bucket in reversed(group)]
        self._bucket_of = {param: bucket for chunk in chunks for param, bucket in chunk.param_to_bucket_group.items()}

    def start_all(self) -> None:
        """Start the parameter all-gathers of all buckets, beginning with the first layers."""
        for bucket in self._buckets:
            bucket.start_param_sync()

    def wait_for_all(self) -> None:
        """Wait until the parameter all-gathers of all buckets are finished."""
        _finish_all_gathers(self._buckets)

    def wait_for_module(self, module: nn.Module) -> None:
        """Wait until the weights of a module are gathered. Call this before reading the weights without calling the
        module: Megatron's hooks wait only in the module's forward call."""
        _finish_all_gathers(self._bucket_of[param] for param in module.parameters() if param in self._bucket_of)


def _finish_all_gathers(buckets: Iterable[Any]) -> None:
    for bucket in buckets:
        if bucket.param_gather_handle is not None:
            bucket.finish_param_sync(skip_next_bucket_dispatch=True)
