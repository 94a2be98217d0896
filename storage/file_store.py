"""The files of a store, on a local disk or any fsspec URI: atomic and conditional creation, reads, listings, deletion.

Conditional create is `os.link` on a local disk (atomic, fails if the name exists) and `If-None-Match: *` or an
equivalent on object stores; opening a store tests that it works. Retries for object stores are in objects.py.
"""

from __future__ import annotations

import builtins
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fsspec.implementations.local import LocalFileSystem

from penstock.storage import disk, objects
from penstock.storage.commit import Record, decode_record, describe_key_problem
from penstock.storage.errors import StoreError
from penstock.storage.secret_references import resolve_secrets
from penstock.storage.secrets import has_credentials

T = TypeVar("T")
Item = TypeVar("Item")

NUM_REQUESTS = 16  # concurrent small requests to an object store
_NUM_PROBES = 2  # tries of each probe request; few, so that a wrong address is reported soon


class StoredFile(NamedTuple):
    """A file in the store, committed or not."""

    key: str
    bytes: int
    modified: float  # seconds since the epoch


class FileStore:
    """The files of a store. Keys are paths relative to its root, with forward slashes.

    Args:
        uri: a local path or any fsspec URI (`s3://bucket/prefix`).
        options: passed to the fsspec file system; may contain references to secrets.
        single_writer: only one process ever writes to the store; allows stores without conditional create.
        probe: test that the store is writable and has conditional create. The driver of a run does this once, so its
            Ray actors do not.
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
        """Return the full path of a key in the file system."""
        if problem := describe_key_problem(key):
            raise StoreError(f"the key {key[:100]!r} {problem}: keys are relative paths inside the store {self.uri}")
        return f"{self.root}/{key}" if key else self.root

    def create(self, key: str, data: bytes, *, num_tries: int | None = None) -> bool:
        """Write `data` at `key` unless the key exists, atomically and durably. Return whether this call wrote it. On an
        object store, several writers of equal bytes may all get True (see objects.create)."""
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

    def read(self, key: str) -> bytes | None:
        """Return the content of a small file, or None if it does not exist."""
        try:
            if self.is_local:
                return self._access_with_retries(lambda: disk.read_file(self.path(key)), key)
            return self._access_with_retries(lambda: objects.read(self.fs, self.path(key)), key)
        except FileNotFoundError:
            return None

    def read_record(self, model: type[Record], key: str) -> Record | None:
        """Return the record in a JSON file, or None if the file does not exist."""
        data = self.read(key)
        return None if data is None else decode_record(model, key, data)

    def exists(self, key: str) -> bool:
        """Return whether a file or directory exists."""
        return self._access_with_retries(lambda: bool(self.fs.exists(self.path(key))), key)

    def size(self, key: str) -> int | None:
        """Return the size of a file in bytes, or None if it does not exist."""
        info = self._info(key)
        return None if info is None or info["type"] == "directory" else info["size"]

    def modified(self, key: str) -> float | None:
        """Return when a file was modified (seconds since the epoch, by the store's clock), or None if it is missing."""
        info = self._info(key)
        return None if info is None else objects.modification_time(info)

    def _info(self, key: str) -> dict[str, Any] | None:
        """Return what fsspec reports about a file or directory, or None if it does not exist."""

        def request() -> dict[str, Any] | None:
            with suppress(FileNotFoundError, NotADirectoryError):
                info: dict[str, Any] = self.fs.info(self.path(key))
                return info
            return None

        return self._access_with_retries(request, key)

    def replace(self, key: str, data: bytes) -> None:
        """Write `data` at `key`, replacing an existing file, atomically but without fsync: for leases and reports."""
        if self.is_local:
            disk.replace(Path(self.path(key)), data)
        else:
            objects.call_with_retries(lambda: self.fs.pipe_file(self.path(key), data), f"writing {self.path(key)}")

    def list(self, prefix: str) -> builtins.list[str]:
        """Return the sorted names of files and directories directly under `prefix`, or [] if it does not exist. On NFS
        and some object stores, recently created files may be missing."""

        def names() -> Iterable[str]:
            if self.is_local:
                if not Path(self.path(prefix)).is_dir():
                    return []
                with os.scandir(self.path(prefix)) as entries:  # fsspec takes several times as long
                    return [entry.name for entry in entries]
            return [path.rstrip("/").rpartition("/")[2] for path in self.fs.ls(self.path(prefix), detail=False)]

        try:
            return sorted(self._access_with_retries(names, prefix))
        except FileNotFoundError:
            return []

    def walk(self, prefix: str) -> Iterator[StoredFile]:
        """Yield every file under `prefix`, committed or not, sorted by key."""
        if self.is_local:
            for local in sorted(disk.files_in(Path(self.path(prefix))), key=str):
                with suppress(FileNotFoundError):  # a writer's temporary file, deleted since the listing
                    stat = local.stat()
                    yield StoredFile(local.relative_to(self.root).as_posix(), stat.st_size, stat.st_mtime)
            return
        files = self._access_with_retries(lambda: self.fs.find(self.path(prefix), detail=True), prefix)
        for name, info in sorted(files.items()):
            yield StoredFile(name.removeprefix(f"{self.root}/"), info["size"], objects.modification_time(info))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete files durably, and on a local store the directories that become empty. Missing files are skipped."""
        if self.is_local:
            disk.delete([Path(self.path(key)) for key in keys], Path(self.root))
            return

        def remove(key: str) -> None:
            with suppress(FileNotFoundError):
                self._access_with_retries(lambda: self.fs.rm_file(self.path(key)), key)

        self.map_requests(remove, keys)

    def map_requests(self, request: Callable[[Item], T], items: Iterable[Item]) -> builtins.list[T]:
        """Return the results of `request` for all items in their order. Requests to an object store are concurrent."""
        return disk.map_in_threads(request, items, 1 if self.is_local else NUM_REQUESTS)

    def remove_empty_directories(self, prefix: str) -> None:
        """Remove the empty directories under `prefix`. Does nothing unless the store is local."""
        for place, _, _ in os.walk(self.path(prefix), topdown=False) if self.is_local else ():
            disk.remove_if_empty(Path(place))

    def _check_writable_with_conditional_create(self) -> None:
        """Check that the store is writable and has conditional create."""
        key, data = f".penstock-probe-{uuid.uuid4().hex[:8]}", uuid.uuid4().bytes
        advice = (
            "so two processes could both commit the same stage: use another store, or pass --store-single-writer if "
            "only one process ever writes to this one"
        )
        try:
            created = self.create(key, data, num_tries=_NUM_PROBES)
            again = self.create(key, data[::-1], num_tries=_NUM_PROBES)
            self.delete([key])
            problem = "" if created and not again else f"accepts a second create of the same key, {advice}"
            cause: Exception | None = None
        except Exception as error:  # fsspec drivers have their own error types
            cause = error
            if isinstance(error, NotImplementedError | TypeError):  # TypeError: an old driver without `mode="create"`
                problem = f"has no conditional create, {advice}"
            elif isinstance(error, StoreError):
                problem = f"does not respond ({error}): check its address and the network"
            elif self.is_local and getattr(error, "errno", None) in disk.NO_HARD_LINKS:
                problem = f"is on a file system without hard links, {advice}"
            else:
                problem = f"is not writable ({error}): pass a --store that this user may write to"
        if problem:
            raise StoreError(f"store {self.uri!r} {problem}") from cause

    def _access_with_retries(self, call: Callable[[], T], key: str) -> T:
        """Return the result of `call`, an access to `key`; retry transient failures of object stores. Raises
        FileNotFoundError if the file does not exist, or StoreError."""

        def request() -> T:
            self.fs.invalidate_cache()  # s3fs caches listings, which lack new files of other processes
            return call()

        try:
            return call() if self.is_local else objects.call_with_retries(request, f"accessing {self.path(key)}")
        except (FileNotFoundError, StoreError):
            raise
        except Exception as error:  # fsspec drivers have their own error types
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            raise StoreError(
                f"{self.path(key)} cannot be read ({reason}): make it readable for this user, or correct --store and "
                "--store-options"
            ) from error
