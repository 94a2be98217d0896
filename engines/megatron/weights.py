"""Access the weights of a sharded model: full tensors under global names (for publishing), hashes (to compare a replay
with the recorded policy), and copies in host memory (for a reference model that shares the actor's modules).

"Weights" are the parameters and the MoE routers' frozen correction biases. `engines/families` maps their names and
shapes to Hugging Face's. For a policy with LoRA adapters (`lora_layers.py`), `gather_weights` returns the merged
weights, snapshots have only the base weights, and base weights and adapters are hashed separately.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from penstock.engines.families.tensor_rows import EMBEDDING, HEAD
from penstock.engines.lora import merge
from penstock.engines.megatron.host_memory import hash_tensors
from penstock.engines.megatron.model.gpt import PolicyModel, is_routed_expert_parameter
from penstock.engines.training import GatheredWeights

VOCABULARY = (EMBEDDING, HEAD)  # weights with one row per vocabulary entry
LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
# Names of weights that stack all experts (`model/grouped_experts.py`).
STACKED = re.compile(r"\.mlp\.experts\.(linear_fc[12]\.weight)$")

Snapshot = list[Tensor]


@dataclass(frozen=True)
class GlobalTensor:
    """A full (unsharded) tensor, as pipeline ranks describe it to each other before they broadcast the data."""

    names: tuple[str, ...]  # global names: one, or for an expert's tensor one per expert-parallel rank
    shape: tuple[int, ...]  # shape of the full tensor, vocabulary padding included
    dtype: torch.dtype
    stage: int  # pipeline rank that has the tensor


def local_parameters(chunk: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """Yield (global name, shard) of this rank's weights in a pipeline chunk, without a tied LM head, which is a copy of
    the embedding."""
    for name, tensor in _local_tensors(chunk):
        yield global_name(chunk, name), tensor


def freeze_parameters(chunks: list[PolicyModel], frozen: Collection[str]) -> None:
    """Exclude the parameters with these global names from training. The experts of a layer must be frozen together.
    Call this before the chunks are wrapped in DistributedDataParallel."""
    for chunk in chunks if frozen else ():
        for name, param in chunk.named_parameters():
            if name == HEAD and chunk.share_embeddings_and_output_weights:
                name = EMBEDDING
            name = global_name(chunk, STACKED.sub(r".mlp.experts.local_experts.0.\1", name), 0)
            param.requires_grad_(name not in frozen)
        require_activation_gradients(chunk)


def require_activation_gradients(chunk: PolicyModel) -> None:
    """Make the embedding's output require gradients even if the embedding is frozen, because recomputation and pipeline
    parallelism need activations that require gradients."""

    def require_grad(module: Any, inputs: Any, output: Tensor) -> None:
        if torch.is_grad_enabled() and not output.requires_grad:
            output.requires_grad_()

    if chunk.pre_process:
        chunk.embedding.register_forward_hook(require_grad)


def gather_weights(chunks: list[PolicyModel]) -> GatheredWeights:
    """Return the shapes, dtypes and full tensors of all weights, on every rank in the same order; weights of layers
    with adapters are merged. Global names number layers and experts over the whole model.

    This is a collective over tensor-, expert- and pipeline-parallel ranks: every rank must consume all `tensors`. A
    tensor may share memory with the model's weight: copy it to keep it.
    """
    meta, gathered = {}, []
    for chunk in chunks:
        local = dict(_local_tensors(chunk))
        tensors = _tensors_of_stages(chunk, local)
        for entry in tensors:
            for name in entry.names:
                full = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
                meta[name] = full[: chunk.shape.vocab_size] if name in VOCABULARY else full
        adapters = {f"{layer}.weight": adapter for adapter in chunk.adapters for layer in adapter.layers}
        gathered.append(_gather_tensors(chunk, local, tensors, adapters))
    return GatheredWeights(meta, chain.from_iterable(gathered))


def named_adapters(chunks: list[PolicyModel]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (global layer name, full A [parts * r, in], full B [out, r]) of every adapter. A collective."""
    for chunk in chunks:
        local = dict(matrix for adapter in chunk.adapters for matrix in adapter.shards())
        waiting: dict[str, Tensor] = {}
        for name, tensor in _gather_tensors(chunk, local, _tensors_of_stages(chunk, local), {}):
            layer, _, kind = name.rpartition(".")
            if kind == "lora_A":
                waiting[layer] = tensor
            else:
                yield layer, waiting.pop(layer), tensor


def _tensors_of_stages(chunk: PolicyModel, local: dict[str, Tensor]) -> dict[GlobalTensor, str | None]:
    """Return the tensors that the pipeline ranks have in their chunks with the index of `chunk`. Each is mapped to its
    local name if this rank has a shard of it, else to None. `local` maps local names to this rank's shards. A
    collective: every pipeline rank must call it."""
    group = parallel_state.get_pipeline_model_parallel_group()
    own: dict[GlobalTensor, str] = {}
    for name, shard in local.items():
        ranks = parallel_state.get_expert_model_parallel_world_size() if is_routed_expert_parameter(name) else 1
        names = tuple(global_name(chunk, name, rank) for rank in range(ranks))
        sizes, axis = list(shard.shape), sharded_axis(shard)
        if axis is not None:
            sizes[axis] *= sharding_group(name).size()
        own[GlobalTensor(names, tuple(sizes), shard.dtype, group.rank())] = name
    stages: list[list[GlobalTensor]] = [[] for _ in range(group.size())]
    dist.all_gather_object(stages, list(own), group=group)
    return {entry: own.get(entry) for entries in stages for entry in entries}


def _gather_tensors(
    chunk: PolicyModel, local: dict[str, Tensor], tensors: dict[GlobalTensor, str | None], adapters: dict[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (global name, full tensor) of `tensors` (from `_tensors_of_stages`). `adapters` maps the local name of a
    weight to the adapter that is merged into it."""
    group, device = parallel_state.get_pipeline_model_parallel_group(), next(chunk.parameters()).device
    for entry, name in tensors.items():
        if name is None:
            gathered = [torch.empty(entry.shape, dtype=entry.dtype, device=device) for _ in entry.names]
        else:
            gathered = gather_shards(entry.names, local[name])
            if adapter := adapters.get(name):
                shards, layer = dict(adapter.shards()), name.removesuffix(".weight")
                first, second = (gather_shards(entry.names, shards[f"{layer}.{kind}"]) for kind in ("lora_A", "lora_B"))
                matrices = zip(gathered, first, second, strict=True)
                gathered = [merge(*own, adapter.part_of_row, adapter.scale) for own in matrices]
        for global_, full in zip(entry.names, gathered, strict=True):
            if group.size() > 1:
                dist.broadcast(full, dist.get_global_rank(group, entry.stage), group=group)
            yield global_, full[: chunk.shape.vocab_size] if global_ in VOCABULARY else full


def sharding_group(name: str) -> dist.ProcessGroup:
    """Return the process group over which the weight of this name is sharded: the experts' tensor-parallel group for an
    expert's weight, otherwise the tensor-parallel group."""
    if is_routed_expert_parameter(name):
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def sharded_axis(tensor: Tensor) -> int | None:
    """Return the axis along which a weight is sharded over its tensor-parallel group, or None if it is replicated."""
    axis = getattr(tensor, "partition_dim", -1) if getattr(tensor, "tensor_model_parallel", False) else -1
    return axis if axis >= 0 else None


def _local_tensors(chunk: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """Yield (local name, shard) of this rank's weights in a pipeline chunk, without a tied LM head: stacked experts one
    by one, under their names without stacking, and a router's correction bias after its weight."""
    buffers = dict(chunk.named_buffers())
    for name, param in chunk.named_parameters():
        if name.startswith("adapters."):
            continue
        if STACKED.search(name):
            weight: Any
            stacked_axis = sharded_axis(param)
            assert stacked_axis, f"{name} is sharded along its rows or columns"
            for expert, weight in enumerate(param.detach().unbind()):
                weight.tensor_model_parallel, weight.partition_dim = True, stacked_axis - 1
                yield STACKED.sub(rf".mlp.experts.local_experts.{expert}.\1", name), weight
        elif name != HEAD or not chunk.share_embeddings_and_output_weights:
            yield name, param
            bias = name.replace("router.weight", "router.expert_bias")
            if bias in buffers:
                yield bias, buffers[bias]


def global_name(chunk: PolicyModel, name: str, expert_rank: int | None = None) -> str:
    """Return the global name of a weight or layer on the expert-parallel rank `expert_rank` (None: this rank's)."""
    if expert_rank is None:
        expert_rank = parallel_state.get_expert_model_parallel_rank()
    name = LAYER.sub(lambda match: f"decoder.layers.{chunk.decoder.layers[int(match[1])].layer_number - 1}.", name)
    if is_routed_expert_parameter(name):
        experts = (chunk.config.num_moe_experts or 0) // parallel_state.get_expert_model_parallel_world_size()
        name = EXPERT.sub(lambda match: f".local_experts.{int(match[1]) + expert_rank * experts}.", name)
    return name


def gather_shards(names: tuple[str, ...], tensor: Tensor) -> list[Tensor]:
    """Return the full tensors of which this rank has the shard `tensor`, by an all-gather over tensor- and
    expert-parallel ranks: one per name in `names` (`GlobalTensor.names`)."""
    full, axis, group = tensor.detach(), sharded_axis(tensor), sharding_group(names[0])
    if group.size() > 1 and axis is not None:
        shards = [torch.empty_like(full) for _ in range(group.size())]
        dist.all_gather(shards, full.contiguous(), group=group)
        if "linear_fc1" in names[0]:  # each shard is the concatenation of its parts of gate and up projection
            gates, ups = zip(*(shard.chunk(2, axis) for shard in shards))
            shards = [*gates, *ups]
        full = torch.cat(shards, axis)
    if len(names) == 1:
        return [full]
    experts = [torch.empty_like(full) for _ in names]
    dist.all_gather(experts, full.contiguous(), group=parallel_state.get_expert_model_parallel_group())
    return experts


def hash_weights(chunks: list[PolicyModel], of_adapters: bool = False) -> dict[str, str]:
    """Return the xxh3-64 hash of every weight shard of this rank, without adapters; with `of_adapters`, of adapter
    matrices only. Keys are global names; that of a sharded weight ends with "@<tensor-parallel rank>/<size>"."""
    tensors = {}
    for chunk in chunks:
        matrices = (matrix for adapter in chunk.adapters for matrix in adapter.shards())
        for name, tensor in matrices if of_adapters else _local_tensors(chunk):
            group = sharding_group(name)
            is_shard = sharded_axis(tensor) is not None and group.size() > 1
            tensors[global_name(chunk, name) + (f"@{group.rank()}/{group.size()}" if is_shard else "")] = tensor
    return hash_tensors(tensors.items())


def copy_weights_to_host(chunks: list[PolicyModel]) -> Snapshot:
    """Copy this rank's weight shards to host memory (pinned on a machine with a GPU), and return the copies."""
    pinned, tensors = torch.cuda.is_available(), _snapshot_tensors(chunks)
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned) for tensor in tensors]
    for copy, tensor in zip(copies, tensors):
        copy.copy_(tensor.detach())
    return copies


@torch.no_grad()
def swap_weights(chunks: list[PolicyModel], other: Snapshot) -> None:
    """Exchange this rank's weights with the snapshot `other`, in place. A second call restores both."""
    for tensor, other_tensor in zip(_snapshot_tensors(chunks), other, strict=True):
        current = tensor.clone()
        tensor.copy_(other_tensor, non_blocking=True)
        other_tensor.copy_(current, non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # waits once for all copies


@torch.no_grad()
def move_average(chunks: list[PolicyModel], average: list[Snapshot] | None, rate: float) -> list[Snapshot]:
    """Move the average (a snapshot, and a second one that is added to it) by the share `rate` towards this rank's
    weights, in place, and return it. None: begin it with these weights."""
    if average is None:
        rounded = copy_weights_to_host(chunks)
        return [rounded, [torch.zeros_like(tensor) for tensor in rounded]]
    for tensor, rounded, rest in zip(_snapshot_tensors(chunks), *average, strict=True):
        mean = rounded.float() + rest.float()
        mean += rate * (tensor.cpu().float() - mean)
        rounded.copy_(mean)
        rest.copy_(mean - rounded.float())
    return average


def _snapshot_tensors(chunks: list[PolicyModel]) -> list[Tensor]:
    """Return this rank's weights (parameters and correction biases) in the order of the copies in a `Snapshot`."""
    tensors: list[Tensor] = []
    for chunk in chunks:
        tensors += [param for name, param in chunk.named_parameters() if not name.startswith("adapters.")]
        tensors += [buffer for name, buffer in chunk.named_buffers() if name.endswith("router.expert_bias")]
    return tensors
