"""What the world outside Megatron needs of its weights: full tensors under global names (for publishing), hashes (to prove that
a replay came to the same policy), and copies in host memory (a frozen reference in the actor's own model slot).

Weights are the parameters and the routers' frozen corrections. Translating names and shapes to Hugging Face's is for
`storage/layouts`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import xxhash
from megatron.core import parallel_state
from torch import Tensor

from engines.megatron.model import PolicyModel, is_expert

LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


@dataclass(frozen=True)
class Entry:
    """A tensor as all ranks of a pipeline know it."""

    names: tuple[str, ...]  # global ones; of an expert's tensor, that of every expert-parallel rank in its place
    shape: tuple[int, ...]  # of the full tensor, vocabulary padding included
    dtype: torch.dtype
    stage: int  # pipeline rank that has it


def local_parameters(chunk: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """This rank's shards under global names (numbers of layers and experts count over the whole model), without a tied head (a copy
    of the embedding on the last stage)."""
    for name, tensor in _local(chunk):
        yield _global_name(chunk, name, parallel_state.get_expert_model_parallel_rank()), tensor


def named_weights(chunks: list[PolicyModel]) -> Iterator[tuple[str, Tensor]]:
    """Every full tensor of the model, one at a time, on every rank, in the same order. A collective over tensor, expert and pipeline
    ranks: run it to the end. A tensor may be the live weight itself: copy what you keep."""
    group = parallel_state.get_pipeline_model_parallel_group()
    stage = group.rank()
    for chunk in chunks:
        own = [(_entry(chunk, name, tensor, stage), tensor) for name, tensor in _local(chunk)]
        stages: list[list[Entry]] = [[] for _ in range(group.size())]
        dist.all_gather_object(stages, [entry for entry, _ in own], group=group)
        local = dict(own)
        for entry in (entry for entries in stages for entry in entries):
            if entry.stage == stage:
                gathered = _gather(entry.names, local[entry])
            else:
                gathered = [torch.empty(entry.shape, dtype=entry.dtype, device=_device(chunk)) for _ in entry.names]
            for name, full in zip(entry.names, gathered, strict=True):
                if group.size() > 1:
                    dist.broadcast(full, dist.get_global_rank(group, entry.stage), group=group)
                yield name, full[: chunk.shape.vocab_size] if is_vocabulary(name) else full


def is_vocabulary(name: str) -> bool:
    """Tensors with one row per token."""
    return name in ("embedding.word_embeddings.weight", "output_layer.weight")


def tensor_group(name: str) -> dist.ProcessGroup:
    """The ranks that share one tensor."""
    if is_expert(name):
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def sharded_axis(tensor: Tensor) -> int | None:
    """The axis along which the ranks of its group share a tensor; None if each has all of it."""
    axis = getattr(tensor, "partition_dim", -1) if getattr(tensor, "tensor_model_parallel", False) else -1
    return axis if axis >= 0 else None


def _local(chunk: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """Under the names that the chunk gives them."""
    for name, param in chunk.named_parameters():
        if name != "output_layer.weight" or not chunk.share_embeddings_and_output_weights:
            yield name, param
    yield from _corrections(chunk)


def _corrections(chunk: PolicyModel) -> list[tuple[str, Tensor]]:
    """The routers' frozen corrections, which are buffers."""
    return [(name, buffer) for name, buffer in chunk.named_buffers() if name.endswith("router.expert_bias")]


def _global_name(chunk: PolicyModel, name: str, expert_rank: int) -> str:
    name = LAYER.sub(lambda match: f"decoder.layers.{chunk.decoder.layers[int(match[1])].layer_number - 1}.", name)
    if is_expert(name):
        experts = (chunk.config.num_moe_experts or 0) // parallel_state.get_expert_model_parallel_world_size()
        name = EXPERT.sub(lambda match: f".local_experts.{int(match[1]) + expert_rank * experts}.", name)
    return name


def _entry(chunk: PolicyModel, name: str, tensor: Tensor, stage: int) -> Entry:
    ranks = parallel_state.get_expert_model_parallel_world_size() if is_expert(name) else 1
    sizes, axis = list(tensor.shape), sharded_axis(tensor)
    if axis is not None:
        sizes[axis] *= tensor_group(name).size()
    return Entry(tuple(_global_name(chunk, name, rank) for rank in range(ranks)), tuple(sizes), tensor.dtype, stage)


def _device(chunk: PolicyModel) -> torch.device:
    return next(chunk.parameters()).device


def _gather(names: tuple[str, ...], tensor: Tensor) -> list[Tensor]:
    """Join the shards of a tensor, and of an expert's tensor also those that the other expert-parallel ranks have in its place."""
    full = _joined(names[0], tensor)
    if len(names) == 1:
        return [full]
    out = [torch.empty_like(full) for _ in names]
    dist.all_gather(out, full.contiguous(), group=parallel_state.get_expert_model_parallel_group())
    return out


def _joined(name: str, tensor: Tensor) -> Tensor:
    """Shards of a gated MLP's first matrix hold a piece of the gate and one of the up projection."""
    data, axis, group = tensor.detach(), sharded_axis(tensor), tensor_group(name)
    if group.size() == 1 or axis is None:
        return data
    shards = [torch.empty_like(data) for _ in range(group.size())]
    dist.all_gather(shards, data.contiguous(), group=group)
    if "linear_fc1" in name:
        gates, ups = zip(*(shard.chunk(2, axis) for shard in shards))
        shards = [*gates, *ups]
    return torch.cat(shards, axis)


def digest(chunks: list[PolicyModel]) -> dict[str, str]:
    """xxh3-64 of every local shard, by global name and place in the layout. Equal digests = equal policies, bit for bit."""
    return {
        name + ("" if sharded_axis(tensor) is None else _place(name)): xxhash.xxh3_64_hexdigest(_bytes(tensor))
        for chunk in chunks
        for name, tensor in local_parameters(chunk)
    }


def _place(name: str) -> str:
    group = tensor_group(name)
    return f"@{group.rank()}/{group.size()}" if group.size() > 1 else ""


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


Snapshot = list[Tensor]


def _held(chunks: list[PolicyModel]) -> list[Tensor]:
    return [tensor for chunk in chunks for tensor in (*chunk.parameters(), *(buffer for _, buffer in _corrections(chunk)))]


def snapshot(chunks: list[PolicyModel]) -> Snapshot:
    """A copy of the local shards in host memory (pinned beside a GPU)."""
    pinned, held = torch.cuda.is_available(), _held(chunks)
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned) for tensor in held]
    for copy, tensor in zip(copies, held):
        copy.copy_(tensor.detach())
    return copies


@torch.no_grad()
def exchange(chunks: list[PolicyModel], held: Snapshot) -> None:
    """Put the snapshot into the model and the model into the snapshot: no third copy, and twice is the identity."""
    for tensor, other in zip(_held(chunks), held, strict=True):
        current = tensor.clone()
        tensor.copy_(other)
        other.copy_(current)
