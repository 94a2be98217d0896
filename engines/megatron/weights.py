"""What the world outside Megatron needs of its weights: full tensors under global names (for publishing), hashes (to prove that
a replay came to the same policy), and copies in host memory (a frozen reference in the actor's own model slot).

Translating names and shapes to Hugging Face's is for `storage/layouts`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import xxhash
from megatron.core import parallel_state
from torch import Tensor, nn

from engines.megatron.model import PolicyModel

LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Entry:
    """A parameter as all ranks of a pipeline know it."""

    name: str  # global: layer numbers count over the whole model
    shape: tuple[int, ...]  # of the full tensor, vocabulary padding included
    dtype: torch.dtype
    stage: int  # pipeline rank that has it


def local_parameters(chunk: PolicyModel) -> Iterator[tuple[str, nn.Parameter]]:
    """This rank's shards under global names, without a tied head (a copy of the embedding on the last stage)."""
    for name, param in chunk.named_parameters():
        if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
            continue
        yield LAYER.sub(lambda match: f"decoder.layers.{chunk.decoder.layers[int(match[1])].layer_number - 1}.", name), param


def named_weights(chunks: list[PolicyModel]) -> Iterator[tuple[str, Tensor]]:
    """Every full tensor of the model, one at a time, on every rank, in the same order. A collective over tensor and pipeline
    ranks: run it to the end. A tensor may be the live weight itself: copy what you keep."""
    tensor_group = parallel_state.get_tensor_model_parallel_group()
    pipeline_group = parallel_state.get_pipeline_model_parallel_group()
    for chunk in chunks:
        local = dict(local_parameters(chunk))
        ranks, stage = tensor_group.size(), pipeline_group.rank()
        own = [Entry(name, _full_shape(param, ranks), param.dtype, stage) for name, param in local.items()]
        stages: list[list[Entry]] = [[] for _ in range(pipeline_group.size())]
        dist.all_gather_object(stages, own, group=pipeline_group)
        for entry in (entry for entries in stages for entry in entries):
            if entry.stage == stage:
                full = _gather(entry.name, local[entry.name], tensor_group)
            else:
                full = torch.empty(entry.shape, dtype=entry.dtype, device=_device(chunk))
            if pipeline_group.size() > 1:
                dist.broadcast(full, dist.get_global_rank(pipeline_group, entry.stage), group=pipeline_group)
            yield entry.name, full[: chunk.shape.vocab_size] if is_vocabulary(entry.name) else full


def is_vocabulary(name: str) -> bool:
    """Tensors with one row per token."""
    return name in ("embedding.word_embeddings.weight", "output_layer.weight")


def _device(chunk: PolicyModel) -> torch.device:
    return next(chunk.parameters()).device


def _sharded_axis(param: nn.Parameter) -> int | None:
    """The axis along which tensor-parallel ranks share a parameter; None if each has all of it."""
    axis = getattr(param, "partition_dim", -1) if getattr(param, "tensor_model_parallel", False) else -1
    return axis if axis >= 0 else None


def _full_shape(param: nn.Parameter, ranks: int) -> tuple[int, ...]:
    return tuple(size * ranks if axis == _sharded_axis(param) else size for axis, size in enumerate(param.shape))


def _gather(name: str, param: nn.Parameter, group: dist.ProcessGroup) -> Tensor:
    """Join the shards. Those of a gated MLP's first matrix hold a piece of the gate and one of the up projection."""
    data, axis = param.detach(), _sharded_axis(param)
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
    group = parallel_state.get_tensor_model_parallel_group()
    place = f"@{group.rank()}/{group.size()}" if group.size() > 1 else ""
    return {
        name + ("" if _sharded_axis(param) is None else place): xxhash.xxh3_64_hexdigest(_bytes(param))
        for chunk in chunks
        for name, param in local_parameters(chunk)
    }


def _bytes(param: nn.Parameter) -> memoryview:
    return param.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


Snapshot = list[Tensor]


def snapshot(chunks: list[PolicyModel]) -> Snapshot:
    """A copy of the local shards in host memory (pinned beside a GPU)."""
    pinned = torch.cuda.is_available()
    copies = [torch.empty(p.shape, dtype=p.dtype, pin_memory=pinned) for chunk in chunks for p in chunk.parameters()]
    for copy, param in zip(copies, (p for chunk in chunks for p in chunk.parameters())):
        copy.copy_(param.detach())
    return copies


@torch.no_grad()
def exchange(chunks: list[PolicyModel], held: Snapshot) -> None:
    """Put the snapshot into the model and the model into the snapshot: no third copy, and twice is the identity."""
    params = [param for chunk in chunks for param in chunk.parameters()]
    for param, other in zip(params, held, strict=True):
        current = param.clone()
        param.copy_(other)
        other.copy_(current)
