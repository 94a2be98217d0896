"""torch_dist -> Hugging Face: how a trained model leaves. Streamed like the way in; optimizer and random state stay behind."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from engines.megatron.shape import ModelShape
from engines.megatron.stored import stored_model
from stages.convert.hf_files import ShardWriter, TensorInfo, copy_assets
from stages.convert.torch_dist_files import TorchDistWeights
from storage.faults import reach
from storage.layouts import layout_for
from storage.layouts.ops import Layout
from storage.refs import Commit
from storage.store import Store

SHARD_BYTES = 5_000_000_000


def export_hf(
    store: Store,
    checkpoint: Commit | str | Path,
    assets_dir: str | Path,
    prefix: str,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    inputs: dict[str, str] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Commit:
    """Write a checkpoint as a Hugging Face directory that `from_pretrained` and inference servers load.

    Args:
        store: where the result goes.
        checkpoint: commit of a training checkpoint or converted model, or a directory with one.
        assets_dir: directory with the model's config.json, tokenizer and so on; they are carried over.
        prefix: key under which the export lies; if it is committed already, that commit is returned.
        dtype: number type of the weights ("bfloat16", ...); by default the stored one.
        shard_bytes: largest size of a safetensors file.
        inputs: recorded in the commit, e.g. `{"checkpoint": key}`.
        on_progress: called after every parameter with the bytes written and the bytes in all.

    Raises:
        ValueError: no checkpoint, or one that does not fit config.json.
    """
    if commit := store.committed(prefix):
        return commit
    start, assets_dir = time.monotonic(), Path(assets_dir)
    origin = checkpoint if isinstance(checkpoint, Commit) else None
    attempt = store.new_attempt(prefix)
    with _files(store, checkpoint) as source, store.writing(attempt) as writing:
        copy_assets(assets_dir, writing.path)
        num_bytes = write_hf(source, writing.path, dtype, shard_bytes, on_progress)
        reach("export-writing")
    return store.commit(
        prefix,
        Commit(
            kind="export",
            run=origin.run if origin else None,
            index=origin.index if origin else 0,
            policy_version=origin.policy_version if origin else -1,
            attempt=attempt,
            files=writing.files,
            inputs=inputs or {"checkpoint": origin.attempt or "" if origin else str(checkpoint)},
            config_hash=origin.config_hash if origin else "",
            seconds={"export": time.monotonic() - start},
            summary={"export/num_bytes": num_bytes},
        ),
    )


def write_hf(
    source: Path, target: Path, dtype: str | None, shard_bytes: int, on_progress: Callable[[int, int], None] | None = None
) -> int:
    """Write the weights of a checkpoint beside the config.json that lies in `target`. Returns the number of bytes."""
    shape = ModelShape.from_hf(target)
    layout, stored = layout_for(shape), stored_model(shape)
    weights = TorchDistWeights(source, stored)
    number_type = getattr(torch, dtype) if dtype else None
    plan = [
        (hf_name, TensorInfo(number_type or tensor.dtype, tuple(tensor.shape)))
        for name in layout.megatron_names()
        for hf_name, tensor in layout.to_hf(name, torch.empty(stored.shape(name), dtype=weights.dtype(name), device="meta"))
    ]
    writer = ShardWriter(target, plan, shard_bytes)
    writer.write(_tensors(layout, weights, number_type, lambda done: on_progress and on_progress(done, writer.total)))
    _say_dtype(target / "config.json", {info.dtype for _, info in plan})
    return writer.total


def _tensors(
    layout: Layout, weights: TorchDistWeights, number_type: torch.dtype | None, on_progress: Callable[[int], object]
) -> Iterator[tuple[str, Tensor]]:
    done = 0
    for name in layout.megatron_names():
        for hf_name, tensor in layout.to_hf(name, weights.fetch(name)):
            converted = tensor.to(number_type or tensor.dtype)
            done += converted.nbytes
            yield hf_name, converted
        on_progress(done)


def _say_dtype(path: Path, dtypes: set[torch.dtype]) -> None:
    """Let config.json name a number type that the files have: loaders believe it more than the files."""
    config = json.loads(path.read_text())
    key = "torch_dtype" if "torch_dtype" in config else "dtype"  # older transformers, newer transformers
    if config.get(key) not in {str(dtype).removeprefix("torch.") for dtype in dtypes}:
        widest = max(dtypes, key=lambda dtype: dtype.itemsize)
        path.write_text(json.dumps({**config, key: str(widest).removeprefix("torch.")}, indent=2) + "\n")


def _files(store: Store, checkpoint: Commit | str | Path) -> AbstractContextManager[Path]:
    return store.reading(checkpoint) if isinstance(checkpoint, Commit) else nullcontext(Path(checkpoint))
