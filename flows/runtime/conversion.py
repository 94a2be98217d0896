"""Run conversions and exports (stages/convert) in Ray processes.

With --convert-ranks 1 a conversion is one call; with more ranks it is prepared, written by all ranks in parallel, and
finished. Every call can be repeated after a kill and then converts only the files that are missing.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.flows.options.argv import format_bytes
from penstock.stages.convert.config import ConvertConfig
from penstock.stages.convert.targets import (
    Origin,
    export_identity,
    import_converted_model,
    is_converted,
    megatron_directory,
)
from penstock.stages.convert.work import ProgressFile, copy_export
from penstock.storage.commit import CheckpointRef, Commit, RunKeys
from penstock.storage.store import Store

if TYPE_CHECKING:
    from penstock.engines.cluster import Cluster
    from penstock.stages.convert.to_torch_dist import ConversionOptions

ProgressCallback = Callable[[int, int], object]  # (bytes done, total bytes)
POLL_INTERVAL = 0.25  # seconds between updates of the progress


def run_conversion(
    cluster: Cluster, store: Store, config: ConvertConfig, *, verify: bool, report: ProgressCallback | None = None
) -> CheckpointRef:
    """Convert a Hugging Face checkpoint to torch_dist, in the store or at `convert_save`."""
    timeout = config.convert_timeout
    with _collect_progress(report, config.convert_ranks) as reports:
        if config.convert_ranks == 1:
            return cluster.run(convert, store, config, reports[0], verify=verify, timeout=timeout)
        from penstock.stages.convert import to_torch_dist

        options = conversion_options(config)
        work = cluster.run(to_torch_dist.prepare_conversion, store, config.hf_checkpoint, options, timeout=timeout)
        if isinstance(work, CheckpointRef):
            return work
        _run_in_rank_processes(cluster, to_torch_dist.write_units, work, reports, timeout)
        return cluster.run(
            to_torch_dist.finish_conversion, work, verify=verify, check_logits=config.check_logits, timeout=timeout
        )


def convert(
    store: Store, config: ConvertConfig, report: ProgressCallback | None, *, verify: bool
) -> CheckpointRef:  # runs in a Ray process, so that the driver need not import torch
    """Convert a Hugging Face checkpoint to torch_dist in this process."""
    from penstock.stages.convert.to_torch_dist import convert_hf

    options = conversion_options(config)
    return convert_hf(
        store, config.hf_checkpoint, report, verify=verify, check_logits=config.check_logits, options=options
    )


def conversion_options(config: ConvertConfig) -> ConversionOptions:
    """Return the options of a conversion to torch_dist."""
    from penstock.stages.convert.to_torch_dist import ConversionOptions

    return ConversionOptions(
        mtp=config.mtp,
        save=config.convert_save,
        names=config.megatron_names or "local",
        family_path=config.model_family_path,
    )


def existing_conversion(store: Store, config: ConvertConfig) -> CheckpointRef | None:
    """Return the result of an earlier `run_conversion`; None if there is none."""
    from penstock.stages.convert.to_torch_dist import prepare_conversion

    work = prepare_conversion(store, config.hf_checkpoint, conversion_options(config))
    return work if isinstance(work, CheckpointRef) else None


def existing_export(store: Store, checkpoint: Commit | str, config: ConvertConfig) -> CheckpointRef | None:
    """Return the result of an earlier `run_export`; None if there is none."""
    from penstock.stages.convert import to_hf, to_torch_dist

    args = _export_arguments(store, checkpoint, config)
    if config.megatron_names:
        target, identity = to_torch_dist.export_target(
            *args, config.megatron_names, _iteration_of_export(checkpoint, config)
        )
        return target.find_published(identity)
    work = to_hf.prepare_export(*args)
    return work if isinstance(work, CheckpointRef) else None


def _export_arguments(
    store: Store, checkpoint: Commit | str, config: ConvertConfig
) -> tuple[Store, Commit | str, Origin, str]:
    """Return the arguments that all functions of an export begin with."""
    assert config.convert_save, "an export has no default directory"
    origin = replace(export_origin(config), vocab_size=config.export_vocab_size)
    return store, checkpoint, origin, config.convert_save


def copy_own_export(store: Store, checkpoint: Commit | str, config: ConvertConfig) -> CheckpointRef | None:
    """Copy the export that the run of a checkpoint has made itself, if it is what `run_export` would write. Return None
    if there is no such export."""
    if not isinstance(checkpoint, Commit) or config.megatron_names:
        return None
    run, version = checkpoint.run or "", checkpoint.policy_version
    export = store.committed(RunKeys(run).export_prefix(version))
    _, _, origin, path = _export_arguments(store, checkpoint, config)
    identity = export_identity(checkpoint, origin)
    if export is None or export.state.get("identity") != identity:
        return None
    size = format_bytes(sum(file.bytes for file in export.files))
    line = f"copying the export of {run}, policy version {version}: {len(export.files)} files, {size}"
    return copy_export(store, export, path, identity, lambda: print(line, flush=True))


def _iteration_of_export(checkpoint: Commit | str, config: ConvertConfig) -> int | None:
    """Return the training iteration that a Megatron directory names (--megatron-iteration), or None."""
    return checkpoint.policy_version if config.megatron_iteration and isinstance(checkpoint, Commit) else None


def import_model(cluster: Cluster, store: Store, config: ConvertConfig, path: str) -> CheckpointRef:
    """Import the model at `path` into the store as torch_dist. `path` is a Hugging Face directory, the output of
    `penstock convert`, or a Megatron checkpoint."""
    if is_converted(path):
        return cluster.run(import_converted_model, store, path, timeout=config.convert_timeout)
    if megatron_directory(path):
        from penstock.stages.convert import to_torch_dist

        return cluster.run(
            to_torch_dist.import_megatron_checkpoint, store, path, export_origin(config), timeout=config.convert_timeout
        )
    return run_conversion(cluster, store, config.model_copy(update={"hf_checkpoint": path}), verify=True)


def export_origin(config: ConvertConfig, *, keep_mtp: bool = False) -> Origin:
    """Return a config's Hugging Face directory together with the options of exports (dtype, MTP layers, family).
    `keep_mtp` exports the MTP layers even without `--mtp keep`."""
    directory = Path(config.hf_checkpoint)
    mtp = "keep" if keep_mtp else config.mtp
    return Origin(directory, config.export_dtype, mtp=mtp, family_path=config.model_family_path)


def run_export(
    cluster: Cluster,
    store: Store,
    checkpoint: Commit | str,
    config: ConvertConfig,
    *,
    report: ProgressCallback | None = None,
) -> CheckpointRef:
    """Export a checkpoint to `convert_save`, as Hugging Face files or, with `megatron_names`, as torch_dist."""
    from penstock.stages.convert import to_hf, to_torch_dist

    args = _export_arguments(store, checkpoint, config)
    with _collect_progress(report, config.convert_ranks) as reports:
        if config.megatron_names:
            names = (config.megatron_names, reports[0], _iteration_of_export(checkpoint, config))
            return cluster.run(to_torch_dist.export_megatron, *args, *names, timeout=config.convert_timeout)
        if config.convert_ranks == 1:
            return cluster.run(to_hf.export_to, *args, reports[0], timeout=config.convert_timeout)
        work = cluster.run(to_hf.prepare_export, *args, timeout=config.convert_timeout)
        if isinstance(work, CheckpointRef):
            return work
        _run_in_rank_processes(cluster, to_hf.write_export, work, reports, config.convert_timeout)
        return cluster.run(to_hf.finish_export, work, timeout=config.convert_timeout)


def _run_in_rank_processes(
    cluster: Cluster,
    write_rank: Callable[..., None],
    work: Any,
    callbacks: Sequence[ProgressCallback | None],
    timeout: float,
) -> None:
    """Run `write_rank` in one process per rank, each with its own progress callback (or None). Wait for all processes,
    then raise the first failure."""
    ranks = len(callbacks)
    with ThreadPoolExecutor(ranks, thread_name_prefix="convert") as pool:
        calls = [
            pool.submit(cluster.run, write_rank, work, rank, ranks, callback, timeout=timeout)
            for rank, callback in enumerate(callbacks)
        ]
    for call in calls:
        call.result()


@contextmanager
def _collect_progress(report: ProgressCallback | None, ranks: int) -> Iterator[Sequence[Any]]:
    """Yield one progress callback (or None) per rank; a thread adds up their progress and passes it to `report`."""
    if report is None:
        yield [None] * ranks
        return
    with tempfile.TemporaryDirectory(prefix="penstock-") as directory:
        files = [ProgressFile(Path(directory) / f"rank-{rank}") for rank in range(ranks)]
        finished = threading.Event()

        def poll() -> None:
            while not finished.wait(POLL_INTERVAL):
                progress = [read for file in files if (read := file.read())]
                if progress:
                    report(sum(done for done, _ in progress), progress[0][1])

        thread = threading.Thread(target=poll, name="progress", daemon=True)
        thread.start()
        try:
            yield files
        finally:
            finished.set()
            thread.join()
