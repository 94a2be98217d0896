"""Targets of conversions: the models of a store, or a directory or URI. Also functions for directories that contain a
model, for instance to copy its assets (all files except weights) and to hash it. Does not import torch.

Both targets write to a private attempt first and publish the complete result at the end. After a kill, the same
command continues its unfinished attempt. The records of finished work items are stored next to the attempt, under a
name that ends in `.parts`.
"""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import xxhash

from penstock.engines.families import read_shape
from penstock.engines.families.family import source_hash
from penstock.engines.families.shape import ModelShape
from penstock.engines.weights.hf_headers import read_header, weight_files
from penstock.stages.convert.config import ExportDtype, Mtp
from penstock.storage import disk
from penstock.storage.commit import CheckpointRef, Commit, Frozen, attempt_in_path, commit_key
from penstock.storage.disk import hash_file, map_in_threads, read_file
from penstock.storage.errors import ModelError, OptionError, StoreError, check_rules
from penstock.storage.store import Store

RECORD = ".penstock.json"  # the commit record in a directory written by `penstock convert --save`
TRACKER = "latest_checkpointed_iteration.txt"  # Megatron's file that names the current checkpoint of a directory
RELEASE = "release"  # Megatron's name of an untrained checkpoint: subdirectory, and value in the tracker
ASSETS_DIRECTORY = "hf_assets"  # inside a converted model: config.json, tokenizer, carried tensors
METADATA = ".metadata"  # file name of torch's checkpoint index; equal to METADATA of safe_load.py, which imports torch
# in a converted model's assets: tensors copied unchanged, because Megatron's model lacks them (multi-token prediction)
CARRIED = "carried.safetensors"
ASSET_SUFFIXES = {".json", ".txt", ".jinja", ".model", ".tiktoken", ".py"}
NAMED_TEMPLATES = "additional_chat_templates"  # directory of chat templates that are chosen by name
DOCUMENTS = re.compile(r"(license|notice|readme|use_policy|copying)\b.*", re.IGNORECASE)  # copied with a model
NUM_HASH_THREADS = 4
EXPORT_FORMAT = 2  # format version of unfinished exports; unfinished exports of another version are not resumed
SHARD_BYTES = 5_000_000_000  # maximum size of a safetensors file of an export
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class StoreTarget:
    """The model `models/<identity>` in a store, shared by all runs that start from the same source files. `name` of the
    attempt: equal for the same source and options."""

    def __init__(self, store: Store, name: str) -> None:
        self.store = store
        self.attempt = f"models/attempt-{name}"  # key prefix of the written files
        self.records_prefix = f"{self.attempt}.parts"  # key prefix of the records of finished work items

    def find_published(self, identity: str) -> CheckpointRef | None:
        """Return the published result for `identity`, a name derived from source and options; None if there is none."""
        commit = self.store.committed(f"models/{identity}")
        return None if commit is None else self._checkpoint_ref(identity, commit)

    def publish(self, identity: str, commit: Commit) -> CheckpointRef:
        """Make the result visible under its final name. `commit` lists the result's files under `attempt`."""
        return self._checkpoint_ref(identity, self.store.commit(f"models/{identity}", commit))

    def _checkpoint_ref(self, identity: str, commit: Commit) -> CheckpointRef:
        uri = f"{self.store.uri}/{commit.attempt}"
        return CheckpointRef(key=commit_key(f"models/{identity}"), uri=uri, format="torch_dist", policy_version=0)


class DirectoryTarget:
    """The directory or URI of `--save`.

    On a local disk, all files are written into a hidden sibling directory, which is renamed at the end. An object store
    cannot rename, so the commit record is written last.

    Args:
        uri: URI or path of the directory, which must be absent, be empty, or contain the result of the same conversion.
        format: format of the result; a torch_dist model is written into the subdirectory `release`, as Megatron
            expects.
        name: name of the attempt; equal for the same source and options.
        options: options of the fsspec file system.
        iteration: for torch_dist: write the subdirectory of this training iteration (`iter_0000020`) instead.
    """

    def __init__(
        self,
        uri: str,
        format: Literal["torch_dist", "hf"],
        name: str,
        options: dict[str, Any] | None = None,
        iteration: int | None = None,
    ) -> None:
        self.store, self.final = open_parent_store(uri, options)
        self.uri, self.format = f"{self.store.uri.rstrip('/')}/{self.final}", format
        self.work = f".{self.final}.incoming-{name}" if self.store.is_local else self.final
        self.iteration = iteration
        subdirectory = RELEASE if iteration is None else f"iter_{iteration:07d}"
        self.attempt = f"{self.work}/{subdirectory}" if format == "torch_dist" else self.work
        self.records_prefix = f".{self.final}.incoming-{name}.parts"

    def find_published(self, identity: str) -> CheckpointRef | None:
        record = read_record(self.store, self.final)
        if record is not None and record.state.get("identity") == identity:
            return self._checkpoint_ref(record)
        if record is not None or self.is_occupied():
            raise OptionError(
                f"{self.uri} exists and is not the result of this command with these options: give --save another "
                f"directory, or remove {self.uri}"
            )
        return None

    def publish(self, identity: str, commit: Commit) -> CheckpointRef:
        record = commit.model_copy(
            update={
                "attempt": self.final + self.attempt.removeprefix(self.work),
                "files": [
                    file.model_copy(update={"path": self.final + file.path.removeprefix(self.work)})
                    for file in commit.files
                ],
                "state": {**commit.state, "identity": identity},
            }
        )
        if self.format == "torch_dist":
            iteration = RELEASE if self.iteration is None else str(self.iteration)
            self.store.create(f"{self.work}/{TRACKER}", iteration.encode())
        self.store.create(f"{self.work}/{RECORD}", record.model_dump_json(indent=1).encode())
        if self.work != self.final:
            source, target = Path(self.store.path(self.work)), Path(self.store.path(self.final))
            try:
                source.rename(target)  # succeeds if the target is an empty directory
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                raise OptionError(
                    f"{target} was created by another process during the conversion: move the result from {source}, "
                    "or repeat the conversion with another --save directory"
                ) from error
            disk.fsync(target.parent)
        return self._checkpoint_ref(record)

    def is_occupied(self) -> bool:
        """Return whether the directory has files that are not from an unfinished attempt at the same result."""
        if not self.store.is_local and self.store.list(self.records_prefix):
            return False
        path = Path(self.store.path(self.final))
        return bool(self.store.list(self.final)) if path.is_dir() or not self.store.is_local else path.exists()

    def _checkpoint_ref(self, commit: Commit) -> CheckpointRef:
        key = f"{self.final}/{RECORD}"
        return CheckpointRef(key=key, uri=self.uri, format=self.format, policy_version=commit.policy_version)


Target = StoreTarget | DirectoryTarget


def open_parent_store(uri: str, options: dict[str, Any] | None = None) -> tuple[Store, str]:
    """Return the parent of a directory or URI as a store, and the directory's name in that store."""
    whole = Store(uri, options, probe=False)
    parent, _, name = whole.root.rpartition("/")
    if not name or not (parent or whole.is_local):
        raise OptionError(f"--save {uri} is the root of a disk or bucket: give a directory inside it")
    return Store((parent or "/") if whole.is_local else whole.fs.unstrip_protocol(parent), options, probe=False), name


def read_record(store: Store, name: str) -> Commit | None:
    """Return the commit record of a directory written by `penstock convert --save`; None if it has no record."""
    is_file = store.is_local and Path(store.path(name)).is_file()
    return None if is_file else store.read_record(Commit, f"{name}/{RECORD}")


def origin_of_copy(directory: Path) -> dict[str, str]:
    """Return {"export": key of the exported files in their store} for a directory that `penstock export` or --save-hf
    wrote, and {} for other directories. The commit of a conversion records it as an input."""
    record = read_record(*open_parent_store(str(directory)))
    if record is None or record.kind != "export":
        return {}
    attempt = attempt_in_path(record.inputs.get("export") or record.inputs.get("checkpoint", ""))
    return {"export": attempt} if attempt else {}


def check_free_space(store: Store, needed: int) -> None:
    """Raise StoreError if the store's disk has fewer than `needed` free bytes. Object stores are not checked."""
    if not store.is_local:
        return
    directory = next(path for path in [Path(store.root), *Path(store.root).parents] if path.exists())
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise StoreError(
            f"the result needs {needed / 1e9:.1f} GB, but {directory} has only {free / 1e9:.1f} GB free: free some "
            "space, or give --store or --save a directory on another disk"
        )


@contextmanager
def full_disk_as_store_error(store: Store) -> Iterator[None]:
    """Convert the OSError of a full disk, raised in the `with` block, to a StoreError."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        raise StoreError(
            f"no room is left in {store.root} ({error.strerror}): free some space, then run the same command again "
            "to resume"
        ) from error


# ---- directories with a model ----------------------------------------------------------------------------------------


def is_converted(directory: str) -> bool:
    """Return whether a local directory was written by `penstock convert --save`."""
    return (Path(directory) / RELEASE).is_dir() and (Path(directory) / RECORD).is_file()


def megatron_directory(directory: str | Path) -> Path | None:
    """Return the directory that contains the index (`.metadata`) of a torch_dist checkpoint: `directory` itself, or the
    subdirectory that its tracker file names. None if `directory` is not a Megatron checkpoint."""
    path = Path(directory)
    if (path / METADATA).is_file():
        return path
    if not (path / TRACKER).is_file():
        return None
    name = read_file(path / TRACKER).decode(errors="replace").strip()
    checkpoint = path / (f"iter_{int(name):07d}" if name.isdecimal() else RELEASE)
    rules = (
        (
            not name.isdecimal() and name != RELEASE,
            f"{path / TRACKER} contains {name[:40]!r}, which is neither a number of iterations nor {RELEASE!r}: give "
            "the subdirectory of a checkpoint instead, or restore the file",
        ),
        (
            not (checkpoint / METADATA).is_file(),
            f"{path / TRACKER} names {name[:40]!r}, but {checkpoint} is not a torch_dist checkpoint: use a completely "
            "saved checkpoint",
        ),
    )
    check_rules(rules, ModelError)
    return checkpoint


def config_directory(directory: str) -> Path | None:
    """Return the directory with a model's config.json: the Hugging Face directory itself, or the assets of a torch_dist
    model; None if the torch_dist model has no config.json."""
    checkpoint = megatron_directory(directory)
    if checkpoint is None:
        return Path(directory)
    assets = checkpoint / ASSETS_DIRECTORY
    return assets if (assets / "config.json").is_file() else None


def is_published(uri: str, options: dict[str, Any] | None = None) -> bool:
    """Return whether a directory or URI has the complete result of a conversion or an export."""
    return read_record(*open_parent_store(uri, options)) is not None


class FingerprintMemo(Frozen):
    """Record of the fingerprint of source files, so that unchanged files need not be read again."""

    fingerprint: str


def fingerprint_key(stat_hash: str) -> str:
    """Return the store's key of the record with the fingerprint of Hugging Face files that have this `stat_hash`."""
    return f"models/sources/{stat_hash}.json"


def record_fingerprint(store: Store, stat_hash: str, fingerprint: str) -> None:
    """Record the fingerprint of Hugging Face files, so that they are not read again until they change."""
    store.create(fingerprint_key(stat_hash), FingerprintMemo(fingerprint=fingerprint).model_dump_json().encode())


def is_conversion_of(store: Store, model: CheckpointRef, directory: str) -> bool:
    """Return whether the store's `model` was converted from the files that are in `directory` now. False if this is
    unknown (`known_source`)."""
    source = known_source(store, directory)
    name = model.key.removesuffix(commit_key(""))
    return source is not None and name.startswith(f"models/{source}") and store.committed(name) is not None


def find_conversion(store: Store, directory: str, mtp: Mtp, family_path: str | None) -> CheckpointRef | None:
    """Return the store's model that was converted from the files that are in `directory` now. None if there is none, or
    if this is unknown (`known_source`)."""
    identity = known_source(store, directory)
    if identity is not None and not is_converted(directory):
        identity = conversion_identity(identity, read_shape(directory, family_path), keeps_mtp=mtp == "keep")
    return None if identity is None else StoreTarget(store, "").find_published(identity)


def known_source(store: Store, directory: str) -> str | None:
    """Return the name of the model that `penstock convert --save` wrote to a directory, or else the recorded
    fingerprint of its Hugging Face files. None if it is unknown without a conversion, because the directory has been
    written or copied since."""
    if is_converted(directory):
        record = read_record(*open_parent_store(directory))
        return record.state.get("identity") if record else None
    memo = store.read_record(FingerprintMemo, fingerprint_key(stat_hash(Path(directory))))
    return memo.fingerprint if memo else None


def conversion_identity(fingerprint: str, shape: ModelShape, keeps_mtp: bool, names: str = "local") -> str:
    """Return the name of a conversion's result: the source's fingerprint, with suffixes for options that change the
    result. `keeps_mtp`: the source has multi-token prediction layers, and the result keeps them."""
    mtp = "-mtp" if keeps_mtp else ""
    suffix = "" if names == "local" else f"-{names}"
    family = f"-family-{source_hash(shape.family_path)}" if shape.family_path else ""
    return fingerprint + mtp + suffix + family


def import_converted_model(store: Store, directory: str) -> CheckpointRef:
    """Copy a model written by `penstock convert --save` into a store, unless the store already has it. Verifies all
    hashes."""
    source, name = open_parent_store(directory)
    record = read_record(source, name)
    if record is None or "identity" not in record.state:
        raise ModelError(
            f"{directory} was not written by `penstock convert --save` (no commit record): give the Hugging Face "
            "directory of the model instead"
        )
    identity = record.state["identity"]
    target = StoreTarget(store, f"copy-{identity}")
    if existing := target.find_published(identity):
        return existing
    check_free_space(store, sum(file.bytes for file in record.files))
    with source.reading(record) as files, store.writing(target.attempt) as out:
        shutil.copytree(files, out.path, dirs_exist_ok=True)
    state = {key: value for key, value in record.state.items() if key != "identity"}
    return target.publish(
        identity, Commit(**{**dict(record), "attempt": target.attempt, "files": out.files, "state": state})
    )


# ---- assets, hashes and exports --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Origin:
    """The model that a checkpoint belongs to, and the options of its export."""

    directory: Path  # directory with config.json and tokenizer, which are copied into the export
    dtype: ExportDtype | None = None  # dtype of exported weights; None: as in the checkpoint
    vocab_size: int | None = None  # vocabulary rows of embedding and LM head; None: vocab_size of config.json
    # whether to export the MTP layers of `directory`; a converted model's `CARRIED` file is always exported
    mtp: Mtp = "skip"
    family_path: str | None = field(default=None, repr=False)  # --model-family-path

    def shape(self) -> ModelShape:
        """Return the shape of the model, with the vocabulary size that exported Hugging Face weights have."""
        shape = read_shape(self.directory, self.family_path)
        return shape.model_copy(update={"vocab_size": self.vocab_size}) if self.vocab_size else shape

    def fingerprint(self) -> str:
        """Return a string that changes whenever config, tokenizer or multi-token prediction tensors (`CARRIED`) in
        `directory` change, or the source code of a user-defined model family."""
        family_path = self.shape().family_path
        return assets_hash(self.directory) + (f" {source_hash(family_path)}" if family_path else "")


def checkpoint_fingerprint(checkpoint: Commit | str | Path) -> str:
    """Return a string that changes whenever the files of a checkpoint change."""
    if isinstance(checkpoint, Commit):
        return str(checkpoint.attempt)
    stats = [(path, path.stat()) for path in disk.files_in(Path(checkpoint))]
    files = [f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in stats]
    return f"{Path(checkpoint).resolve()} {files}"


def export_identity(checkpoint: Commit | str | Path, origin: Origin, shard_bytes: int = SHARD_BYTES) -> str:
    """Return the name of an export's result: a hash of its checkpoint, origin, options and size of files."""
    form = replace(origin, directory=Path())
    content = f"{EXPORT_FORMAT} {checkpoint_fingerprint(checkpoint)} {origin.fingerprint()} {form} {shard_bytes}"
    return xxhash.xxh3_64_hexdigest(content.encode())


def asset_files(directory: Path) -> list[Path]:
    """Return the paths of the directory's config, tokenizer, chat templates and generation defaults."""
    named = (directory / NAMED_TEMPLATES).glob("*.jinja")
    files = (path for path in sorted([*directory.iterdir(), *named]) if path.suffix in ASSET_SUFFIXES)
    return [
        path
        for path in files
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(".index.json")
    ]


def copy_assets(source: Path, target: Path) -> None:
    """Copy config, tokenizer, chat templates, licence and model card from the directory `source` to the directory
    `target`."""
    documents = [path for path in source.iterdir() if path.is_file() and DOCUMENTS.fullmatch(path.name)]
    for path in [*asset_files(source), *documents]:
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def model_fingerprint(directory: Path, hashes: dict[str, str] | None = None) -> str:
    """Return a hash of a model's weights, config and tokenizer: equal hashes mean the same model and tokenizer.

    Args:
        directory: Hugging Face directory.
        hashes: known hashes of weight files, by file name; the other files are hashed here.
    """
    known, digest = hashes or {}, xxhash.xxh3_128()
    files = [*asset_files(directory), *weight_files(directory)]
    file_hashes = map_in_threads(lambda path: known.get(path.name) or hash_file(path), files, NUM_HASH_THREADS)
    for path, xxh3 in zip(files, file_hashes, strict=True):
        digest.update(f"{path.relative_to(directory)} {xxh3}\n".encode())
    return digest.hexdigest()


def header_hash(directory: Path) -> str:
    """Return a hash of config, tokenizer and the weight files' headers, without reading weights. Different hashes mean
    different models; equal hashes do not prove equal weights."""
    digest = xxhash.xxh3_128(assets_hash(directory).encode())
    for path in weight_files(directory):
        digest.update(f"{path.name} {json.dumps(read_header(path))}\n".encode())
    return digest.hexdigest()


def assets_hash(directory: Path) -> str:
    """Return a hash of config, tokenizer and chat template and of a converted model's multi-token prediction tensors
    (`CARRIED`)."""
    digest = xxhash.xxh3_128()
    for path in [*asset_files(directory), *directory.glob(CARRIED)]:
        digest.update(f"{path.relative_to(directory)} {hash_file(path)}\n".encode())
    return digest.hexdigest()


def stat_hash(directory: Path) -> str:
    """Return a hash of the directory's path and of the sizes, modification times and inodes of assets and weight files.
    It changes whenever a file is written; a copy of the directory has a different hash."""
    digest = xxhash.xxh3_128(str(directory.resolve()).encode())
    for path in [*asset_files(directory), *weight_files(directory)]:
        stat = path.stat()
        name, times = path.relative_to(directory), f"{stat.st_mtime_ns} {stat.st_ctime_ns}"
        digest.update(f"{name} {stat.st_size} {times} {stat.st_ino}\n".encode())
    return digest.hexdigest()
