"""The store of runs, on a local disk or any fsspec URI, and its commit protocol.

A stage writes files under a private prefix, `attempt-<uuid>` (`Store.writing`), then publishes one commit record by a
conditional create (`Store.commit`). Readers open only files that a commit record lists. If two attempts at a stage
race, the second one to commit gets the commit of the first and its own files are not used.

Conditional create is `os.link` on a local disk (atomic, fails if the name exists) and `If-None-Match: *` or an
equivalent on object stores; opening a store tests that it works. Retries for object stores are in objects.py.
"""

from __future__ import annotations

import builtins
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fsspec.implementations.local import LocalFileSystem

from penstock.storage import disk, objects
from penstock.storage.disk import hash_file
from penstock.storage.errors import StoreError
from penstock.storage.failpoints import failpoint
from penstock.storage.keys import describe_key_problem
from penstock.storage.maintenance import leases
from penstock.storage.refs import Commit, FileRecord, Record, commit_key, decode_record, encode_commit
from penstock.storage.secret_references import resolve_secrets
from penstock.storage.secrets import has_credentials

__all__ = ["AttemptFiles", "Store", "StoredFile", "hash_file"]

T = TypeVar("T")

_NUM_REQUESTS = 16  # concurrent small requests to an object store
_NUM_PROBES = 2  # tries of each probe request; few, so that a wrong address is reported soon


class StoredFile(NamedTuple):
    """A file in the store, committed or not."""

    key: str
    bytes: int
    modified: float  # seconds since the epoch


@dataclass
class AttemptFiles:
    """The local directory into which a stage writes its files, and the records of these files; `files` is set when the
    `Store.writing` block ends. The stage may set `hashes`: the xxh3-128 that it computed while writing, by file name
    relative to `path`. The other files are read again to hash them."""

    path: Path
    hashes: dict[str, str] = field(default_factory=dict)
    files: list[FileRecord] = field(default_factory=list)


class Store:
    """A store of runs. Keys are paths relative to its root, with forward slashes.

    Args:
        uri: a local path or any fsspec URI (`s3://bucket/prefix`).
        options: passed to the fsspec file system; may contain references to secrets.
        single_writer: only one process ever writes to the store; allows stores without conditional create.
        probe: test that the store is writable and has conditional create. A run's driver tests it for its Ray actors.

    Raises:
        StoreError: the URI contains credentials, the store is not writable, or it has no conditional create although
            `single_writer` is not set.
    """

    def __init__(
        self, uri: str, options: dict[str, Any] | None = None, *, single_writer: bool = False, probe: bool = True
    ) -> None:
        if has_credentials(uri):
            raise StoreError(
                f"store {uri!r} contains credentials: give them as --store-options NAME=env:VARIABLE "
                "(or NAME=secret-file:PATH)"
            )
        self.options = resolve_secrets(options or {})
        self.single_writer = single_writer
        self.fs, root = objects.open_file_system(uri, self.options)
        self.is_local = isinstance(self.fs, LocalFileSystem)
        self.root = os.path.abspath(root) if self.is_local else root.rstrip("/")
        self.uri = self.root if self.is_local else self.fs.unstrip_protocol(self.root)
        if probe:
            self._check_writable_with_conditional_create()

    def __repr__(self) -> str:
        return f"Store({self.uri!r})"

    def path(self, key: str) -> str:
        """Return the full path of a key in the file system.

        Raises:
            StoreError: the key is invalid, for instance absolute or with a part "..".
        """
        if problem := describe_key_problem(key):
            raise StoreError(f"the key {key[:100]!r} {problem}: keys are relative paths inside the store {self.uri}")
        return f"{self.root}/{key}" if key else self.root

    # ---- commit records ----------------------------------------------------------------------------------------------

    def create(self, key: str, data: bytes) -> bool:
        """Write `data` at `key` unless the key exists, atomically and durably. Return whether this call wrote it.

        On an object store, several writers of equal bytes may all get True (see objects.create).
        """
        return self._create(key, data)

    def _create(self, key: str, data: bytes, num_tries: int | None = None) -> bool:
        if self.is_local:
            return disk.create(Path(self.path(key)), data, single_writer=self.single_writer)
        if not self.single_writer:
            return objects.create(self.fs, self.path(key), data, num_tries)
        if self.size(key) is not None:
            return False
        objects.call_with_retries(
            lambda: self.fs.pipe_file(self.path(key), data), f"writing {self.path(key)}", num_tries
        )
        return True

    def committed(self, prefix: str) -> Commit | None:
        """Return the commit of the stage that writes under `prefix`, or None if it is not committed."""
        return self.read_record(Commit, commit_key(prefix))

    def commit(self, prefix: str, commit: Commit) -> Commit:
        """Publish `commit` and return it, or return the existing commit if another attempt has committed first.

        Raises:
            StoreError: `penstock gc` has deleted the files, because the writer was suspended for so long that its lease
                expired; the stage must be rerun.
        """
        seal = None
        attempt_directory = (commit.attempt or "").rpartition("/")[0]
        # Only attempts of this stage need a seal (leases.py); a fork also commits files of its parent's attempts. The
        # attempt of a model is a sibling of its prefix, that of any other stage is below it.
        if (
            commit.attempt
            and leases.needs_lease(commit.attempt)
            and attempt_directory in (prefix, prefix.rpartition("/")[0])
        ):
            failpoint("commit-before-seal")
            seal = leases.seal_attempt_against_deletion(self, commit)
            failpoint("commit-sealed")
            seal.raise_if_expired()
        created = self.create(commit_key(prefix), encode_commit(commit))
        existing = commit if created else self.committed(prefix)
        assert existing is not None, f"the commit record of {prefix} was neither created nor found"
        if seal is not None:
            seal.release()
        return existing

    # ---- files -------------------------------------------------------------------------------------------------------

    def new_attempt(self, prefix: str) -> str:
        """Return the key of a new attempt: a private directory under `prefix` that does not exist yet."""
        return f"{prefix}/attempt-{uuid.uuid4().hex[:12]}"

    @contextmanager
    def writing(self, attempt: str, *, owns: Callable[[str], bool] | None = None) -> Iterator[AttemptFiles]:
        """Yield a local directory whose files become durable under `attempt` when the block ends without an exception.

        In a local store the directory is the attempt itself; for other stores it is temporary and is uploaded at the
        end.

        Args:
            attempt: from `new_attempt`.
            owns: return whether this process writes the file with the given name, relative to the attempt. Needed if
                several processes write to one attempt: in a local store each sees incomplete files of the others.
        """
        if self.is_local:
            out = AttemptFiles(Path(self.path(attempt)))
            disk.make_directory(out.path)
            with leases.writer_lease(self, attempt):
                yield out
                out.files = self._file_records(out, attempt, owns)
                disk.fsync_files([Path(self.path(record.path)) for record in out.files], out.path)
            return
        with objects.temporary_directory() as scratch, leases.writer_lease(self, attempt):
            out = AttemptFiles(Path(scratch))
            yield out
            records = self._file_records(out, attempt, owns)
            sources = [out.path / Path(record.path).relative_to(attempt) for record in records]
            objects.upload(self.fs, [(s, self.path(r.path), r.bytes) for s, r in zip(sources, records, strict=True)])
            out.files = records

    def _file_records(
        self, out: AttemptFiles, attempt: str, owns: Callable[[str], bool] | None
    ) -> builtins.list[FileRecord]:
        top = out.path
        files = [file for file in disk.files_in(top) if owns is None or owns(file.relative_to(top).as_posix())]
        return disk.file_records(files, top, attempt, out.hashes)

    @contextmanager
    def reading(self, commit: Commit, *, only: Iterable[str] | None = None) -> Iterator[Path]:
        """Yield a local directory with the files of `commit`, after verifying their sizes and hashes.

        Args:
            commit: the commit whose files are read.
            only: names of the files to read, relative to the attempt; all files if not given.

        Raises:
            StoreError: a file is missing, or its size or hash differs from the commit.
        """
        assert commit.attempt is not None, "the commit has no files"
        names = None if only is None else set(only)
        wanted = [(Path(record.path).relative_to(commit.attempt), record) for record in commit.files]
        wanted = [(name, record) for name, record in wanted if names is None or name.as_posix() in names]
        assert names is None or len(wanted) == len(names), "`only` lists files that are not in the commit"
        if self.is_local:
            disk.verify_files([(Path(self.path(record.path)), record) for _, record in wanted])
            yield Path(self.path(commit.attempt))
            return
        with objects.temporary_directory(sum(record.bytes for _, record in wanted)) as scratch:
            objects.download(
                self.fs, [(self.path(record.path), record, Path(scratch) / name) for name, record in wanted]
            )
            yield Path(scratch)

    def read(self, key: str) -> bytes | None:
        """Return the content of a small file, or None if it does not exist."""
        try:
            if self.is_local:
                return self._access_with_retries(lambda: disk.read_file(self.path(key)), key)
            return self._access_with_retries(lambda: objects.read(self.fs, self.path(key)), key)
        except FileNotFoundError:
            return None

    def read_record(self, model: type[Record], key: str) -> Record | None:
        """Return the record in a JSON file, or None if the file does not exist.

        Raises:
            StoreError: the content is not a valid `model`.
        """
        data = self.read(key)
        return None if data is None else decode_record(model, key, data)

    def exists(self, key: str) -> bool:
        """Return whether a file or directory exists."""

        def request() -> bool:
            self.fs.invalidate_cache()  # s3fs caches listings, which lack new files of other processes
            return bool(self.fs.exists(self.path(key)))

        return self._access_with_retries(request, key)

    def size(self, key: str) -> int | None:
        """Return the size of a file in bytes, or None if it does not exist."""
        return objects.size(self.fs, self.path(key))

    def modified(self, key: str) -> float | None:
        """Return the modification time of a file by the store's clock, in seconds since the epoch, or None if the file
        does not exist."""
        if self.is_local:
            try:
                return os.stat(self.path(key)).st_mtime
            except (FileNotFoundError, NotADirectoryError):
                return None

        def request() -> float:
            self.fs.invalidate_cache()
            return objects.modification_time(self.fs.info(self.path(key)))

        try:
            return self._access_with_retries(request, key)
        except FileNotFoundError:
            return None

    def replace(self, key: str, data: bytes) -> None:
        """Write `data` at `key`, replacing an existing file, atomically but without fsync. Used for leases and
        reports."""
        if self.is_local:
            disk.replace(Path(self.path(key)), data)
        else:
            objects.call_with_retries(lambda: self.fs.pipe_file(self.path(key), data), f"writing {self.path(key)}")

    def list(self, prefix: str) -> builtins.list[str]:
        """Return the sorted names of files and directories directly under `prefix`, or [] if it does not exist.

        Recently created files may be missing.
        """

        def request() -> builtins.list[str]:
            self.fs.invalidate_cache()
            paths: builtins.list[str] = self.fs.ls(self.path(prefix), detail=False)
            return paths

        try:
            return sorted(Path(entry).name for entry in self._access_with_retries(request, prefix))
        except FileNotFoundError:
            return []

    def committed_indices(self, prefix: str) -> builtins.list[int]:
        """Return the indices of the commits under a directory such as `runs/x/rollouts`, ascending.

        A listing may be stale (on NFS, and on object stores other than those of the large clouds); reads are not.
        Rounds are consecutive, so rollouts and steps that the listing lacks are looked up one by one. Commits of other
        kinds may have been deleted since the listing, so those that it contains are looked up again.
        """
        suffix = commit_key("")
        names = [name.removesuffix(suffix) for name in self.list(prefix) if name.endswith(suffix)]
        listed = {int(name) for name in names if name.isdigit()}
        if prefix.rsplit("/", 1)[-1] not in ("rollouts", "steps"):
            return sorted(self._select_committed(prefix, listed))
        committed = listed | self._select_committed(prefix, set(range(max(listed, default=-1))) - listed)
        index = max(committed, default=-1) + 1
        while self._select_committed(prefix, {index}):
            committed.add(index)
            index += 1
        return sorted(committed)

    def _select_committed(self, prefix: str, indices: set[int]) -> set[int]:
        """Return the subset of `indices` with a commit record. Reads the records instead of listing the directory."""

        def is_committed(index: int) -> bool:
            key = commit_key(f"{prefix}/{index:06d}")
            return Path(self.path(key)).exists() if self.is_local else self.read(key) is not None

        candidates = sorted(indices)
        results = disk.map_in_threads(is_committed, candidates, 1 if self.is_local else _NUM_REQUESTS)
        return {index for index, committed in zip(candidates, results, strict=True) if committed}

    # ---- housekeeping ------------------------------------------------------------------------------------------------

    def walk(self, prefix: str) -> Iterator[StoredFile]:
        """Yield every file under `prefix`, committed or not, sorted by key."""
        if self.is_local:
            for local in sorted(disk.files_in(Path(self.path(prefix))), key=str):
                with suppress(FileNotFoundError):  # a writer's temporary file, deleted since the listing
                    stat = local.stat()
                    yield StoredFile(local.relative_to(self.root).as_posix(), stat.st_size, stat.st_mtime)
            return

        def request() -> dict[str, dict[str, Any]]:
            self.fs.invalidate_cache()
            files: dict[str, dict[str, Any]] = self.fs.find(self.path(prefix), detail=True)
            return files

        for name, info in sorted(self._access_with_retries(request, prefix).items()):
            yield StoredFile(name.removeprefix(f"{self.root}/"), info["size"], objects.modification_time(info))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete files durably, and on a local store the directories that become empty. Missing files are skipped.

        Raises:
            StoreError: a key leads out of the store, directly or by a symbolic link, or the user is not permitted to
                delete a file.
        """
        if self.is_local:
            disk.delete([Path(self.path(key)) for key in keys], Path(self.root))
            return

        def remove(key: str) -> None:
            with suppress(FileNotFoundError):
                self._access_with_retries(lambda: self.fs.rm_file(self.path(key)), key)

        disk.map_in_threads(remove, keys, _NUM_REQUESTS)

    def remove_empty_directories(self, prefix: str) -> None:
        """Remove the empty directories under `prefix`. Does nothing unless the store is local."""
        if self.is_local:
            disk.remove_empty_directories(Path(self.path(prefix)))

    # ---- internals ---------------------------------------------------------------------------------------------------

    def _check_writable_with_conditional_create(self) -> None:
        """Check that the store is writable and has conditional create."""
        key, data = f".penstock-probe-{uuid.uuid4().hex[:8]}", uuid.uuid4().bytes
        advice = (
            "so two processes could both commit the same stage: use another store, or pass --store-single-writer if "
            "only one process ever writes to this one"
        )
        try:
            created = self._create(key, data, _NUM_PROBES)
            again = self._create(key, data[::-1], _NUM_PROBES)
            self.delete([key])
        except (NotImplementedError, TypeError) as error:  # TypeError: a driver older than `mode="create"`
            raise StoreError(f"store {self.uri!r} has no conditional create, {advice}") from error
        except StoreError as error:
            raise StoreError(f"store {self.uri!r} does not respond: {error}") from error
        except Exception as error:  # drivers have their own error types
            if self.is_local and getattr(error, "errno", None) in disk.NO_HARD_LINKS:
                raise StoreError(f"store {self.uri!r} is on a file system without hard links, {advice}") from error
            raise StoreError(
                f"store {self.uri!r} is not writable ({error}): pass a --store that this user may write to"
            ) from error
        if not created or again:
            raise StoreError(f"store {self.uri!r} accepts a second create of the same key, {advice}")

    def _access_with_retries(self, call: Callable[[], T], key: str) -> T:
        """Return the result of `call`, a read access to `key`; retry transient failures of object stores.

        Raises:
            FileNotFoundError: the file does not exist.
            StoreError: the file cannot be read.
        """
        try:
            return call() if self.is_local else objects.call_with_retries(call, f"accessing {self.path(key)}")
        except (FileNotFoundError, StoreError):
            raise
        except Exception as error:  # drivers have their own error types
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            raise StoreError(
                f"{self.path(key)} cannot be read ({reason}): make it readable for this user, or correct --store and "
                "--store-options"
            ) from error
