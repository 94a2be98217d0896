"""Convert Hugging Face -> torch_dist, the format that runs start from, and torch_dist -> torch_dist with other tensor
names. The model need not fit into memory.

The result is `models/<fingerprint>` in the store, shared by all runs that start from the same files, or the directory
of `--save`. A conversion has three steps: `prepare_conversion` plans it, `write_units` writes the weights (in any
number of processes), and `finish_conversion` publishes the result.

From torch_dist, a run's checkpoint is exported for Megatron, or a Megatron checkpoint is imported into a store. Only
the model weights are copied, one parameter at a time; optimizer and RNG states are not.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash

from penstock.engines.families import read_shape, tensor_layout
from penstock.engines.families.family import source_hash
from penstock.engines.families.shape import ModelShape
from penstock.engines.megatron.checkpoints.layout import (
    CheckpointLayout,
    MegatronNames,
    checkpoint_layout,
    write_common_files,
)
from penstock.engines.weights.hf_headers import check_finite
from penstock.stages.convert.config import Mtp
from penstock.stages.convert.conversion_check import check_source_tensors, compare_logits, verify_conversion
from penstock.stages.convert.exported_adapters import adapter_options
from penstock.stages.convert.hf_checkpoint import CODES, HFWeights, Shard, write_shard
from penstock.stages.convert.targets import (
    ASSETS_DIRECTORY,
    CARRIED,
    DirectoryTarget,
    FingerprintMemo,
    Origin,
    StoreTarget,
    Target,
    assets_hash,
    check_free_space,
    checkpoint_fingerprint,
    conversion_identity,
    copy_assets,
    fingerprint_key,
    header_hash,
    megatron_directory,
    model_fingerprint,
    origin_of_copy,
    record_fingerprint,
    stat_hash,
)
from penstock.stages.convert.to_hf import checkpoint_files
from penstock.stages.convert.torch_dist_files import (
    UNIT_BYTES,
    Slice,
    TorchDistWeights,
    WorkUnit,
    group_units,
    plan_units,
    write_metadata,
    write_unit,
)
from penstock.stages.convert.work import OnBytes, Progress, WorkItems, WorkRecord, collect_file_records, write_files
from penstock.storage.commit import CheckpointRef, Commit, Frozen, commit_key
from penstock.storage.disk import hash_file, map_in_threads
from penstock.storage.errors import ModelError, OptionError
from penstock.storage.failpoints import failpoint
from penstock.storage.store import Store

FORMAT = 2  # format version of unfinished conversions; unfinished conversions of another version are not resumed
COPY_FORMAT = 1  # format version of unfinished copies of torch_dist checkpoints, used in the same way


@dataclass(frozen=True)
class ConversionOptions:
    """The options that, together with the source, determine the result of a conversion."""

    mtp: Mtp = "skip"  # whether to store the tensors of multi-token prediction layers
    save: str | None = None  # directory or URI for the result, in place of the store
    names: MegatronNames = "local"  # tensor names of the result
    family_path: str | None = None  # --model-family-path
    unit_bytes: int = UNIT_BYTES  # maximum size of a weight file of the result


@dataclass(frozen=True)
class SourceHash:
    """A work item: hash one weight file of the source."""

    path: Path
    num_bytes: int = 0  # progress counts written bytes only

    @property
    def name(self) -> str:
        return f"hash-{self.path.name}"


@dataclass(frozen=True)
class Conversion:
    """A planned conversion. Processes on any machine with access to source and target can work on it."""

    hf_dir: Path
    shape: ModelShape
    checkpoint: CheckpointLayout
    target: Target
    work_items: WorkItems[SourceHash | WorkUnit]
    options: ConversionOptions
    stat_hash: str  # hash of sizes and times of the source files (`targets.stat_hash`)
    fingerprint: str | None  # fingerprint of the source files; None: computed during the conversion
    untrained: tuple[str, ...]  # names of source tensors that Megatron's model does not have
    untrained_bytes: int
    started_at: float = field(default_factory=time.time)


def convert_hf(
    store: Store,
    hf_dir: str | Path,
    on_progress: OnBytes | None = None,
    *,
    verify: bool = True,
    check_logits: bool = False,
    options: ConversionOptions = ConversionOptions(),
) -> CheckpointRef:
    """Convert a model in this process, unless the result exists, into `store` or `options.save`.

    Args:
        on_progress: called with (bytes done, total bytes); `verify` counts each byte when written and when verified.
        verify: read the result back and compare it with the source bit for bit.
        check_logits: compare logits of a few tokens with transformers, which is then imported.
    """
    work = prepare_conversion(store, hf_dir, options)
    if isinstance(work, CheckpointRef):
        return work
    write_units(work, on_progress=on_progress and (lambda done, total: on_progress(done, total * (2 if verify else 1))))
    return finish_conversion(work, verify=verify, check_logits=check_logits, on_progress=on_progress)


def prepare_conversion(
    store: Store, hf_dir: str | Path, options: ConversionOptions = ConversionOptions()
) -> Conversion | CheckpointRef:
    """Return the existing result; if there is none, check the source by its file headers and plan the conversion. See
    `convert_hf`."""
    hf_dir = Path(hf_dir).resolve()
    shape = read_shape(hf_dir, options.family_path)
    with HFWeights(hf_dir) as weights:
        layout, stat = tensor_layout(shape), stat_hash(hf_dir)
        untrained = tuple(sorted(name for name in weights.info if layout.is_untrained(name)))
        form = f"{options.mtp if untrained else ''}{'' if options.names == 'local' else f' {options.names}'}"
        form += f" {source_hash(shape.family_path)}" if shape.family_path else ""
        name = xxhash.xxh3_64_hexdigest(f"{FORMAT} {options.unit_bytes} {stat} {form}".encode())
        target: Target = StoreTarget(store, name)
        if options.save:
            target = DirectoryTarget(options.save, "torch_dist", name, store.options)
        fingerprint = _known_fingerprint(store, target, hf_dir, stat)
        keeps_mtp = bool(untrained) and options.mtp == "keep"
        known = fingerprint and conversion_identity(fingerprint, shape, keeps_mtp, options.names)
        if known and (existing := target.find_published(known)):
            return existing
        weights.read_ahead()
        checkpoint = checkpoint_layout(shape)
        check_source_tensors(layout, checkpoint, weights)
        checkpoint = checkpoint.with_key_names(options.names)
        units = plan_units(layout, checkpoint, weights, options.unit_bytes)
        items = WorkItems(target, _work_items(weights, units, with_hashes=fingerprint is None))
        untrained_bytes = sum(weights.info[name].num_bytes for name in untrained)
    check_free_space(target.store, items.num_bytes_left())
    return Conversion(hf_dir, shape, checkpoint, target, items, options, stat, fingerprint, untrained, untrained_bytes)


def _known_fingerprint(store: Store, target: Target, hf_dir: Path, stat: str) -> str | None:
    """Return the source's fingerprint if it is stored or needed before the conversion, otherwise None.

    Reading a large source twice, to hash it and to convert it, would take longer than converting it. So weight files
    are hashed during the conversion, unless the target may already have the same model.
    """
    if isinstance(target, DirectoryTarget):
        return model_fingerprint(hf_dir) if target.is_occupied() else None
    if memo := store.read_record(FingerprintMemo, fingerprint_key(stat)):
        return memo.fingerprint
    names, headers = store.committed_names("models"), header_hash(hf_dir)
    commits = map_in_threads(lambda name: store.committed(f"models/{name}"), names, 16)
    if not any(commit is not None and commit.state.get("headers") == headers for commit in commits):
        return None
    fingerprint = model_fingerprint(hf_dir)
    record_fingerprint(store, stat, fingerprint)
    return fingerprint


def _work_items(weights: HFWeights, units: list[WorkUnit], with_hashes: bool) -> list[SourceHash | WorkUnit]:
    """Return all work items in the order of the source files, so that the second read of a file comes from the page
    cache."""
    files = {path: index for index, path in enumerate(weights.files)}
    order: list[tuple[int, int, SourceHash | WorkUnit]] = []
    for unit in units:
        last_file = max(files[weights.locations[rows.name].path] for piece in unit.slices for rows in piece.rows)
        order.append((last_file, 1, unit))
    if with_hashes:
        order += [(index, 0, SourceHash(path)) for path, index in files.items()]
    return [item for _, _, item in sorted(order, key=lambda entry: entry[:2])]


def write_units(work: Conversion, rank: int = 0, num_ranks: int = 1, on_progress: OnBytes | None = None) -> None:
    """Run the unfinished work items of process `rank` of `num_ranks`. `on_progress` is called with (bytes written by
    this process, total bytes)."""
    progress = Progress(work.work_items.num_bytes, on_progress)
    with HFWeights(work.hf_dir) as weights:

        def content(piece: Slice) -> Iterator[memoryview]:
            for rows in piece.rows:
                path, dtype = weights.locations[rows.name].path, CODES[weights.info[rows.name].dtype]
                for chunk in weights.read_rows(rows.name, rows.start, rows.stop):
                    check_finite(path, rows.name, chunk, dtype)
                    yield chunk

        def process_item(item: SourceHash | WorkUnit) -> WorkRecord:
            if isinstance(item, SourceHash):
                return WorkRecord(xxh3=hash_file(item.path))
            return write_unit(work.target, item, content, progress.add)

        work.work_items.run(process_item, progress, rank, num_ranks)
    failpoint("convert-writing")


def finish_conversion(
    work: Conversion, *, verify: bool = True, check_logits: bool = False, on_progress: OnBytes | None = None
) -> CheckpointRef:
    """Write index, config and tokenizer of a converted model, verify it, and publish it. See `convert_hf`."""
    records, written_at = work.work_items.items_with_records(), time.time()
    if stat_hash(work.hf_dir) != work.stat_hash:
        raise ModelError(
            f"files in {work.hf_dir} changed during the conversion: repeat the conversion while nothing writes there"
        )
    hashes = {item.path.name: record.xxh3 for item, record in records if isinstance(item, SourceHash)}
    source_fingerprint = work.fingerprint or model_fingerprint(work.hf_dir, hashes)
    keeps_mtp = work.options.mtp == "keep"
    carried = work.untrained if keeps_mtp else ()
    spans = [(item, record.spans) for item, record in records if isinstance(item, WorkUnit)]

    def write_index_and_assets(directory: Path) -> None:
        _write_index(directory, work.target, work.shape, work.checkpoint, work.options.names, spans)
        copy_assets(work.hf_dir, directory / ASSETS_DIRECTORY)
        if carried:
            with HFWeights(work.hf_dir) as weights:
                shard = Shard(CARRIED, [[(name, weights.info[name])] for name in carried])
                tensors = ((name, weights.fetch(name)) for name in carried)
                write_shard(directory / ASSETS_DIRECTORY / CARRIED, shard, tensors)

    commit = Commit(
        kind="model",
        policy_version=0,
        attempt=work.target.attempt,
        files=collect_file_records(records) + write_files(work.target, write_index_and_assets),
        inputs={"hf_checkpoint": str(work.hf_dir), **origin_of_copy(work.hf_dir)},
        seconds={"write": written_at - work.started_at},
        summary={"convert/num_bytes": work.work_items.num_bytes},
        state={
            "shape": work.shape.model_dump(),
            "headers": header_hash(work.hf_dir),
            "carried": len(carried),
            "skipped": {
                "count": len(work.untrained) - len(carried),
                "bytes": 0 if keeps_mtp else work.untrained_bytes,
            },
        },
    )
    if verify or check_logits:
        commit = _compare_with_source(work, commit, verify, check_logits, on_progress)
    identity = conversion_identity(source_fingerprint, work.shape, bool(carried), work.options.names)
    ref = work.target.publish(identity, commit)
    if isinstance(work.target, StoreTarget):
        record_fingerprint(work.target.store, work.stat_hash, source_fingerprint)
    work.work_items.delete_records()
    return ref


def _write_index(
    directory: Path,
    target: Target,
    shape: ModelShape,
    checkpoint: CheckpointLayout,
    names: MegatronNames,
    spans: list[tuple[WorkUnit, tuple[tuple[int, int], ...]]],
) -> None:
    """Write the index of a checkpoint and the two common files that Megatron needs (`write_common_files`). `spans`: the
    work units, each with (first byte, length) of its slices in the file."""
    if isinstance(target, StoreTarget):  # only Penstock reads stores, and it does not need `_extra_state`
        iteration, objects = 0, []
    else:
        iteration, objects = target.iteration or 0, checkpoint.extra_state_keys(names)
    write_common_files(directory, shape, iteration)
    write_metadata(directory, checkpoint, spans, objects)


def _compare_with_source(
    work: Conversion, commit: Commit, verify: bool, check_logits: bool, on_progress: OnBytes | None
) -> Commit:
    """Compare every tensor of the written checkpoint with its source, and its logits with those of transformers. Return
    the checkpoint's commit with the results, so that later checks do not repeat the comparisons."""
    seconds, summary, state = dict(commit.seconds), dict(commit.summary), dict(commit.state)
    with work.target.store.reading(commit) as directory:
        start = time.monotonic()
        if verify:
            progress = Progress(2 * work.work_items.num_bytes, on_progress)
            progress.add(work.work_items.num_bytes)
            with HFWeights(work.hf_dir) as weights:
                layout = tensor_layout(work.shape)
                report = verify_conversion(weights, directory, layout, work.checkpoint, progress.add)
            summary["convert/num_tensors"] = report.num_tensors
            seconds["verify"] = time.monotonic() - start
        start = time.monotonic()
        if check_logits:
            result = compare_logits(directory, work.hf_dir, family_path=work.shape.family_path)
            if result.difference is not None:
                summary["convert/logits_difference"] = result.difference
            state["logits"] = str(result)
            seconds["logits"] = time.monotonic() - start
    return commit.model_copy(update={"seconds": seconds, "summary": summary, "state": state})


# ---- torch_dist -> torch_dist ----------------------------------------------------------------------------------------


class ImportMemo(Frozen):
    """Record of the model that was imported from a Megatron checkpoint, so that it is not copied again."""

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

    `checkpoint` is a commit in `store`, or the path of a directory with a torch_dist checkpoint. `names`: tensor names,
    as in Megatron's local layers or in those of TransformerEngine. `iteration`: number of training iterations that
    Megatron shall find: the weights are written into `iter_0000020`, for instance; None: into `release`, Megatron's
    name of a checkpoint to start training from.
    """
    target, identity = export_target(store, checkpoint, origin, save, names, iteration)
    if existing := target.find_published(identity):
        return existing
    with checkpoint_files(store, checkpoint) as source:
        return copy_megatron_weights(source, origin, target, identity, names, on_progress)


def export_target(
    store: Store, checkpoint: Commit | str, origin: Origin, save: str, names: MegatronNames, iteration: int | None
) -> tuple[DirectoryTarget, str]:
    """Return the target of `export_megatron`, and the name of its result, which depends on checkpoint and options."""
    if adapter_options(checkpoint) is not None:
        raise OptionError(
            "the checkpoint has LoRA adapters, which can be merged only in an export of Hugging Face files: export it "
            "with --format hf, and convert the result"
        )
    identity = _identity_of_copy(checkpoint, origin, names) + ("" if iteration is None else f"-{iteration}")
    return DirectoryTarget(save, "torch_dist", identity, store.options, iteration), identity


def import_megatron_checkpoint(store: Store, directory: str, origin: Origin) -> CheckpointRef:
    """Copy the model weights of a Megatron checkpoint into the store, unless the store already has them. `origin` is a
    model of the same shape; its config.json is used if the checkpoint has none."""
    source = megatron_directory(directory)
    assert source is not None, f"{directory} is not a torch_dist checkpoint"
    assets = source / ASSETS_DIRECTORY
    if (assets / "config.json").is_file():
        origin = Origin(assets, family_path=origin.family_path)
    name = _identity_of_copy(str(source), origin, "local")
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
    slices = {
        Slice(piece.key, piece.offset, piece.sizes, weights.meta[name].dtype): (name, piece)
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
        _write_index(directory, target, shape, result, names, [(unit, record.spans) for unit, record in records])
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


def _identity_of_copy(checkpoint: Commit | str, origin: Origin, names: MegatronNames) -> str:
    """Return the name of the result: a hash of the checkpoint's files, the origin and the tensor names."""
    content = f"{COPY_FORMAT} {checkpoint_fingerprint(checkpoint)} {origin.fingerprint()} {names}"
    return xxhash.xxh3_64_hexdigest(content.encode())
