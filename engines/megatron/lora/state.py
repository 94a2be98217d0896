"""Adapters in Megatron's checkpoint format: the matrices of all layers, without the base weights.

Keys are global names, so that a checkpoint can be loaded with other parallel sizes. The matrices of a layer's experts
are one tensor [experts, ...], whether the experts are computed one after the other or by grouped GEMMs.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedTensor, ShardedTensorFactory
from torch import Tensor

from penstock.engines.lora import stored_matrix
from penstock.engines.megatron.model.gpt import PolicyModel, is_routed_expert_parameter
from penstock.engines.megatron.weights import sharded_axis, sharding_group

Offset = tuple[int, int, int]  # axis, index of the shard, number of shards


def adapter_state(chunks: list[PolicyModel]) -> dict[str, Any]:
    """Return Megatron's sharded state dict of this rank's adapters: name of a parameter -> its ShardedTensor or, for
    the rows of gate and up projections, a factory of two."""
    return {
        f"{adapter.names[0]}.{kind}": _sharded(chunk, adapter.names[0], kind, param)
        for chunk in chunks
        for adapter in chunk.adapters
        for kind, param in adapter.named_parameters()
    }


@torch.no_grad()
def load_adapter_state(chunks: list[PolicyModel], loaded: dict[str, Tensor]) -> None:
    """Copy the tensors that were loaded into an `adapter_state` to the adapters."""
    for adapter in (adapter for chunk in chunks for adapter in chunk.adapters):
        for kind, param in adapter.named_parameters():
            param.copy_(loaded[f"{adapter.names[0]}.{kind}"])


def _sharded(chunk: PolicyModel, layer: str, kind: str, param: Any) -> ShardedTensor | ShardedTensorFactory:
    """Return a parameter of an adapter with its place in the full tensor."""
    is_expert, axis = is_routed_expert_parameter(f"{layer}.weight"), sharded_axis(param)
    group = sharding_group(f"{layer}.weight")
    name, expert = stored_matrix(layer, kind)
    first: list[Offset] = []
    prepended = 0
    if is_expert and param.dim() == 3:
        experts = parallel_state.get_expert_model_parallel_group()
        first = [(0, experts.rank(), experts.size())]
    elif is_expert:
        assert expert is not None and chunk.config.num_moe_experts is not None
        first, prepended = [(0, expert, chunk.config.num_moe_experts)], 1
    data_rank = (
        parallel_state.get_expert_data_parallel_rank()
        if is_expert
        else parallel_state.get_data_parallel_rank(with_context_parallel=True)
    )
    replica: ReplicaId = (0, 0 if axis is not None else group.rank(), data_rank)

    def shard(key: str, tensor: Tensor, *last: Offset) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(
            key, tensor, *first, *last, replica_id=replica, prepend_axis_num=prepended
        )

    if axis is None:
        return shard(name, param)
    place = axis + prepended
    if "linear_fc1" not in name:
        return shard(name, param, (place, group.rank(), group.size()))

    @torch.no_grad()
    def split(key: str, tensor: Tensor, *_: Any) -> list[ShardedTensor]:
        parts = tensor.chunk(2, axis)  # gate, up
        return [
            shard(key, part.contiguous(), (place, index * group.size() + group.rank(), 2 * group.size()))
            for index, part in enumerate(parts)
        ]

    return ShardedTensorFactory(name, param, split, lambda parts: torch.cat(parts, axis), replica)
