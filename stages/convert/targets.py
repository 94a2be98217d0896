"""Where a conversion's result goes: among the converted models of a store, or into a directory or URI that somebody named.

Both are written under a private name first, which the same command finds again after a kill, and become visible whole, last. `.parts`
beside the private name holds the records of what is finished.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from storage import disk
from storage.errors import OptionError, StoreError
from storage.refs import CheckpointRef, Commit, commit_key
from storage.store import Store

RECORD = ".penstock.json"  # in a directory that we have filled: the commit record
TRACKER = "latest_checkpointed_iteration.txt"  # Megatron's word for which checkpoint of a directory counts
ASSETS_DIRECTORY = "hf_assets"  # inside a converted model: config.json, tokenizer and so on
RELEASE = "release"  # ... and what it calls one that was not trained
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Target(Protocol):
    """Where a result goes."""

    store: Store
    attempt: str  # key under which files are written
    parts: str  # key of the records of finished parts

    def standing(self, identity: str) -> CheckpointRef | None:
        """The result, if it is there already.

        Raises:
            OptionError: another one is there.
        """

    def publish(self, identity: str, commit: Commit) -> CheckpointRef:
        """Make the result visible; `commit` names its files under `attempt`."""


@dataclass
class AmongModels:
    """`models/<identity>` in a store, shared by all runs that start from the same files."""

    store: Store
    name: str  # of the attempt: the same source and options give the same

    def __post_init__(self) -> None:
        self.attempt = f"models/attempt-{self.name}"
        self.parts = f"{self.attempt}.parts"

    def standing(self, identity: str) -> CheckpointRef | None:
        commit = self.store.committed(f"models/{identity}")
        return None if commit is None else self._ref(identity, commit)

    def publish(self, identity: str, commit: Commit) -> CheckpointRef:
        return self._ref(identity, self.store.commit(f"models/{identity}", commit))

    def may_have(self, headers: str) -> bool:
        """Whether one of the models there may be one with these headers."""
        suffix = commit_key("")
        names = [name.removesuffix(suffix) for name in self.store.list("models") if name.endswith(suffix)]
        commits = disk.in_parallel(lambda name: self.store.committed(f"models/{name}"), names, 16)
        return any(commit is not None and commit.state.get("headers", headers) == headers for commit in commits)

    def _ref(self, identity: str, commit: Commit) -> CheckpointRef:
        uri = f"{self.store.uri}/{commit.attempt}"
        return CheckpointRef(key=commit_key(f"models/{identity}"), uri=uri, format="torch_dist", policy_version=0)


class InDirectory:
    """A directory or URI of the user's own.

    On a local disk everything is written into a hidden directory beside it, which gets its name last. On an object store, where nothing
    can be renamed, the record comes last.

    Args:
        uri: of the directory; it must not exist, or be empty, or hold this very result.
        format: what will be in it; a torch_dist model goes into `release`, as Megatron has it.
        name: of the attempt: the same source and options give the same.
        options: for the fsspec file system.
    """

    def __init__(self, uri: str, format: Literal["torch_dist", "hf"], name: str, options: dict[str, Any] | None = None) -> None:
        self.store, self.final = above(uri, options)
        self.uri, self.format = f"{self.store.uri.rstrip('/')}/{self.final}", format
        self.work = f".{self.final}.incoming-{name}" if self.store.is_local else self.final
        self.attempt = f"{self.work}/{RELEASE}" if format == "torch_dist" else self.work
        self.parts = f".{self.final}.incoming-{name}.parts"

    def standing(self, identity: str) -> CheckpointRef | None:
        record = committed_in(self.store, self.final)
        if record is not None and record.state.get("identity") == identity:
            return self._ref(record)
        if record is not None or self.is_taken():
            raise OptionError(f"{self.uri} holds something else already: give --save another place, or remove it")
        return None

    def publish(self, identity: str, commit: Commit) -> CheckpointRef:
        moved = commit.model_copy(
            update={
                "attempt": self.final + self.attempt.removeprefix(self.work),
                "files": [
                    file.model_copy(update={"path": self.final + file.path.removeprefix(self.work)}) for file in commit.files
                ],
                "state": {**commit.state, "identity": identity},
            }
        )
        if self.format == "torch_dist":
            self.store.create(f"{self.work}/{TRACKER}", RELEASE.encode())
        self.store.create(f"{self.work}/{RECORD}", moved.model_dump_json(indent=1).encode())
        if self.work != self.final:
            self._rename()
        return self._ref(moved)

    def _rename(self) -> None:
        source, target = Path(self.store.path(self.work)), Path(self.store.path(self.final))
        try:
            source.rename(target)  # also over an empty directory
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise OptionError(f"{target} was filled meanwhile: give --save another place; the result is in {source}") from error
        disk.fsync(target.parent)

    def is_taken(self) -> bool:
        """Whether something lies there that no unfinished attempt of this very result has put there."""
        if not self.store.is_local and self.store.list(self.parts):
            return False
        path = Path(self.store.path(self.final))
        return bool(self.store.list(self.final)) if path.is_dir() or not self.store.is_local else path.exists()

    def _ref(self, commit: Commit) -> CheckpointRef:
        key = f"{self.final}/{RECORD}"
        return CheckpointRef(key=key, uri=self.uri, format=self.format, policy_version=commit.policy_version)


def committed_in(store: Store, name: str) -> Commit | None:
    """The record in a directory that we have filled."""
    try:
        data = store.read(f"{name}/{RECORD}")
    except NotADirectoryError:  # it is a file
        data = None
    return None if data is None else Commit.model_validate_json(data)


def above(uri: str, options: dict[str, Any] | None = None) -> tuple[Store, str]:
    """The directory that a directory or URI lies in, as a store, and its name there.

    Raises:
        OptionError: it lies in none.
    """
    whole = Store(uri, options, probe=False)
    parent, _, name = whole.root.rpartition("/")
    if not name or not (parent or whole.is_local):
        raise OptionError(f"--save {uri} is the top of a disk or a bucket: give a directory in it")
    return Store((parent or "/") if whole.is_local else whole.fs.unstrip_protocol(parent), options, probe=False), name


def check_room(store: Store, needed: int) -> None:
    """Raise StoreError unless the store's disk has room for so many bytes. An object store does not tell."""
    if not store.is_local:
        return
    place = next(path for path in [Path(store.root), *Path(store.root).parents] if path.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise StoreError(
            f"{needed / 1e9:.1f} GB are to be written and {place} has {free / 1e9:.1f} GB free: make room, or give another place"
        )


@contextmanager
def room(store: Store) -> Iterator[None]:
    """Inside, a disk that is full is one sentence.

    Raises:
        StoreError: no room is left.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise StoreError(
            f"no room is left in {store.root} ({error.strerror}): make room and start the same command again, it goes on from there"
        ) from error
