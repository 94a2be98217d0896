"""Conversions and exports as calls in processes of Ray: one call if one process does it, or a plan, its parts side by side, and the end.

What is done is `stages/convert`'s; every call may be repeated after a kill and does what is left.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.convert.config import ConvertConfig
from storage.refs import CheckpointRef, Commit
from storage.store import Store

if TYPE_CHECKING:
    from engines.cluster import Cluster

Report = Callable[[int, int], object]  # bytes done, bytes in all
LOOK_EVERY = 0.25  # seconds


def converted(
    cluster: Cluster, store: Store, config: ConvertConfig, *, verify: bool, report: Report | None = None
) -> CheckpointRef:
    """The Hugging Face checkpoint of a config as torch_dist, in the store or where `convert_save` says."""
    from stages.convert import to_torch_dist

    source, mtp, save, names = config.hf_checkpoint, config.mtp, config.convert_save, config.megatron_names or "local"
    with _watched(report, config.convert_ranks) as tell:
        if config.convert_ranks == 1:
            return cluster.run(
                to_torch_dist.convert_hf,
                store,
                source,
                tell[0],
                verify=verify,
                check_logits=config.check_logits,
                mtp=mtp,
                save=save,
                names=names,
                timeout=config.convert_timeout,
            )
        work = cluster.run(to_torch_dist.prepare, store, source, mtp=mtp, save=save, names=names, timeout=config.convert_timeout)
        if isinstance(work, CheckpointRef):
            return work
        _side_by_side(cluster, to_torch_dist.write_shares, work, tell, config.convert_timeout)
        return cluster.run(
            to_torch_dist.finish, work, verify=verify, check_logits=config.check_logits, timeout=config.convert_timeout
        )


def taken_in(cluster: Cluster, store: Store, config: ConvertConfig, path: str) -> CheckpointRef:
    """Another model, from Hugging Face files, a converted directory or one of Megatron's, as torch_dist in the store."""
    from stages.convert import to_megatron
    from stages.convert.adopt import adopt, is_converted, megatron_directory

    if is_converted(path):
        return cluster.run(adopt, store, path, timeout=config.convert_timeout)
    if megatron_directory(path):
        return cluster.run(to_megatron.adopt_megatron, store, path, config.hf_checkpoint, timeout=config.convert_timeout)
    return converted(cluster, store, config.model_copy(update={"hf_checkpoint": path}), verify=True)


def exported(
    cluster: Cluster, store: Store, checkpoint: Commit | str, config: ConvertConfig, *, report: Report | None = None
) -> CheckpointRef:
    """A checkpoint where `convert_save` says: as a Hugging Face directory, or for Megatron if `megatron_names` says so."""
    from stages.convert import to_hf, to_megatron
    from stages.convert.export import Origin

    assert config.convert_save, "there is no default place"
    origin = Origin(Path(config.hf_checkpoint), config.export_dtype, config.export_vocab_size, config.mtp)
    with _watched(report, config.convert_ranks) as tell:
        if config.megatron_names:
            args = (store, checkpoint, config.hf_checkpoint, config.convert_save, config.megatron_names, tell[0])
            return cluster.run(to_megatron.export_megatron, *args, timeout=config.convert_timeout)
        place = (store, checkpoint, origin, config.convert_save)
        if config.convert_ranks == 1:
            return cluster.run(to_hf.export_to, *place, tell[0], timeout=config.convert_timeout)
        work = cluster.run(to_hf.prepare_export, *place, timeout=config.convert_timeout)
        if isinstance(work, CheckpointRef):
            return work
        _side_by_side(cluster, to_hf.write_export, work, tell, config.convert_timeout)
        return cluster.run(to_hf.finish_export, work, timeout=config.convert_timeout)


def _side_by_side(cluster: Cluster, write: Callable[..., None], work: Any, tell: Sequence[Report | None], timeout: float) -> None:
    """Every process's share of the work. The first failure is raised; the other processes end before that."""
    ranks = len(tell)
    with ThreadPoolExecutor(ranks, thread_name_prefix="convert") as pool:
        calls = [pool.submit(cluster.run, write, work, rank, ranks, tell[rank], timeout=timeout) for rank in range(ranks)]
    for call in calls:
        call.result()


@contextmanager
def _watched(report: Report | None, ranks: int) -> Iterator[Sequence[Any]]:
    """What every process is to call with its progress; `report` hears the sum meanwhile."""
    if report is None:
        yield [None] * ranks
        return
    from stages.convert.progress import ProgressFile

    with tempfile.TemporaryDirectory(prefix="penstock-") as directory:
        files = [ProgressFile(Path(directory) / f"rank-{rank}") for rank in range(ranks)]
        over = threading.Event()

        def look() -> None:
            while not over.wait(LOOK_EVERY):
                told = [found for file in files if (found := file.read())]
                if told:
                    report(sum(done for done, _ in told), told[0][1])

        watcher = threading.Thread(target=look, name="progress", daemon=True)
        watcher.start()
        try:
            yield files
        finally:
            over.set()
            watcher.join()
