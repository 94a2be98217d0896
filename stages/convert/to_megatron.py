"""Convert torch_dist -> torch_dist with other tensor names: export a run's checkpoint for Megatron, or import a
Megatron checkpoint into a store.

Only the model weights are copied, one parameter at a time; optimizer and RNG states are not.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import xxhash

from penstock.engines.megatron.checkpoints.layout import (
    MegatronNames,
    ShardSlice,
    checkpoint_layout,
    write_common_files,
)
from penstock.stages.convert.exported_adapters import adapter_options
from penstock.stages.convert.targets import (
    ASSETS_DIRECTORY,
    CARRIED,
    DirectoryTarget,
    StoreTarget,
    Target,
    assets_hash,
    check_free_space,
    copy_assets,
    megatron_directory,
)
from penstock.stages.convert.to_hf import Origin, checkpoint_files, checkpoint_fingerprint
from penstock.stages.convert.torch_dist import Slice, TorchDistWeights, group_units, write_metadata, write_unit
from penstock.stages.convert.work import OnBytes, Progress, WorkItems, collect_file_records, write_files
from penstock.storage.commit import CheckpointRef, Commit, Frozen, commit_key
from penstock.storage.errors import OptionError
from penstock.storage.store import Store

FORMAT = 1  # version of unfinished exports; those of another version are not resumed


class ImportMemo(Frozen):
    """Name of the converted model that was imported from a directory with a certain state."""

    identity: str


def export_megatron(
    store: Store,
    checkpoint: Commit | str,
    origin: Origin,
    save: str,
    names: MegatronNames,
    on_progress: OnBytes | None = None,
    iteration: int | None = None,
) -> CheckpointRef:
    """Export the model weights of a checkpoint to `save`, as a directory that Megatron-core loads.

    `checkpoint` is a commit in `store`, or the path of a directory with a torch_dist checkpoint. `iteration`: training
    iteration whose checkpoint the directory has; None: an untrained one (`release`).
    """
    target, identity = export_target(store, checkpoint, origin, save, names, iteration)
    if existing := target.find_published(identity):
        return existing
    with checkpoint_files(store, checkpoint) as source:
        return copy_megatron_weights(source, origin, target, identity, names, on_progress)


def export_target(
    store: Store, checkpoint: Commit | str, origin: Origin, save: str, names: MegatronNames, iteration: int | None
) -> tuple[DirectoryTarget, str]:
    """Return the target of `export_megatron`, and the identity of its result."""
    if adapter_options(checkpoint) is not None:
        raise OptionError(
            "the checkpoint has LoRA adapters, which are merged only in Hugging Face files: use --format hf, and "
            "convert the result"
        )
    identity = _identity(checkpoint, origin, names) + ("" if iteration is None else f"-{iteration}")
    return DirectoryTarget(save, "torch_dist", identity, store.options, iteration), identity


def import_megatron_checkpoint(store: Store, directory: str, origin: Origin) -> CheckpointRef:
    """Copy the model weights of a Megatron checkpoint into the store, unless the store already has them. `origin` is a
    model of the same shape; its config.json is used if the checkpoint has none."""
    source = megatron_directory(directory)
    assert source is not None, f"{directory} is not a torch_dist checkpoint"
    assets = source / ASSETS_DIRECTORY
    if (assets / "config.json").is_file():
        origin = Origin(assets, family_path=origin.family_path)
    name = _identity(str(source), origin, "local")
    target, memo = StoreTarget(store, name), f"models/sources/megatron-{name}.json"
    known = store.read_record(ImportMemo, memo)
    if known and (existing := target.find_published(known.identity)):
        return existing
    ref = copy_megatron_weights(source, origin, target, None, "local")
    identity = ref.key.removeprefix("models/").removesuffix(commit_key(""))
    store.create(memo, ImportMemo(identity=identity).model_dump_json().encode())
    return ref


def copy_megatron_weights(
    source: Path,
    origin: Origin,
    target: Target,
    identity: str | None,
    names: MegatronNames,
    on_progress: OnBytes | None = None,
) -> CheckpointRef:
    """Copy the model weights of a torch_dist directory to a target. Resumes an interrupted copy.

    Args:
        source: directory with `.metadata`; its tensors may have local or TransformerEngine names.
        identity: name of the result; None: derived from a hash of its content.
        names: tensor names of the result.
    """
    assets_dir, shape = origin.directory, origin.shape()
    layout = checkpoint_layout(shape)
    weights, result = TorchDistWeights(source, layout), layout.with_key_names(names)
    slices: dict[Slice, tuple[str, ShardSlice]] = {
        Slice(piece.key, piece.offset, piece.sizes, weights.dtype(name)): (name, piece)
        for name, pieces in result.slices.items()
        for piece in pieces
    }
    items = WorkItems(target, group_units(slices))
    check_free_space(target.store, items.num_bytes_left())
    progress = Progress(items.num_bytes, on_progress)

    def content(piece: Slice) -> Iterator[memoryview]:
        name, stored = slices[piece]
        with weights.open_parameter(name) as tensor:
            yield tensor[stored.part].contiguous().view(-1).view(torch.uint8).numpy().data

    items.run(lambda unit: write_unit(target, unit, content, progress.add), progress)
    records = items.items_with_records()

    def write_index_and_assets(directory: Path) -> None:
        write_common_files(directory, shape, (target.iteration or 0) if isinstance(target, DirectoryTarget) else 0)
        spans = [(unit, record.spans) for unit, record in records]
        objects = result.extra_state_keys(names) if isinstance(target, DirectoryTarget) else []
        write_metadata(directory, result, spans, objects)
        copy_assets(assets_dir, directory / ASSETS_DIRECTORY)
        if (assets_dir / CARRIED).is_file():
            shutil.copyfile(assets_dir / CARRIED, directory / ASSETS_DIRECTORY / CARRIED)

    files = collect_file_records(records)
    content_hash = xxhash.xxh3_128_hexdigest(f"{[file.xxh3 for file in files]} {assets_hash(assets_dir)}".encode())
    commit = Commit(
        kind="model",
        policy_version=0,
        attempt=target.attempt,
        files=files + write_files(target, write_index_and_assets),
        inputs={"checkpoint": str(source)},
        summary={"convert/num_bytes": items.num_bytes},
        state={"shape": shape.model_dump(), "headers": "", "carried": 0, "skipped": {"count": 0, "bytes": 0}},
    )
    ref = target.publish(identity or f"megatron-{content_hash}", commit)
    items.delete_records()
    return ref


def _identity(checkpoint: Commit | str, origin: Origin, names: MegatronNames) -> str:
    """Return the name of the result: a hash of the checkpoint's files, the origin and the tensor names."""
    return xxhash.xxh3_64_hexdigest(
        f"{FORMAT} {checkpoint_fingerprint(checkpoint)} {origin.fingerprint()} {names}".encode()
    )
