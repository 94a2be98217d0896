"""Split a model's weights into buckets of bounded size, for transfer to the engines, or write them
as a Hugging Face directory, and adapters as a PEFT directory, that an engine can load.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.engines.lora import CONFIG, WEIGHTS
from penstock.storage.errors import WeightMismatch

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


def write_weights(
    target: Path, named: Iterable[tuple[str, Tensor]], model_path: Path, shard_bytes: int, *, verify: bool = False
) -> None:
    """Write weights as safetensors shards with an index, and copy the JSON files of `model_path` (config, tokenizer).
    `verify`: read every file back and compare it with the tensors bit for bit."""
    target.mkdir(parents=True, exist_ok=True)
    for file in model_path.glob("*.json"):
        if not file.name.endswith(".index.json"):
            shutil.copy(file, target)
    weight_map: dict[str, str] = {}
    for number, (bucket, _) in enumerate(split_into_buckets(named, shard_bytes)):
        shard = f"model-{number:05d}.safetensors"
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in bucket}
        save_file(tensors, target / shard, metadata={"format": "pt"})
        if verify:
            _check_file(target / shard, tensors)
        weight_map |= dict.fromkeys(tensors, shard)
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_adapter(target: Path, named: Iterable[tuple[str, Tensor]], config: Mapping[str, Any]) -> None:
    """Write LoRA adapters as a PEFT directory."""
    target.mkdir(parents=True, exist_ok=True)
    matrices = {name: matrix.detach().cpu().contiguous() for name, matrix in named}
    save_file(matrices, target / WEIGHTS, metadata={"format": "pt"})
    (target / CONFIG).write_text(json.dumps(dict(config)))


def _check_file(path: Path, tensors: dict[str, Tensor]) -> None:
    """Check that a safetensors file has these tensors, bit for bit; otherwise raise WeightMismatch."""
    read = load_file(path)
    for name, tensor in tensors.items():
        if not torch.equal(read[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)):
            raise WeightMismatch(
                f"{path.name}: {name} read back differs from the tensor that was written: check the disk of "
                f"{path.parent}"
            )
