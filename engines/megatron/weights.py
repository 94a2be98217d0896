"""Access the weights of a sharded model: full tensors under global names (for publishing), hashes (to compare a replay
with the recorded policy), and copies in host memory (for a reference model that shares the actor's modules).

"Weights" are the parameters and the MoE routers' frozen correction biases. `engines/families` maps their names and
shapes to Hugging Face's. Of a policy with LoRA adapters, `named_weights` yields the merged weights; snapshots have the
base weights, and hashes both apart (`lora_layers.py`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from penstock.engines.families.tensor_rows import EMBEDDING, HEAD
from penstock.engines.megatron.host_memory import hash_tensors
from penstock.engines.megatron.model.gpt import PolicyModel, is_routed_expert_parameter

VOCABULARY = (EMBEDDING, HEAD)  # weights with one row per vocabulary entry
LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
STACKED = re.compile(r"\.mlp\.experts\.(linear_fc[12]\.weight)$")  # of all experts, see `model/grouped_experts.py`

Snapshot = list[Tensor]


@dataclass(frozen=True)
class GlobalTensor:
    """Names, shape, dtype and pipeline rank of a full (unsharded) tensor; pipeline ranks exchange these before they
    broadcast the data."""

    names: tuple[str, ...]  # global names: one, or for an expert's tensor one per expert-parallel rank
    shape: tuple[int, ...]  # shape of the full tensor, vocabulary padding included
    dtype: torch.dtype
    stage: int  # pipeline rank that has the tensor

    @classmethod
    def of_shard(cls, chunk: PolicyModel, name: str, shard: Tensor, stage: int) -> GlobalTensor:
        """Return names, shape, dtype and pipeline rank of the full tensor to which a local shard belongs.

        Args:
            chunk: pipeline chunk that has the shard.
            name: local name of the parameter in the chunk.
            shard: this rank's shard.
            stage: pipeline rank of this process.
        """
        ranks = parallel_state.get_expert_model_parallel_world_size() if is_routed_expert_parameter(name) else 1
        names = tuple(global_name(chunk, name, rank) for rank in range(ranks))
        sizes, axis = list(shard.shape), sharded_axis(shard)
        if axis is not None:
            sizes[axis] *= sharding_group(name).size()
        return cls(names, tuple(sizes), shard.dtype, stage)


def local_parameters(chunk: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """Yield (global name, shard) of this rank's weights in a pipeline chunk.

    Global names number layers and experts over the whole model. A tied LM head is omitted: it is a copy of the
    embedding.
    """
    for name, tensor in _local_tensors(chunk):
        yield global_name(chunk, name), tensor


def base_parameters(chunk: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """Yield (local name, parameter) of this rank's weights in a pipeline chunk, without those of adapters."""
    return ((name, param) for name, param in chunk.named_parameters() if not name.startswith("adapters."))


def freeze_parameters(chunks: list[PolicyModel], frozen: Collection[str]) -> None:
    """Exclude parameters from training: they get no gradient, no optimizer state, and keep their bits. Call this before
    the chunks are wrapped in DistributedDataParallel.

    Args:
        chunks: this rank's pipeline chunks.
        frozen: global names; of the experts of a layer, all or none.
    """
    for chunk in chunks if frozen else ():
        for name, param in chunk.named_parameters():
            if name == HEAD and chunk.share_embeddings_and_output_weights:
                name = EMBEDDING
            name = global_name(chunk, STACKED.sub(r".mlp.experts.local_experts.0.\1", name), 0)
            param.requires_grad_(name not in frozen)
        require_activation_gradients(chunk)


def require_activation_gradients(chunk: PolicyModel) -> None:
    """Make the embeddings' output require gradients, although no parameter below it does: recomputation and pipeline
    stages need it."""

    def require_grad(module: Any, inputs: Any, output: Tensor) -> None:
        if torch.is_grad_enabled() and not output.requires_grad:
            output.requires_grad_()

    if chunk.pre_process:
        chunk.embedding.register_forward_hook(require_grad)


@dataclass(frozen=True)
class GatheredWeights:
    """The weights of a sharded model as full tensors, gathered one at a time."""

    meta: dict[str, Tensor]  # global name -> tensor on the meta device: shape and dtype of the weight
    tensors: Iterator[tuple[str, Tensor]]  # from `named_weights`; every rank must consume it whole


def gather_weights(chunks: list[PolicyModel]) -> GatheredWeights:
    """Return the shapes, dtypes and full tensors of all weights. A collective, as `named_weights`."""
    meta = {}
    for chunk in chunks:
        stage = parallel_state.get_pipeline_model_parallel_group().rank()
        own = [GlobalTensor.of_shard(chunk, name, tensor, stage) for name, tensor in _local_tensors(chunk)]
        for entry in (entry for entries in _entries_of_stages(own) for entry in entries):
            for name in entry.names:
                full = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
                meta[name] = full[: chunk.shape.vocab_size] if name in VOCABULARY else full
    return GatheredWeights(meta, named_weights(chunks))


def named_weights(chunks: list[PolicyModel]) -> Iterator[tuple[str, Tensor]]:
    """Yield (global name, full tensor) of every weight of the model, on every rank in the same order; weights of layers
    with adapters are merged. Global names number layers and experts over the whole model.

    This is a collective over tensor-, expert- and pipeline-parallel ranks: every rank must consume the whole iterator.
    A yielded tensor may share memory with the model's weight: copy it to keep it.
    """
    for chunk in chunks:
        adapters = {f"{layer}.weight": adapter for adapter in chunk.adapters for layer in adapter.layers}
        yield from _gather_tensors(chunk, dict(_local_tensors(chunk)), adapters)


def named_adapters(chunks: list[PolicyModel]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (global name of a layer, full A, full B) of every adapter of the model: [parts * r, in] and [out, r]. A
    collective, as `named_weights`."""
    for chunk in chunks:
        matrices = _gather_tensors(chunk, dict(_local_adapter_tensors(chunk)), {})
        waiting: dict[str, Tensor] = {}
        for name, tensor in matrices:
            layer, _, kind = name.rpartition(".")
            if kind == "lora_A":
                waiting[layer] = tensor
            else:
                yield layer, waiting.pop(layer), tensor


def _gather_tensors(
    chunk: PolicyModel, local: dict[str, Tensor], adapters: dict[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (global name, full tensor) of the tensors of all ranks in their chunks with the same index.

    Args:
        chunk: this rank's pipeline chunk.
        local: local name -> shard of this rank.
        adapters: local name -> adapter that is merged into the tensor.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    stage, device = group.rank(), next(chunk.parameters()).device
    names = {GlobalTensor.of_shard(chunk, name, tensor, stage): name for name, tensor in local.items()}
    for entry in (entry for entries in _entries_of_stages(list(names)) for entry in entries):
        if entry.stage == stage:
            name = names[entry]
            gathered = gather_shards(entry.names, local[name])
            if name in adapters:
                gathered = _merge_adapter(adapters[name], name, entry.names, gathered)
        else:
            gathered = [torch.empty(entry.shape, dtype=entry.dtype, device=device) for _ in entry.names]
        for global_, full in zip(entry.names, gathered, strict=True):
            if group.size() > 1:
                dist.broadcast(full, dist.get_global_rank(group, entry.stage), group=group)
            yield global_, full[: chunk.shape.vocab_size] if global_ in VOCABULARY else full


def _entries_of_stages(own: list[GlobalTensor]) -> list[list[GlobalTensor]]:
    """Return the lists `own` of all pipeline ranks. A collective."""
    group = parallel_state.get_pipeline_model_parallel_group()
    stages: list[list[GlobalTensor]] = [[] for _ in range(group.size())]
    dist.all_gather_object(stages, own, group=group)
    return stages


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
    """Yield (local name, shard) of this rank's weights in a pipeline chunk, without a tied LM head. Stacked experts are
    yielded one by one, under the names that they have without stacking, and a router's correction bias after its
    weight."""
    biases = dict(_correction_biases(chunk))
    for name, param in base_parameters(chunk):
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
            if bias in biases:
                yield bias, biases[bias]


def _local_adapter_tensors(chunk: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """Yield (local name, shard) of this rank's adapter matrices in a pipeline chunk, A before B of each layer."""
    for adapter in chunk.adapters:
        yield from ((f"{layer}.{kind}", matrix) for layer, kind, matrix in adapter.shards())


def _merge_adapter(adapter: Any, name: str, names: tuple[str, ...], weights: list[Tensor]) -> list[Tensor]:
    """Return W + scale * B A of a layer. A collective over tensor- and expert-parallel ranks.

    Args:
        adapter: the adapter that has this rank's matrices of the layer.
        name: local name of the weight.
        names: global names of the weights: one, or for an expert one per expert-parallel rank.
        weights: the full weights.
    """
    shards = {kind: matrix for layer, kind, matrix in adapter.shards() if f"{layer}.weight" == name}
    first, second = (gather_shards(names, shards[kind]) for kind in ("lora_A", "lora_B"))
    return [adapter.merge(*matrices) for matrices in zip(weights, first, second, strict=True)]


def _correction_biases(chunk: PolicyModel) -> list[tuple[str, Tensor]]:
    """Return (local name, buffer) of the routers' frozen correction biases, which are buffers, not parameters."""
    return [(name, buffer) for name, buffer in chunk.named_buffers() if name.endswith("router.expert_bias")]


def global_name(chunk: PolicyModel, name: str, expert_rank: int | None = None) -> str:
    """Return the global name of a weight or layer with the local name `name` on the expert-parallel rank `expert_rank`
    (None: this rank's)."""
    if expert_rank is None:
        expert_rank = parallel_state.get_expert_model_parallel_rank()
    name = LAYER.sub(lambda match: f"decoder.layers.{chunk.decoder.layers[int(match[1])].layer_number - 1}.", name)
    if is_routed_expert_parameter(name):
        experts = (chunk.config.num_moe_experts or 0) // parallel_state.get_expert_model_parallel_world_size()
        name = EXPERT.sub(lambda match: f".local_experts.{int(match[1]) + expert_rank * experts}.", name)
    return name


def gather_shards(names: tuple[str, ...], tensor: Tensor) -> list[Tensor]:
    """Return the full tensors of which this rank has a shard: all-gather over tensor- and expert-parallel ranks.

    Args:
        names: global names of the tensors (`GlobalTensor.names`).
        tensor: this rank's shard.

    Returns:
        one full tensor per name: for an expert's weight, one of each expert-parallel rank, from the expert with the
        same local index.
    """
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


def hash_weights(chunks: list[PolicyModel]) -> dict[str, str]:
    """Return the xxh3-64 hash of every weight shard of this rank, without adapters.

    Keys are names that number layers and experts over the whole model; the key of a sharded weight ends with
    "@<tensor-parallel rank>/<size>". Different hashes prove different weights; equal hashes make different weights very
    unlikely.
    """
    return _hash_shards(entry for chunk in chunks for entry in local_parameters(chunk))


def hash_adapters(chunks: list[PolicyModel]) -> dict[str, str]:
    """Return the xxh3-64 hash of every shard of this rank's adapters, with keys as those of `hash_weights`."""
    return _hash_shards(
        (global_name(chunk, name), matrix) for chunk in chunks for name, matrix in _local_adapter_tensors(chunk)
    )


def _hash_shards(entries: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return the hashes of (global name, shard) pairs, with the position of a shard in its key."""
    tensors = {}
    for name, tensor in entries:
        group = sharding_group(name)
        is_shard = sharded_axis(tensor) is not None and group.size() > 1
        tensors[name + (f"@{group.rank()}/{group.size()}" if is_shard else "")] = tensor
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
    """Exchange the values of this rank's weights with those of the snapshot `other`, in place. A second call with the
    same snapshot restores both."""
    for tensor, other_tensor in zip(_snapshot_tensors(chunks), other, strict=True):
        current = tensor.clone()
        tensor.copy_(other_tensor, non_blocking=True)
        other_tensor.copy_(current, non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # once, not after every copy


def _snapshot_tensors(chunks: list[PolicyModel]) -> list[Tensor]:
    """Return this rank's weights (parameters and correction biases) in the order of the copies in a `Snapshot`."""
    biases = [[buffer for _, buffer in _correction_biases(chunk)] for chunk in chunks]
    parameters = [[param for _, param in base_parameters(chunk)] for chunk in chunks]
    return [tensor for base, own in zip(parameters, biases) for tensor in (*base, *own)]
