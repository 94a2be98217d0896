"""Write weights as a Hugging Face directory that an engine can load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from penstock.engines.weights.buckets import split_into_buckets


def write_weights(target: Path, named: Iterable[tuple[str, Tensor]], model_path: Path, shard_bytes: int) -> None:
    """Write weights as safetensors shards with an index, and copy the JSON files of `model_path` (config, tokenizer).

    Args:
        target: directory to create.
        named: pairs of Hugging Face name and full tensor.
        model_path: Hugging Face directory of the same model.
        shard_bytes: maximum size of one safetensors file in bytes; a larger tensor gets a file of its own.
    """
    target.mkdir(parents=True)
    for file in model_path.glob("*.json"):
        if not file.name.endswith(".index.json"):
            shutil.copy(file, target)
    weight_map: dict[str, str] = {}
    for number, (bucket, _) in enumerate(split_into_buckets(named, shard_bytes)):
        shard = f"model-{number:05d}.safetensors"
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in bucket}
        save_file(tensors, target / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, shard)
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
