"""Convert torch_dist -> Hugging Face: export the weights of trained models, one tensor at a time, without optimizer and
RNG states.

A run's export is written to its store; `penstock convert --load` writes an export to a directory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from penstock.engines.megatron.checkpoints.layout import CheckpointLayout, checkpoint_layout
from penstock.engines.megatron.checkpoints.safe_load import METADATA, read_metadata
from penstock.engines.megatron.checkpoints.writer import is_weight
from penstock.stages.convert.adapters import MergedWeights, StoredAdapters, adapter_options, base_commit
from penstock.stages.convert.export_plan import SHARD_BYTES, ExportFile, ExportPlan, Origin, ParameterSource
from penstock.stages.convert.targets import DirectoryTarget, check_free_space, full_disk_as_store_error
from penstock.stages.convert.torch_dist_reader import TorchDistWeights
from penstock.stages.convert.work import OnBytes, Progress, WorkItems, WorkRecord, collect_file_records, write_files
from penstock.storage import disk
from penstock.storage.commit import CheckpointRef, Commit
from penstock.storage.failpoints import failpoint
from penstock.storage.store import Store

if TYPE_CHECKING:  # a driver that submits an export does not import Megatron
    from penstock.engines.megatron.weights import GatheredWeights

FORMAT = 2  # version of unfinished exports; those of another version are not resumed


def export_hf(
    store: Store,
    checkpoint: Commit | str | Path,
    origin: Origin,
    prefix: str,
    *,
    shard_bytes: int = SHARD_BYTES,
    inputs: dict[str, str] | None = None,
    weights: GatheredWeights | None = None,
) -> Commit:
    """Export a checkpoint into a store as a Hugging Face directory that `from_pretrained` and inference servers load.

    Args:
        store: store of the export.
        checkpoint: commit of a training checkpoint or converted model, or the path of its directory.
        origin: model of the checkpoint, and options of the export.
        prefix: key of the export; if a commit exists under this key, it is returned.
        shard_bytes: maximum size of a safetensors file in bytes.
        inputs: inputs to record in the commit; default: the checkpoint.
        weights: weights of a trainer that holds the policy of the checkpoint. They are exported without reading the
            checkpoint; the files are the same.

    Raises:
        ModelError: `checkpoint` is not a checkpoint, or does not match config.json.
        StoreError: the disk is full.
    """
    if commit := store.committed(prefix):
        return commit
    start, attempt = time.monotonic(), store.new_attempt(prefix)
    with full_disk_as_store_error(store), ExitStack() as stack:
        if weights is None:
            stored = stack.enter_context(open_weights(store, checkpoint, origin, checkpoint_layout(origin.shape())))
            meta, write_weights = stored.meta, partial(ExportPlan.write_files, weights=stored)
        else:
            meta, write_weights = weights.meta, partial(ExportPlan.write_gathered, weights=weights.tensors)
        plan = stack.enter_context(ExportPlan(meta, origin, shard_bytes))
        writing = stack.enter_context(store.writing(attempt))
        writing.hashes = write_weights(plan, writing.path)
        plan.write_config_and_index(writing.path)
        failpoint("export-writing")
    path = checkpoint.attempt or "" if isinstance(checkpoint, Commit) else str(checkpoint)
    return store.commit(
        prefix,
        Commit(
            kind="export",
            **_provenance(checkpoint),
            attempt=attempt,
            files=writing.files,
            inputs=inputs or {"checkpoint": path},
            config_hash=checkpoint.config_hash if isinstance(checkpoint, Commit) else "",
            seconds={"export": time.monotonic() - start},
            summary={"export/num_bytes": plan.num_bytes},
        ),
    )


def _provenance(checkpoint: Commit | str | Path) -> dict[str, Any]:
    """Return the commit fields that identify the exported policy: run, round index and policy version."""
    if isinstance(checkpoint, Commit):
        return {"run": checkpoint.run, "index": checkpoint.index, "policy_version": checkpoint.policy_version}
    return {"run": None, "index": 0, "policy_version": -1}


# ---- into a directory ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HFExport:
    """A planned export into a directory. Processes on any machine with access to checkpoint and target can work on
    it."""

    store: Store
    checkpoint: Commit | str
    origin: Origin
    target: DirectoryTarget
    identity: str  # name of the result; a hash of checkpoint, origin and options
    shard_bytes: int
    layout: CheckpointLayout

    @contextmanager
    def plan(self) -> Iterator[tuple[ExportPlan, ParameterSource, WorkItems[ExportFile]]]:
        """Yield the export plan, with its source files open, the weights of the checkpoint, and the work items."""
        with open_weights(self.store, self.checkpoint, self.origin, self.layout) as weights:
            with ExportPlan(weights.meta, self.origin, self.shard_bytes) as plan:
                yield plan, weights, WorkItems(self.target, plan.files)


def export_to(
    store: Store,
    checkpoint: Commit | str,
    origin: Origin,
    save: str,
    on_progress: OnBytes | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> CheckpointRef:
    """Export a checkpoint as a Hugging Face directory to `save`, in this process. Resumes an interrupted export.

    Args:
        store: store of `checkpoint`, if that is a commit.
        checkpoint: commit, or path of a directory with a torch_dist checkpoint.
        origin: model of the checkpoint, and options of the export.
        save: directory or URI of the export.
        on_progress: called with (bytes written, total bytes).
        shard_bytes: maximum size of a safetensors file in bytes.

    Raises:
        ModelError: `checkpoint` is not a checkpoint, or does not match config.json.
        OptionError: the directory `save` contains files that are not from this export.
        StoreError: the disk is full.
    """
    work = prepare_export(store, checkpoint, origin, save, shard_bytes)
    if isinstance(work, CheckpointRef):
        return work
    write_export(work, on_progress=on_progress)
    return finish_export(work)


def prepare_export(
    store: Store, checkpoint: Commit | str, origin: Origin, save: str, shard_bytes: int = SHARD_BYTES
) -> HFExport | CheckpointRef:
    """Return the existing result; if there is none, plan the export and check the free space. Arguments and errors as
    in `export_to`."""
    form = replace(origin, directory=Path())
    content = f"{FORMAT} {checkpoint_fingerprint(checkpoint)} {origin.fingerprint()} {form} {shard_bytes}"
    identity = xxhash.xxh3_64_hexdigest(content.encode())
    target = DirectoryTarget(save, "hf", identity, store.options)
    if existing := target.find_published(identity):
        return existing
    work = HFExport(store, checkpoint, origin, target, identity, shard_bytes, checkpoint_layout(origin.shape()))
    with work.plan() as (_, _, items):
        check_free_space(target.store, items.num_bytes_left())
    return work


def write_export(work: HFExport, rank: int = 0, num_ranks: int = 1, on_progress: OnBytes | None = None) -> None:
    """Write the unfinished files of this process: of all files, every `num_ranks`-th, starting with `rank`."""
    with work.plan() as (plan, weights, items):
        progress = Progress(plan.num_bytes, on_progress)

        def process_item(file: ExportFile) -> WorkRecord:
            hashes: dict[str, str] = {}

            def write(directory: Path) -> None:
                hashes[file.name] = plan.write_file(file, directory, weights, progress)

            files = write_files(work.target, write, lambda: hashes)
            return WorkRecord(files=tuple(files))

        items.run(process_item, progress, rank, num_ranks)
    failpoint("export-writing")


def finish_export(work: HFExport) -> CheckpointRef:
    """Write config, tokenizer and index, and publish the export."""
    checkpoint = work.checkpoint
    path = checkpoint.attempt or "" if isinstance(checkpoint, Commit) else str(Path(checkpoint).resolve())
    with work.plan() as (plan, _, items):
        files = collect_file_records(items.items_with_records())
        with full_disk_as_store_error(work.target.store):
            files += write_files(work.target, plan.write_config_and_index)
        commit = Commit(
            kind="export",
            **_provenance(checkpoint),
            attempt=work.target.attempt,
            files=files,
            inputs={"checkpoint": path},
            summary={"export/num_bytes": plan.num_bytes},
        )
        ref = work.target.publish(work.identity, commit)
        items.delete_records()
        return ref


def checkpoint_fingerprint(checkpoint: Commit | str) -> str:
    """Return a string that changes whenever the files of a checkpoint change."""
    if isinstance(checkpoint, Commit):
        return str(checkpoint.attempt)
    stats = [(path, path.stat()) for path in disk.files_in(Path(checkpoint))]
    files = [f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in stats]
    return f"{Path(checkpoint).resolve()} {files}"


@contextmanager
def open_weights(
    store: Store, checkpoint: Commit | str | Path, origin: Origin, layout: CheckpointLayout
) -> Iterator[ParameterSource]:
    """Yield the full weights of a checkpoint, read one at a time; adapters are added to their base."""
    adapters = adapter_options(checkpoint)
    with ExitStack() as stack:
        source = stack.enter_context(checkpoint_files(store, checkpoint))
        if adapters is None:
            yield TorchDistWeights(source, layout)
            return
        assert isinstance(checkpoint, Commit)
        base = stack.enter_context(checkpoint_files(store, base_commit(store, checkpoint)))
        yield MergedWeights(TorchDistWeights(base, layout), StoredAdapters(source, origin.shape(), adapters))


@contextmanager
def checkpoint_files(store: Store, checkpoint: Commit | str | Path) -> Iterator[Path]:
    """Yield a local directory with the index of a checkpoint and the files of its weights."""
    if not isinstance(checkpoint, Commit):
        yield Path(checkpoint)
        return
    with store.reading(checkpoint, only=[METADATA]) as directory:
        index = read_metadata(directory)
    tensors = [key for key, entry in index.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)]
    weights = {key for key in tensors if is_weight(key)}
    files = {entry.relative_path for place, entry in index.storage_data.items() if place.fqn in weights}
    with store.reading(checkpoint, only=[METADATA, *files]) as directory:
        yield directory
