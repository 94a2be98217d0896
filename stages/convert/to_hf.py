"""torch_dist -> Hugging Face: how a trained model leaves. Streamed like the way in; optimizer and random state stay behind.

An export of a run lies in the store, under the run; `penstock convert --load` writes into a directory of the user's own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from engines.megatron.stored import StoredModel, stored_model
from stages.convert.export import SHARD_BYTES, Export, ExportDtype, File, Mtp, Origin
from stages.convert.hf_assets import small_files
from stages.convert.shares import Parts, Progress, Record, Tally, write_files
from stages.convert.targets import InDirectory, check_room, room
from storage import disk
from storage.faults import reach
from storage.refs import CheckpointRef, Commit, FileRecord
from storage.store import Store

FORMAT = 1  # of what an unfinished export leaves behind: another one is begun anew
NUM_THREADS = 2  # files written at a time into a run's export


def export_hf(
    store: Store,
    checkpoint: Commit | str | Path,
    assets_dir: str | Path,
    prefix: str,
    *,
    dtype: ExportDtype | None = None,
    mtp: Mtp = "skip",
    shard_bytes: int = SHARD_BYTES,
    inputs: dict[str, str] | None = None,
    on_progress: Progress | None = None,
) -> Commit:
    """Write a checkpoint as a Hugging Face directory that `from_pretrained` and inference servers load.

    Args:
        store: where the result goes.
        checkpoint: commit of a training checkpoint or converted model, or a directory with one.
        assets_dir: directory with the model's config.json, tokenizer and so on; they are carried over.
        prefix: key under which the export lies; if it is committed already, that commit is returned.
        dtype: number type of the weights ("bfloat16", ...); by default the stored one.
        mtp: whether multi-token prediction layers that `assets_dir` has are written too.
        shard_bytes: largest size of a safetensors file.
        inputs: recorded in the commit, e.g. `{"checkpoint": key}`.
        on_progress: called after every parameter with the bytes written and the bytes in all.

    Raises:
        ModelError: no checkpoint, or one that does not fit config.json.
        StoreError: the disk became full.
    """
    if commit := store.committed(prefix):
        return commit
    start, from_commit = time.monotonic(), checkpoint if isinstance(checkpoint, Commit) else None
    attempt = store.new_attempt(prefix)
    with room(store), checkpoint_files(store, checkpoint) as source, store.writing(attempt) as writing:
        num_bytes = write_hf(source, writing.path, Origin(Path(assets_dir), dtype, mtp=mtp), shard_bytes, on_progress)
        reach("export-writing")
    return store.commit(
        prefix,
        Commit(
            kind="export",
            run=from_commit.run if from_commit else None,
            index=from_commit.index if from_commit else 0,
            policy_version=from_commit.policy_version if from_commit else -1,
            attempt=attempt,
            files=writing.files,
            inputs=inputs or {"checkpoint": from_commit.attempt or "" if from_commit else str(checkpoint)},
            config_hash=from_commit.config_hash if from_commit else "",
            seconds={"export": time.monotonic() - start},
            summary={"export/num_bytes": num_bytes},
        ),
    )


def write_hf(
    source: Path, target: Path, origin: Origin, shard_bytes: int = SHARD_BYTES, on_progress: Progress | None = None
) -> int:
    """Write a checkpoint's weights, and what goes with them, into `target`. Returns the number of bytes of the weights."""
    with Export(source, origin, shard_bytes) as export:
        counter = Tally(export.num_bytes, on_progress)
        disk.in_parallel(lambda part: export.write(part, target, counter), export.parts, NUM_THREADS)
        export.write_rest(target)
        return export.num_bytes


# ---- into a directory of the user's own -------------------------------------------------------------------------------------


@dataclass
class Leaving:
    """A planned export into a directory. Processes of any machine that sees both ends may work on it."""

    store: Store
    checkpoint: Commit | str
    origin: Origin
    target: InDirectory
    identity: str  # of the result: another checkpoint, origin or form, another identity
    shard_bytes: int
    stored: StoredModel

    @contextmanager
    def export(self) -> Iterator[Export]:
        """What is to be written, with open files."""
        with checkpoint_files(self.store, self.checkpoint) as source:
            with Export(source, self.origin, self.shard_bytes, self.stored) as export:
                yield export


def export_to(
    store: Store,
    checkpoint: Commit | str,
    origin: Origin,
    save: str,
    on_progress: Progress | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> CheckpointRef:
    """Write a checkpoint as a Hugging Face directory at `save`, in this process; what a killed process has finished is kept.

    Args:
        store: that `checkpoint` is in, if it is a commit.
        checkpoint: commit, or a directory with a torch_dist checkpoint.
        origin: whose model it is, and in which form it leaves.
        save: directory or URI.
        on_progress: called with the bytes written and the bytes in all.
        shard_bytes: largest size of a safetensors file.

    Raises:
        ModelError: no checkpoint, or one that does not fit config.json.
        OptionError: a place that is taken.
        StoreError: no room, or the disk became full on the way.
    """
    work = prepare_export(store, checkpoint, origin, save, shard_bytes)
    if isinstance(work, CheckpointRef):
        return work
    write_export(work, on_progress=on_progress)
    return finish_export(work)


def prepare_export(
    store: Store, checkpoint: Commit | str, origin: Origin, save: str, shard_bytes: int = SHARD_BYTES
) -> Leaving | CheckpointRef:
    """Look whether it is done already, and whether it can be done. See `export_to`."""
    said = f"{FORMAT} {checkpoint_state(checkpoint)} {small_files(origin.directory)} {replace(origin, directory=Path())} {shard_bytes}"
    identity = xxhash.xxh3_64_hexdigest(said.encode())
    target = InDirectory(save, "hf", identity, store.options)
    if standing := target.standing(identity):
        return standing
    work = Leaving(store, checkpoint, origin, target, identity, shard_bytes, stored_model(origin.shape()))
    with work.export() as export:
        check_room(target.store, sum(part.num_bytes for part in Parts(target, export.parts).left()))
    return work


def write_export(work: Leaving, rank: int = 0, num_ranks: int = 1, on_progress: Progress | None = None) -> None:
    """Write this process's files of an export, but for those that are written already."""
    with work.export() as export:
        counter = Tally(export.num_bytes, on_progress)

        def do(part: File) -> Record:
            hashes: dict[str, str] = {}
            files = write_files(work.target, lambda place: hashes.update(export.write(part, place, counter)), lambda: hashes)
            return {"files": [file.model_dump() for file in files]}

        Parts(work.target, export.parts).do(do, counter, rank, num_ranks)
    reach("export-writing")


def finish_export(work: Leaving) -> CheckpointRef:
    """Add config and tokenizer, and make the directory visible."""
    with work.export() as export:
        parts = Parts(work.target, export.parts)
        files = [FileRecord.model_validate(file) for _, record in parts.records() for file in record["files"]]
        with room(work.target.store):
            files += write_files(work.target, export.write_rest)
        came_from = work.checkpoint if isinstance(work.checkpoint, Commit) else None
        commit = Commit(
            kind="export",
            run=came_from.run if came_from else None,
            index=came_from.index if came_from else 0,
            policy_version=came_from.policy_version if came_from else -1,
            attempt=work.target.attempt,
            files=files,
            inputs={"checkpoint": str(_where(work.checkpoint))},
            summary={"export/num_bytes": export.num_bytes},
        )
        ref = work.target.publish(work.identity, commit)
        parts.forget()
        return ref


def _where(checkpoint: Commit | str) -> str:
    return checkpoint.attempt or "" if isinstance(checkpoint, Commit) else str(Path(checkpoint).resolve())


def checkpoint_state(checkpoint: Commit | str) -> str:
    """Return a text that changes whenever the files of a checkpoint do."""
    if isinstance(checkpoint, Commit):
        return str(checkpoint.attempt)
    found = [f"{path} {stat.st_size} {stat.st_mtime_ns}" for path in disk.files_in(Path(checkpoint)) for stat in [path.stat()]]
    return f"{Path(checkpoint).resolve()} {found}"


def checkpoint_files(store: Store, checkpoint: Commit | str | Path) -> AbstractContextManager[Path]:
    """Return a context manager that gives a local directory with a checkpoint's files."""
    return store.reading(checkpoint) if isinstance(checkpoint, Commit) else nullcontext(Path(checkpoint))
