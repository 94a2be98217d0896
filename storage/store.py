"""The store: where a run lies, on a local disk or any fsspec URI, and the one protocol by which things become true.

A stage writes under a private `attempt-<uuid>` prefix (`Store.writing`), then publishes one commit record by a conditional create
(`Store.commit`). Readers open only what a commit names. The loser of a race adopts the winner's commit.

Conditional create is `os.link` on a local disk (atomic, fails if the name exists) and `If-None-Match: *` on object stores that
have it; which of the two works is probed when the store is opened.
"""

from __future__ import annotations

import builtins
import errno
import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import xxhash
from fsspec.implementations.local import LocalFileSystem

from storage.refs import Commit, FileRecord, RunKeys, commit_key

_CHUNK = 16 << 20  # bytes read at a time while hashing
_CONFLICT_RETRIES = 6
_NO_HARD_LINKS = (
    errno.EPERM,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EMLINK,
)  # of link(2) on FAT, some FUSE and CIFS mounts


class StoreError(RuntimeError):
    """The store cannot do what Penstock needs; the message says what to do."""


@dataclass
class Writing:
    """A directory being written. After the `with` block `files` lists what was made durable."""

    path: Path
    files: list[FileRecord] = field(default_factory=list)


class Store:
    """A place for runs. Keys are paths relative to its root, always with forward slashes.

    Args:
        uri: a local path or any fsspec URI (`s3://bucket/prefix`).
        options: passed to the fsspec file system.
        single_writer: promise that only one process writes, for stores without conditional create.
        probe: try a conditional create now (actors of a run whose driver has probed need not).

    Raises:
        StoreError: not writable, or no conditional create and no `single_writer`.
    """

    def __init__(
        self, uri: str, options: dict[str, Any] | None = None, *, single_writer: bool = False, probe: bool = True
    ) -> None:
        self.options = options or {}
        self.single_writer = single_writer
        try:
            self.fs, root = fsspec.core.url_to_fs(uri, **self.options)
        except (ValueError, ImportError) as error:
            raise StoreError(
                f"store {uri!r} cannot be opened ({error}): give --store a local path or a URI that fsspec knows"
            ) from error
        self.is_local = isinstance(self.fs, LocalFileSystem)
        self.root = os.path.abspath(root) if self.is_local else root.rstrip("/")
        self.uri = self.root if self.is_local else self.fs.unstrip_protocol(self.root)
        if probe:
            self._probe()

    def __repr__(self) -> str:
        return f"Store({self.uri!r})"

    def path(self, key: str) -> str:
        """Full path of a key, as the file system takes it."""
        return f"{self.root}/{key}" if key else self.root

    # ---- commit records -------------------------------------------------------------------------------------------------

    def create(self, key: str, data: bytes) -> bool:
        """Write `data` at `key` unless something is there. True if this call wrote it; atomic and durable."""
        if self.is_local:
            return self._create_local(key, data)
        if self.single_writer:
            if self.exists(key):
                return False
            self.fs.pipe_file(self.path(key), data)
            return True
        for attempt in range(_CONFLICT_RETRIES):
            try:
                self.fs.pipe_file(self.path(key), data, mode="create")
            except FileExistsError:
                return False
            except OSError as error:
                # s3fs makes FileExistsError only of AWS's full answer; others send the same code without the condition's name.
                code = _s3_code(error)
                if code in ("PreconditionFailed", "412"):
                    return False
                if code not in ("ConditionalRequestConflict", "409") or attempt == _CONFLICT_RETRIES - 1:
                    raise
                time.sleep(0.1 * 2**attempt)  # two conditional writes at the same moment: S3 asks to try again
            else:
                return True
        raise AssertionError("unreachable")

    def committed(self, prefix: str) -> Commit | None:
        """The commit of what lies under `prefix`, or None if it is not done."""
        data = self.read(commit_key(prefix))
        return None if data is None else Commit.model_validate_json(data)

    def commit(self, prefix: str, commit: Commit) -> Commit:
        """Publish `commit`; returns the commit that stands, which is another one if another attempt was faster."""
        if self.create(commit_key(prefix), commit.model_dump_json(indent=1).encode()):
            return commit
        winner = self.committed(prefix)
        assert winner is not None, f"{prefix} was neither created nor there"
        return winner

    # ---- files ----------------------------------------------------------------------------------------------------------

    def new_attempt(self, prefix: str) -> str:
        """The key of a fresh private directory under `prefix`."""
        return f"{prefix}/attempt-{uuid.uuid4().hex[:12]}"

    @contextmanager
    def writing(self, attempt: str) -> Iterator[Writing]:
        """A local directory whose files become durable under `attempt` when the block ends without an exception.

        On a local store it is the place itself (several ranks may share it: let one of them use this); elsewhere a scratch
        directory that is uploaded.
        """
        if self.is_local:
            out = Writing(Path(self.path(attempt)))
            _make_directory(out.path)
            yield out
            out.files = _records(out.path, attempt)
            for entry in [out.path, *out.path.rglob("*")]:  # a file is durable when its data and every name on the way to it are
                _fsync(entry)
            return
        with tempfile.TemporaryDirectory(prefix="penstock-") as scratch:
            out = Writing(Path(scratch))
            yield out
            out.files = _records(out.path, attempt)
            for record in out.files:
                self.fs.put_file(str(out.path / Path(record.path).relative_to(attempt)), self.path(record.path))
                found = self.fs.size(self.path(record.path))
                if found != record.bytes:
                    raise StoreError(
                        f"{record.path}: {found} bytes arrived of {record.bytes}; the upload was cut, it will be tried again"
                    )

    @contextmanager
    def reading(self, commit: Commit) -> Iterator[Path]:
        """A local directory with the files of `commit`, laid out as they were written. Sizes are checked.

        Raises:
            StoreError: a file is missing or has another size than committed.
        """
        assert commit.attempt is not None, "this commit has no files"
        for record in commit.files:
            found = self.size(record.path)
            if found != record.bytes:
                state = "is missing" if found is None else f"has {found} bytes"
                raise StoreError(
                    f"{self.path(record.path)} {state}, but a commit names it with {record.bytes} bytes: restore it from a backup"
                )
        if self.is_local:
            yield Path(self.path(commit.attempt))
            return
        with tempfile.TemporaryDirectory(prefix="penstock-") as scratch:
            for record in commit.files:
                target = Path(scratch) / Path(record.path).relative_to(commit.attempt)
                target.parent.mkdir(parents=True, exist_ok=True)
                self.fs.get_file(self.path(record.path), str(target))
            yield Path(scratch)

    def read(self, key: str) -> bytes | None:
        """Content of a small file, or None if it is not there."""
        try:
            return self.fs.cat_file(self.path(key))
        except FileNotFoundError:
            return None

    def read_json(self, key: str) -> Any | None:
        """Parsed JSON, or None if it is not there."""
        data = self.read(key)
        return None if data is None else json.loads(data)

    def exists(self, key: str) -> bool:
        """Whether a file or a directory is there."""
        self.fs.invalidate_cache()  # object stores answer from old listings, where another process's new file is missing
        return bool(self.fs.exists(self.path(key)))

    def size(self, key: str) -> int | None:
        """Bytes of a file, or None if it is not there."""
        self.fs.invalidate_cache()
        try:
            return self.fs.size(self.path(key))
        except FileNotFoundError:
            return None

    def list(self, prefix: str) -> list[str]:
        """Names directly under `prefix`, sorted; empty if it does not exist."""
        self.fs.invalidate_cache()
        try:
            return sorted(Path(entry).name for entry in self.fs.ls(self.path(prefix), detail=False))
        except FileNotFoundError:
            return []

    def committed_indices(self, prefix: str) -> builtins.list[int]:
        """The committed numbers under e.g. `runs/x/rollouts`, ascending."""
        suffix = commit_key("")
        names = [name.removesuffix(suffix) for name in self.list(prefix) if name.endswith(suffix)]
        return sorted(int(name) for name in names if name.isdigit())

    # ---- inside ---------------------------------------------------------------------------------------------------------

    def _probe(self) -> None:
        """Find out, before anything expensive, whether this store can hold a run."""
        key = f".penstock-probe-{uuid.uuid4().hex[:8]}"
        lacking = (
            "so two writers could both win: use another store, or give --store-single-writer if only one process ever writes here"
        )
        try:
            created = self.create(key, b"1")
            again = self.create(key, b"2")
            self.fs.rm_file(self.path(key))
        except NotImplementedError as error:
            raise StoreError(f"store {self.uri!r} has no conditional create, {lacking}") from error
        except Exception as error:  # any driver's own error type: turned into one sentence
            if self.is_local and getattr(error, "errno", None) in _NO_HARD_LINKS:
                raise StoreError(f"store {self.uri!r} lies on a file system without hard links, {lacking}") from error
            raise StoreError(
                f"store {self.uri!r} is not writable ({error}): give --store a place where this user may write"
            ) from error
        if not created or again:
            raise StoreError(f"store {self.uri!r} accepts a second create of the same key, {lacking}")

    def _create_local(self, key: str, data: bytes) -> bool:
        target = self.path(key)
        _make_directory(Path(target).parent)
        temporary = f"{target}.{uuid.uuid4().hex[:12]}.tmp"
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if not self._link(temporary, target):
                return False
        finally:
            Path(temporary).unlink(missing_ok=True)
        _fsync(os.path.dirname(target))
        return True

    def _link(self, temporary: str, target: str) -> bool:
        """Give a written file its name, unless the name is taken."""
        if self.single_writer:  # also for file systems without hard links
            if Path(target).exists():
                return False
            Path(temporary).rename(target)
            return True
        try:
            os.link(temporary, target)
        except OSError as error:
            # An NFS server may answer "exists" to a link it has made itself after a lost reply: two names prove it (open(2)).
            if os.stat(temporary).st_nlink == 2:
                return True
            if error.errno == errno.EEXIST:
                return False
            raise
        return True


def committed_prefixes(store: Store, keys: RunKeys) -> list[str]:
    """Prefixes of everything a run has committed, kind by kind."""
    suffix = commit_key("")

    def under(directory: str) -> list[str]:
        return [f"{directory}/{name.removesuffix(suffix)}" for name in store.list(directory) if name.endswith(suffix)]

    found = [prefix for kind in ("rollouts", "steps", "checkpoints", "exports") for prefix in under(f"{keys.prefix}/{kind}")]
    return found + [
        prefix for version in store.list(f"{keys.prefix}/evals") for prefix in under(f"{keys.prefix}/evals/{version}")
    ]


def hash_file(path: str | Path) -> str:
    """xxh3-128 of a file's content, hex."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def free_bytes(store: Store) -> int | None:
    """Free space where the store lies, or None if the store does not tell."""
    return shutil.disk_usage(store.root).free if store.is_local else None


def _records(directory: Path, attempt: str) -> list[FileRecord]:
    records = []
    for file in sorted(p for p in directory.rglob("*") if p.is_file()):
        rows = None
        if file.suffix == ".parquet":
            import pyarrow.parquet as pq

            rows = pq.read_metadata(file).num_rows
        key = f"{attempt}/{file.relative_to(directory).as_posix()}"
        records.append(FileRecord(path=key, bytes=file.stat().st_size, xxh3=hash_file(file), rows=rows))
    return records


def _s3_code(error: OSError) -> str:
    """S3's own error code behind an error that s3fs has translated, or ""."""
    response = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def _make_directory(path: Path) -> None:
    """`mkdir -p` that survives a power cut: the parent of every new directory is synced."""
    if path.is_dir():
        return
    _make_directory(path.parent)
    path.mkdir(exist_ok=True)
    _fsync(path.parent)


def _fsync(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
