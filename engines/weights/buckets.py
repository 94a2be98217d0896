"""Split a model's weights into buckets of bounded size, for transfer to the engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

NamedTensor = tuple[str, Tensor]
# Engines fuse these two MLA weights into one parameter and drop one that arrives without the other in the same update
# call. In different buckets both would be lost without an error, and the engine would keep its old weights.
FUSED = (".q_a_proj.", ".kv_a_proj_with_mqa.")


def num_bytes(bucket: Iterable[NamedTensor]) -> int:
    """Return the total size of the bucket's tensors in bytes."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in bucket)


def split_into_buckets(named: Iterable[NamedTensor], max_bytes: int) -> Iterator[tuple[list[NamedTensor], bool]]:
    """Yield (bucket, whether it is the last bucket), with buckets of at most `max_bytes` of tensor data.

    A group of tensors that must stay together (FUSED ones, an fp8 weight and its scales) and is larger than `max_bytes`
    becomes a bucket of its own.
    """
    bucket: list[NamedTensor] = []
    size = 0
    for group in _group_fused_tensors(named):
        group_bytes = num_bytes(group)
        if bucket and size + group_bytes > max_bytes:
            yield bucket, False
            bucket, size = [], 0
        bucket.extend(group)
        size += group_bytes
    if bucket:
        yield bucket, True


def _group_fused_tensors(named: Iterable[NamedTensor]) -> Iterator[list[NamedTensor]]:
    """Yield lists of tensors that must be in the same bucket: the two FUSED tensors of a layer, or any other tensor
    alone, each with its scales if it is quantized."""
    first, second = FUSED
    waiting: dict[str, list[NamedTensor]] = {}
    tensors = iter(named)
    for name, tensor in tensors:
        group = [(name, tensor)]
        if tensor.dtype == torch.float8_e4m3fn:
            group.append(next(tensors))  # its scales, which follow it
        partner = name.replace(second, first) if second in name else name.replace(first, second)
        if partner == name:
            yield group
        elif partner in waiting:
            yield waiting.pop(partner) + group
        else:
            waiting[name] = group
    yield from waiting.values()  # Moonlight has kv_a_proj_with_mqa, but not q_a_proj
