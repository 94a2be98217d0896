"""Hugging Face -> torch_dist: what a run starts from. Streamed, so that no model has to fit into memory.

The result lies under `models/<fingerprint>` in the store and is shared by all runs that start from the same files.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from engines.megatron.shape import ModelShape
from engines.megatron.stored import stored_model
from stages.convert.hf_files import HFWeights, TensorInfo, copy_assets, fingerprint
from stages.convert.torch_dist_files import write_tensors
from stages.convert.verify import check_source, verify_conversion
from storage.faults import reach
from storage.layouts import layout_for
from storage.layouts.ops import Layout
from storage.refs import CheckpointRef, Commit, commit_key
from storage.store import Store

ASSETS_DIRECTORY = "hf_assets"  # inside the converted model: config.json, tokenizer and so on
Progress = Callable[[int, int], None]  # bytes done, bytes in all


def convert_hf(store: Store, hf_dir: str | Path, on_progress: Progress | None = None) -> CheckpointRef:
    """Convert a model and verify the result bit for bit; a model that was converted before is only looked up.

    Args:
        store: where the result goes.
        hf_dir: Hugging Face directory.
        on_progress: called after every tensor, first for writing it, then for checking it.

    Raises:
        ValueError: an unknown architecture, damaged files, or tensors that do not fit config.json.
    """
    hf_dir = Path(hf_dir)
    shape = ModelShape.from_hf(hf_dir)
    name = fingerprint(hf_dir)
    prefix = f"models/{name}"
    commit = store.committed(prefix) or _convert(store, hf_dir, shape, prefix, on_progress or (lambda done, total: None))
    return CheckpointRef(key=commit_key(prefix), uri=f"{store.uri}/{commit.attempt}", format="torch_dist", policy_version=0)


def _convert(store: Store, hf_dir: Path, shape: ModelShape, prefix: str, on_progress: Progress) -> Commit:
    start, layout, stored = time.monotonic(), layout_for(shape), stored_model(shape)
    attempt = store.new_attempt(prefix)
    with HFWeights(hf_dir) as weights:
        check_source(layout, stored, weights)
        total = sum(weights.info[name].num_bytes for name in layout.hf_names())
        with store.writing(attempt) as writing:
            write_tensors(writing.path, stored, _dtypes(layout, weights.info), _resolver(layout, weights, total, on_progress))
            reach("convert-writing")
            written = time.monotonic()
            report = verify_conversion(weights, writing.path, layout, stored, lambda done: on_progress(total + done, 2 * total))
            verified = time.monotonic()
            copy_assets(hf_dir, writing.path / ASSETS_DIRECTORY)
    return store.commit(
        prefix,
        Commit(
            kind="model",
            policy_version=0,
            attempt=attempt,
            files=writing.files,
            inputs={"hf_checkpoint": str(hf_dir.resolve())},
            seconds={"write": written - start, "verify": verified - written, "commit": time.monotonic() - verified},
            summary={"convert/num_tensors": report.num_tensors, "convert/num_bytes": report.num_bytes},
            state={"shape": shape.model_dump()},
        ),
    )


def _dtypes(layout: Layout, info: dict[str, TensorInfo]) -> dict[str, torch.dtype]:
    """Number types of Megatron's parameters: those of the Hugging Face tensors they are made of."""
    return {name: info[layout.hf_of(name)[0]].dtype for name in layout.megatron_names()}


def _resolver(layout: Layout, weights: HFWeights, total: int, on_progress: Progress) -> Callable[[str], Tensor]:
    """Gives a Megatron parameter by name, and tells how far it is."""
    done = 0

    def resolve(name: str) -> Tensor:
        nonlocal done
        tensor = layout.to_megatron(name, weights.fetch)
        done += tensor.nbytes
        on_progress(done, 2 * total)
        return tensor

    return resolve
