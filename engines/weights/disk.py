"""Weights over a file system: for engines of another host, another interpreter or another torch."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from engines.sglang.wire import WeightUpdate, buckets
from engines.weights.publisher import BUCKET_BYTES
from storage.faults import reach


class DiskPublisher:
    """Writes a Hugging Face directory, lets the engines load it, removes it."""

    def __init__(self, urls: list[str], model_path: Path, directory: Path, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.urls = urls
        self.model_path = model_path
        self.directory = directory
        self.bucket_bytes = bucket_bytes

    def publish(self, named: Iterable[tuple[str, Tensor]], version: str) -> None:
        """See `WeightPublisher`."""
        target = (self.directory / f"weights-{uuid.uuid4().hex[:12]}").absolute()
        reach("publish-before")
        try:
            write_weights(target, named, self.model_path, self.bucket_bytes)
            with WeightUpdate(self.urls, version) as update:
                update.load_from_disk(str(target))
        finally:
            shutil.rmtree(target, ignore_errors=True)
        reach("publish-after")


def write_weights(target: Path, named: Iterable[tuple[str, Tensor]], model_path: Path, shard_bytes: int) -> None:
    """Write safetensors shards with their index, and every small JSON file of `model_path` beside them."""
    target.mkdir(parents=True)
    for file in model_path.glob("*.json"):
        if not file.name.endswith(".index.json"):
            shutil.copy(file, target)
    places: dict[str, str] = {}
    for number, (bucket, _) in enumerate(buckets(named, shard_bytes)):
        name = f"model-{number:05d}.safetensors"
        save_file({key: tensor.detach().cpu().contiguous() for key, tensor in bucket}, target / name, metadata={"format": "pt"})
        places |= {key: name for key, _ in bucket}
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
