"""The store: where a run lies, on a local disk or any fsspec URI, and the one protocol by which things become true.

A stage writes under a private `attempt-<uuid>` prefix (`Store.writing`), then publishes one commit record by a conditional create
(`Store.commit`). Readers open only what a commit names. The loser of a race adopts the winner's commit.

Conditional create is `os.link` on a local disk (atomic, fails if the name exists) and `If-None-Match: *` or its like on object stores
that have it; whether it works is probed when the store is opened. How object stores fail, and what is done about it, is in objects.py.
"""

from __future__ import annotations

import builtins
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fsspec.implementations.local import LocalFileSystem

from storage import disk, leases, objects
from storage.disk import hash_file
from storage.errors import StoreError
from storage.faults import reach
from storage.keys import key_problem
from storage.refs import Commit, FileRecord, RunKeys, commit_key, encoded, parsed
from storage.secrets import has_credentials, reveal

__all__ = ["Found", "Store", "Writing", "committed_prefixes", "free_bytes", "hash_file"]

T = TypeVar("T")

_NUM_AT_ONCE = 16  # small requests to an object store
_NUM_PROBES = 2  # tries of the probe: a wrong address should be told soon


class Found(NamedTuple):
    """A file in the store, committed or not."""

    key: str
    bytes: int
    modified: float  # seconds since the epoch


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
        if has_credentials(uri):
            raise StoreError(
                f"store {uri!r} holds credentials: give them as --store-options NAME=env:VARIABLE (or secret-file:PATH)"
            )
        self.options = reveal(options or {})
        self.single_writer = single_writer
        self.fs, root = objects.open_file_system(uri, self.options)
        self.is_local = isinstance(self.fs, LocalFileSystem)
        self.root = os.path.abspath(root) if self.is_local else root.rstrip("/")
        self.uri = self.root if self.is_local else self.fs.unstrip_protocol(self.root)
        if probe:
            self._probe()

    def __repr__(self) -> str:
        return f"Store({self.uri!r})"

    def path(self, key: str) -> str:
        """Return the full path of a key, as the file system takes it.

        Raises:
            StoreError: the key could name something outside the store.
        """
        if problem := key_problem(key):
            raise StoreError(f"the key {key[:100]!r} {problem}: the store {self.uri} takes only keys that lie in it")
        return f"{self.root}/{key}" if key else self.root

    # ---- commit records -------------------------------------------------------------------------------------------------

    def create(self, key: str, data: bytes) -> bool:
        """Write `data` at `key` unless something is there. True if this call wrote it; atomic and durable.

        On an object store writers of equal bytes may all be told True (objects.create says why).
        """
        return self._create(key, data)

    def _create(self, key: str, data: bytes, num_tries: int | None = None) -> bool:
        if self.is_local:
            return disk.create(Path(self.path(key)), data, single_writer=self.single_writer)
        if not self.single_writer:
            return objects.create(self.fs, self.path(key), data, num_tries)
        if self.size(key) is not None:
            return False
        objects.retried(lambda: self.fs.pipe_file(self.path(key), data), f"writing {self.path(key)}", num_tries)
        return True

    def committed(self, prefix: str) -> Commit | None:
        """The commit of what lies under `prefix`, or None if it is not done."""
        key = commit_key(prefix)
        data = self.read(key)
        return None if data is None else parsed(Commit, key, data)

    def commit(self, prefix: str, commit: Commit) -> Commit:
        """Publish `commit`. Returns the commit that stands, which is another one if another attempt was faster.

        Raises:
            StoreError: its files are gone (`gc` took a writer that was stopped for long for a dead one): the stage must run again.
        """
        seal = None
        if commit.attempt is not None and _is_own(commit.attempt, prefix):
            reach("commit-before-seal")
            seal = leases.seal(self, commit)
            reach("commit-sealed")
            seal.check()
        created = self.create(commit_key(prefix), encoded(commit))
        standing = commit if created else self.committed(prefix)
        assert standing is not None, f"{prefix} was neither created nor there"
        if seal is not None:
            seal.end()
        return standing

    # ---- files ----------------------------------------------------------------------------------------------------------

    def new_attempt(self, prefix: str) -> str:
        """The key of a fresh private directory under `prefix`."""
        return f"{prefix}/attempt-{uuid.uuid4().hex[:12]}"

    @contextmanager
    def writing(self, attempt: str, *, mine: Callable[[str], bool] | None = None) -> Iterator[Writing]:
        """A local directory whose files become durable under `attempt` when the block ends without an exception.

        On a local store it is the place itself; elsewhere a scratch directory of this process that is uploaded.

        Args:
            attempt: from `new_attempt`.
            mine: where several processes write under one attempt, each in a block of its own: which files are this one's, by their
                names relative to the attempt. On a local store the others' files are seen too, perhaps half written.
        """
        if self.is_local:
            out = Writing(Path(self.path(attempt)))
            disk.make_directory(out.path)
            with leases.writer(self, attempt):
                yield out
                out.files = self._written(out.path, attempt, mine)
                disk.secure([Path(self.path(record.path)) for record in out.files], out.path)
            return
        with objects.scratch() as scratch, leases.writer(self, attempt):
            out = Writing(Path(scratch))
            yield out
            records = self._written(out.path, attempt, mine)
            sources = [out.path / Path(record.path).relative_to(attempt) for record in records]
            objects.upload(self.fs, [(s, self.path(r.path), r.bytes) for s, r in zip(sources, records, strict=True)])
            out.files = records

    def _written(self, top: Path, attempt: str, mine: Callable[[str], bool] | None) -> builtins.list[FileRecord]:
        files = [file for file in disk.files_in(top) if mine is None or mine(file.relative_to(top).as_posix())]
        return disk.records(files, top, attempt)

    @contextmanager
    def reading(self, commit: Commit, *, only: Iterable[str] | None = None) -> Iterator[Path]:
        """A local directory with the files of `commit`, laid out as they were written. Every size and every hash has been checked.

        Args:
            commit: says which files.
            only: names relative to the attempt, where not all of them are needed.

        Raises:
            StoreError: a file is missing, or is not what was committed.
        """
        assert commit.attempt is not None, "this commit has no files"
        names = None if only is None else set(only)
        wanted = [(Path(record.path).relative_to(commit.attempt), record) for record in commit.files]
        wanted = [(name, record) for name, record in wanted if names is None or name.as_posix() in names]
        assert names is None or len(wanted) == len(names), "the commit does not name all of them"
        if self.is_local:
            disk.check([(Path(self.path(record.path)), record) for _, record in wanted])
            yield Path(self.path(commit.attempt))
            return
        with objects.scratch(sum(record.bytes for _, record in wanted)) as scratch:
            objects.download(self.fs, [(self.path(record.path), record, Path(scratch) / name) for name, record in wanted])
            yield Path(scratch)

    def read(self, key: str) -> bytes | None:
        """Content of a small file, or None if it is not there."""
        try:
            return self._patiently(lambda: objects.read(self.fs, self.path(key)), key)
        except FileNotFoundError:
            return None

    def read_json(self, key: str) -> Any | None:
        """Return parsed JSON, or None if it is not there.

        Raises:
            StoreError: it is not JSON.
        """
        data = self.read(key)
        try:
            return None if data is None else json.loads(data)
        except ValueError as error:
            raise StoreError(f"{self.path(key)} is not JSON ({error}): restore it from a backup") from error

    def exists(self, key: str) -> bool:
        """Whether a file or a directory is there."""

        def ask() -> bool:
            self.fs.invalidate_cache()  # s3fs answers from old listings, where another process's new file is missing
            return bool(self.fs.exists(self.path(key)))

        return self._patiently(ask, key)

    def size(self, key: str) -> int | None:
        """Bytes of a file, or None if no file is there."""
        return objects.size(self.fs, self.path(key))

    def modified(self, key: str) -> float | None:
        """Return when a file was last written by the store's own clock, in seconds since the epoch, or None if no file is there."""
        if self.is_local:
            try:
                return os.stat(self.path(key)).st_mtime
            except (FileNotFoundError, NotADirectoryError):
                return None

        def ask() -> float:
            self.fs.invalidate_cache()
            return objects.modified(self.fs.info(self.path(key)))

        try:
            return self._patiently(ask, key)
        except FileNotFoundError:
            return None

    def replace(self, key: str, data: bytes) -> None:
        """Write `data` at `key`, whatever is there; whole, but not durable. Only for what must not outlive its writer."""
        if self.is_local:
            disk.replace(Path(self.path(key)), data)
        else:
            objects.retried(lambda: self.fs.pipe_file(self.path(key), data), f"writing {self.path(key)}")

    def list(self, prefix: str) -> builtins.list[str]:
        """Names directly under `prefix`, sorted; empty if it does not exist. A store may list late what was written just now."""

        def ask() -> builtins.list[str]:
            self.fs.invalidate_cache()
            return self.fs.ls(self.path(prefix), detail=False)

        try:
            return sorted(Path(entry).name for entry in self._patiently(ask, prefix))
        except FileNotFoundError:
            return []

    def committed_indices(self, prefix: str) -> builtins.list[int]:
        """The committed numbers under e.g. `runs/x/rollouts`, ascending.

        A listing may be old (object stores other than the large clouds', NFS); a read is not. So of rounds, which are consecutive,
        those that a listing lacks are asked for one by one, and of everything else what it names is asked for: retention may have
        removed it.
        """
        suffix = commit_key("")
        names = [name.removesuffix(suffix) for name in self.list(prefix) if name.endswith(suffix)]
        listed = {int(name) for name in names if name.isdigit()}
        if prefix.rsplit("/", 1)[-1] not in ("rollouts", "steps"):
            return sorted(self._standing(prefix, listed))
        found = listed | self._standing(prefix, set(range(max(listed, default=-1))) - listed)
        index = max(found, default=-1) + 1
        while self._standing(prefix, {index}):
            found.add(index)
            index += 1
        return sorted(found)

    def _standing(self, prefix: str, indices: set[int]) -> set[int]:
        """Those of `indices` that are committed now."""

        def stands(index: int) -> bool:
            key = commit_key(f"{prefix}/{index:06d}")
            return Path(self.path(key)).exists() if self.is_local else self.read(key) is not None

        wanted = sorted(indices)
        answers = disk.in_parallel(stands, wanted, 1 if self.is_local else _NUM_AT_ONCE)
        return {index for index, stand in zip(wanted, answers, strict=True) if stand}

    # ---- housekeeping ---------------------------------------------------------------------------------------------------

    def walk(self, prefix: str) -> Iterator[Found]:
        """Every file under `prefix`, committed or not, in the order of their keys."""
        if self.is_local:
            for local in sorted(disk.files_in(Path(self.path(prefix))), key=str):
                with suppress(FileNotFoundError):  # a writer's temporary file, gone between the listing and now
                    stat = local.stat()
                    yield Found(local.relative_to(self.root).as_posix(), stat.st_size, stat.st_mtime)
            return

        def ask() -> dict[str, dict[str, Any]]:
            self.fs.invalidate_cache()
            return self.fs.find(self.path(prefix), detail=True)

        for name, info in sorted(self._patiently(ask, prefix).items()):
            yield Found(name.removeprefix(f"{self.root}/"), info["size"], objects.modified(info))

    def delete(self, keys: Iterable[str]) -> None:
        """Remove files, durably; those that are not there are fine. On a local store directories that become empty go too.

        Raises:
            StoreError: a key lies outside the store, also by a symbolic link; or this user may not delete here.
        """
        if self.is_local:
            disk.delete([Path(self.path(key)) for key in keys], Path(self.root))
            return

        def remove(key: str) -> None:
            with suppress(FileNotFoundError):
                self._patiently(lambda: self.fs.rm_file(self.path(key)), key)

        disk.in_parallel(remove, keys, _NUM_AT_ONCE)

    def prune(self, prefix: str) -> None:
        """Remove the empty directories under `prefix`; only a local store has them."""
        if self.is_local:
            disk.remove_empty_directories(Path(self.path(prefix)))

    # ---- inside ---------------------------------------------------------------------------------------------------------

    def _probe(self) -> None:
        """Find out, before anything expensive, whether this store can hold a run."""
        key, mine = f".penstock-probe-{uuid.uuid4().hex[:8]}", uuid.uuid4().bytes
        lacking = (
            "so two writers could both win: use another store, or give --store-single-writer if only one process ever writes here"
        )
        try:
            created = self._create(key, mine, _NUM_PROBES)
            again = self._create(key, mine[::-1], _NUM_PROBES)
            self.delete([key])
        except (NotImplementedError, TypeError) as error:  # TypeError: a driver older than `mode="create"`
            raise StoreError(f"store {self.uri!r} has no conditional create, {lacking}") from error
        except StoreError as error:
            raise StoreError(f"store {self.uri!r} does not answer: {error}") from error
        except Exception as error:  # any driver's own error type: turned into one sentence
            if self.is_local and getattr(error, "errno", None) in disk.NO_HARD_LINKS:
                raise StoreError(f"store {self.uri!r} lies on a file system without hard links, {lacking}") from error
            raise StoreError(
                f"store {self.uri!r} is not writable ({error}): give --store a place where this user may write"
            ) from error
        if not created or again:
            raise StoreError(f"store {self.uri!r} accepts a second create of the same key, {lacking}")

    def _patiently(self, call: Callable[[], T], key: str) -> T:
        """The answer of the file system; of a local one the first, of others after retries."""
        try:
            return call() if self.is_local else objects.retried(call, f"asking for {self.path(key)}")
        except PermissionError as error:
            raise StoreError(f"{self.path(key)} cannot be read ({error.strerror or error}): run as its owner") from error


def _is_own(attempt: str, prefix: str) -> bool:
    """Whether an attempt was written for this commit, and not for that of another run whose files it shares."""
    place = attempt.rpartition("/")[0]
    return place in (prefix, prefix.rpartition("/")[0]) and leases.needs_guard(attempt)


def committed_prefixes(store: Store, keys: RunKeys) -> list[str]:
    """Prefixes of everything a run has committed, kind by kind."""
    suffix = commit_key("")
    found = [
        f"{keys.prefix}/{kind}/{index:06d}"
        for kind in ("rollouts", "steps", "checkpoints", "exports")
        for index in store.committed_indices(f"{keys.prefix}/{kind}")
    ]
    for version in store.list(f"{keys.prefix}/evals"):
        directory = f"{keys.prefix}/evals/{version}"
        found += [f"{directory}/{name.removesuffix(suffix)}" for name in store.list(directory) if name.endswith(suffix)]
    return found


def free_bytes(store: Store) -> int | None:
    """Free space where the store lies, or None if the store does not tell."""
    return shutil.disk_usage(store.root).free if store.is_local else None
