"""Convert torch_dist -> Hugging Face: export the weights of trained models, one tensor at a time, without optimizer and
RNG states.

The plan of an export has its tensors, their files and dtypes, and the changes to config.json; each file is a work
item. A run's export is written to its store; `penstock convert --load` writes an export to a directory.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from penstock.engines.families import family_of, tensor_layout
from penstock.engines.families.tensor_rows import TensorLayout
from penstock.engines.megatron.checkpoints.layout import CheckpointLayout, checkpoint_layout
from penstock.engines.megatron.checkpoints.safe_load import METADATA, read_metadata
from penstock.engines.megatron.checkpoints.writer import is_weight
from penstock.engines.weights.fp8_blocks import QUANTIZATION, quantize, scale_shape, should_quantize
from penstock.engines.weights.hf_headers import SCALE
from penstock.stages.convert.exported_adapters import MergedWeights, StoredAdapters, adapter_options, base_commit
from penstock.stages.convert.hf_checkpoint import (
    HFWeights,
    NamedTensor,
    Shard,
    ShardFile,
    TensorInfo,
    plan_shards,
    stack_expert,
    write_index,
    write_shard,
)
from penstock.stages.convert.targets import (
    CARRIED,
    SHARD_BYTES,
    DirectoryTarget,
    Origin,
    check_free_space,
    copy_assets,
    export_identity,
    full_disk_as_store_error,
)
from penstock.stages.convert.torch_dist_files import TorchDistWeights
from penstock.stages.convert.work import OnBytes, Progress, WorkItems, WorkRecord, collect_file_records, write_files
from penstock.storage.commit import CheckpointRef, Commit
from penstock.storage.disk import map_in_threads
from penstock.storage.errors import OptionError
from penstock.storage.failpoints import failpoint
from penstock.storage.store import Store

if TYPE_CHECKING:
    from penstock.engines.training import GatheredWeights


NUM_THREADS = 4  # threads that read a checkpoint; each holds up to three copies of a parameter
# Names of the routers' correction bias, in Megatron and in Hugging Face's multi-token prediction layers. It is exported
# in its own dtype, because rounding it to bf16 would change which experts are selected.
KEEPS_DTYPE = ("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias")


ParameterSource = TorchDistWeights | MergedWeights  # reads full Megatron parameters one at a time


@dataclass(frozen=True)
class ExportFile:
    """A work item: one weight file of the export."""

    shard: Shard
    # for each group of the shard: name of a Megatron parameter, or of a tensor copied from the origin
    sources: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.shard.file

    @property
    def num_bytes(self) -> int:
        return self.shard.num_bytes


class ExportPlan(AbstractContextManager["ExportPlan", None]):
    """The plan of a Hugging Face export. A context manager: it keeps the safetensors files open from which it copies
    the tensors that Megatron's model does not have (multi-token prediction).

    Args:
        meta: Megatron parameter name -> tensor on the meta device with the shape and dtype of the full parameter.
        origin: the model that the parameters belong to, and the options of the export.
        shard_bytes: maximum size of a safetensors file in bytes.
    """

    def __init__(self, meta: Mapping[str, Tensor], origin: Origin, shard_bytes: int = SHARD_BYTES) -> None:
        self.origin = origin
        self.layout: TensorLayout = tensor_layout(origin.shape())
        self.stacks_experts = family_of(self.layout.shape).stacked_experts
        if self.stacks_experts and origin.dtype == "fp8":
            raise OptionError(
                f"--export-dtype fp8 does not support the stacked experts of {self.layout.shape.architecture}: use bf16"
            )
        self.carried = _open_carried_weights(origin, self.layout)
        copied = self.carried.info if self.carried else {}
        full = {name: torch.empty(info.shape, dtype=info.dtype, device="meta") for name, info in copied.items()}
        full |= {name: meta[name] for name in self.layout.megatron_names()}
        names = [*self.layout.megatron_names(), *copied]
        groups = [
            [
                planned
                for name, part in self._split(source, full[source])
                for planned in self._plan_tensor_and_scales(source, name, part)
            ]
            for source in names
        ]
        self.shards = plan_shards(groups, shard_bytes)
        remaining = iter(names)
        self.files = [ExportFile(shard, tuple(next(remaining) for _ in shard.groups)) for shard in self.shards]
        self.num_bytes = sum(shard.num_bytes for shard in self.shards)

    def __exit__(self, *exception: object) -> None:
        if self.carried:
            self.carried.__exit__(*exception)

    def write_file(self, file: ExportFile, directory: Path, weights: ParameterSource, progress: Progress) -> str:
        """Write one weight file of the export from a checkpoint's `weights`; return its xxh3-128 hash."""

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for source in file.sources:  # a Megatron parameter, or a tensor that is copied from the origin's directory
                copied = self.carried.fetch(source) if self.carried and source in self.carried.info else None
                with weights.open_parameter(source) if copied is None else nullcontext(copied) as parameter:
                    for hf_name, tensor in self._convert_parameter(source, parameter):
                        yield hf_name, tensor
                        progress.add(tensor.nbytes)

        return write_shard(directory / file.name, file.shard, tensors())

    def write_files(self, directory: Path, weights: ParameterSource) -> dict[str, str]:
        """Write all weight files of the export in parallel from a checkpoint's `weights`; return file name -> xxh3-128
        hash."""
        progress = Progress(self.num_bytes, None)
        write = partial(self.write_file, directory=directory, weights=weights, progress=progress)
        hashes = map_in_threads(write, self.files, NUM_THREADS)
        return {file.name: digest for file, digest in zip(self.files, hashes)}

    def write_gathered(self, directory: Path, weights: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
        """Write all weight files of the export from (Megatron parameter name, full tensor) of every parameter, in any
        order; return file name -> xxh3-128 hash."""
        with ExitStack() as stack:
            files = [stack.enter_context(ShardFile(directory / file.name, file.shard)) for file in self.files]
            file_of = {source: files[index] for index, file in enumerate(self.files) for source in file.sources}
            carried = ((name, self.carried.fetch(name)) for name in self.carried.info) if self.carried else ()
            for source, parameter in chain(weights, carried):
                for name, tensor in self._convert_parameter(source, parameter.detach()):
                    file_of[source].write(name, tensor)
        return {file.path.name: file.hash() for file in files}

    def write_config_and_index(self, directory: Path) -> None:
        """Write config.json, the tokenizer's files and the index of the weight files."""
        copy_assets(self.origin.directory, directory)
        write_index(directory, self.shards)
        path = directory / "config.json"  # must describe the exported weights: loaders rely on it
        config = json.loads(path.read_text())
        new = dict(config)
        for entry, value in self._config_changes().items():
            if entry == "vocab_size" and "text_config" in new:
                new["text_config"] = {**new["text_config"], entry: value}
                continue
            key = "torch_dtype" if entry == "dtype" and "torch_dtype" in config else entry  # key of older transformers
            if value is None:
                new.pop(key, None)
            elif value or new.get(key):  # a zero only replaces a nonzero value; it is not added
                new[key] = value
        if new != config:
            path.write_text(json.dumps(new, indent=2) + "\n")

    def _split(self, source: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Return names and values of the Hugging Face tensors of `source`, which names a Megatron parameter or a tensor
        that is copied from the origin's directory."""
        if self.carried is not None and source in self.carried.info:
            return [(source, tensor)]
        tensors = self.layout.to_hf(source, tensor)
        return stack_expert(tensors) if self.stacks_experts else tensors

    def _plan_tensor_and_scales(self, source: str, name: str, tensor: Tensor) -> list[NamedTensor]:
        """Return name, dtype and shape of an exported tensor and, if it is quantized to fp8, of its scales."""
        info = TensorInfo(tensor.dtype, tuple(tensor.shape))
        if self.origin.dtype is None or source.endswith(KEEPS_DTYPE):
            return [(name, info)]
        if self.origin.dtype != "fp8":
            return [(name, replace(info, dtype=getattr(torch, self.origin.dtype)))]
        if not should_quantize(name, info.shape):
            return [(name, replace(info, dtype=torch.bfloat16))]
        scales = TensorInfo(torch.float32, scale_shape(info.shape))
        return [(name, replace(info, dtype=torch.float8_e4m3fn)), (name + SCALE, scales)]

    def _convert_parameter(self, source: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield names and values of the tensors that are exported from `source`, a parameter with the value
        `parameter`, in the dtype of the export; for tensors that are quantized to fp8, also their scales."""
        for name, tensor in self._split(source, parameter):
            planned = self._plan_tensor_and_scales(source, name, tensor)
            if len(planned) == 1:
                yield name, tensor.to(planned[0][1].dtype)
            else:
                yield from zip([planned_name for planned_name, _ in planned], quantize(tensor), strict=True)

    def _config_changes(self) -> dict[str, Any]:
        """Return the config.json entries that must change to describe the exported weights; None removes an entry."""
        infos = dict(named for shard in self.shards for named in shard.tensors)
        changes: dict[str, Any] = {"quantization_config": None}
        if self.origin.dtype == "fp8":
            matrices = [name for name, info in infos.items() if name.endswith(".weight") and len(info.shape) == 2]
            plain = sorted(name.removesuffix(".weight") for name in matrices if name + SCALE not in infos)
            changes["quantization_config"] = {**QUANTIZATION, "modules_to_not_convert": plain}
        if self.origin.vocab_size:
            changes["vocab_size"] = self.origin.vocab_size
        if self.carried is None:
            changes["num_nextn_predict_layers"] = 0
        sizes: Counter[torch.dtype] = Counter()
        for name, info in infos.items():
            sizes[info.dtype] += 0 if name.endswith(SCALE) else info.num_bytes
        sizes.pop(torch.float8_e4m3fn, None)  # unquantized weights have the compute dtype
        changes["dtype"] = str(sizes.most_common(1)[0][0]).removeprefix("torch.")
        return changes


def _open_carried_weights(origin: Origin, layout: TensorLayout) -> HFWeights | None:
    """Return the tensors (multi-token prediction) that are copied from the origin's directory, because Megatron's model
    does not have them; None if there are none."""
    if (origin.directory / CARRIED).is_file():
        return HFWeights(origin.directory, [origin.directory / CARRIED])
    if origin.mtp == "skip":
        return None
    weights = HFWeights(origin.directory)
    weights.info = {name: info for name, info in weights.info.items() if layout.is_untrained(name)}
    return weights if weights.info else None


# ---- export ----------------------------------------------------------------------------------------------------------


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
        prefix: key of the export; if a commit exists under this key, it is returned.
        inputs: inputs to record in the commit; default: the checkpoint.
        weights: weights of a trainer that holds the policy of the checkpoint. They are exported without reading the
            checkpoint; the files are the same.
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
            state={"identity": export_identity(checkpoint, origin, shard_bytes)},
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

    `checkpoint` is a commit in `store`, or the path of a directory with a torch_dist checkpoint.
    """
    work = prepare_export(store, checkpoint, origin, save, shard_bytes)
    if isinstance(work, CheckpointRef):
        return work
    write_export(work, on_progress=on_progress)
    return finish_export(work)


def prepare_export(
    store: Store, checkpoint: Commit | str, origin: Origin, save: str, shard_bytes: int = SHARD_BYTES
) -> HFExport | CheckpointRef:
    """Return the existing result; if there is none, plan the export and check the free space. Arguments as in
    `export_to`."""
    identity = export_identity(checkpoint, origin, shard_bytes)
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
            files = write_files(
                work.target, lambda directory: {file.name: plan.write_file(file, directory, weights, progress)}
            )
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


@contextmanager
def open_weights(
    store: Store, checkpoint: Commit | str | Path, origin: Origin, layout: CheckpointLayout
) -> Iterator[ParameterSource]:
    """Yield the full weights of a checkpoint, read one at a time; adapters are merged into their base weights."""
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
