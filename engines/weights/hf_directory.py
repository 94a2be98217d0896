"""Write weights as a Hugging Face directory, and adapters as a PEFT directory, that an engine can load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.engines.lora import CONFIG, WEIGHTS
from penstock.engines.weights.buckets import split_into_buckets
from penstock.storage.errors import WeightMismatch


def write_weights(
    target: Path, named: Iterable[tuple[str, Tensor]], model_path: Path, shard_bytes: int, *, verify: bool = False
) -> None:
    """Write weights as safetensors shards with an index, and copy the JSON files of `model_path` (config, tokenizer).

    Args:
        target: directory to write to; created if it does not exist.
        named: pairs of Hugging Face name and full tensor.
        model_path: Hugging Face directory of the same model.
        shard_bytes: maximum size of one safetensors file in bytes; a larger tensor gets a file of its own.
        verify: read every file back and compare it with the tensors bit for bit.
    """
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
