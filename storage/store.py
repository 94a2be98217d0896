"""The store of runs and its commit protocol.

A stage writes files under a private prefix, `attempt-<uuid>` (`Store.writing`), then publishes one commit record by a
conditional create (`Store.commit`). Readers open only files that a commit record lists. If two attempts at a stage
race, the second one to commit gets the commit of the first and its own files are not used.
"""

from __future__ import annotations

import builtins
import uuid
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from penstock.storage import disk, leases, objects
from penstock.storage.commit import ORIGINS, Commit, FileRecord, RunKeys, commit_key, encode_commit
from penstock.storage.file_store import FileStore


@dataclass
class AttemptFiles:
    """The local directory into which a stage writes its files, and what is known about these files."""

    path: Path
    # File name relative to `path` -> xxh3-128 that the stage computed while writing; other files are read again to hash
    # them.
    hashes: dict[str, str] = field(default_factory=dict)
    files: list[FileRecord] = field(default_factory=list)  # set when the `Store.writing` block ends


class Store(FileStore):
    """A store of runs: its files, and the commits of the stages that wrote them."""

    # ---- commit records ----------------------------------------------------------------------------------------------

    def committed(self, prefix: str) -> Commit | None:
        """Return the commit of the stage that writes under `prefix`, or None if it is not committed."""
        return self.read_record(Commit, commit_key(prefix))

    def commit(self, prefix: str, commit: Commit) -> Commit:
        """Publish `commit` and return it, or return the existing commit if another attempt has committed first. Raises
        StoreError if `penstock gc` has deleted the files because the writer was suspended for too long."""
        attempt = commit.attempt or ""
        # Only attempts of this stage need a seal (leases.py); a fork also commits files of its parent's attempts. An
        # attempt is a directory below the stage's prefix; for converted models, a directory next to it.
        is_own = attempt.rpartition("/")[0] in (prefix, prefix.rpartition("/")[0])
        needs_seal = is_own and leases.needs_lease(attempt)
        with leases.sealed_against_deletion(self, commit) if needs_seal else nullcontext():
            created = self.create(commit_key(prefix), encode_commit(commit))
            existing = commit if created else self.committed(prefix)
            assert existing is not None, f"the commit record of {prefix} was neither created nor found"
        return existing

    # ---- the files of a commit ---------------------------------------------------------------------------------------

    def new_attempt(self, prefix: str) -> str:
        """Return the key of a new attempt: a private directory under `prefix` that does not exist yet."""
        return f"{prefix}/attempt-{uuid.uuid4().hex[:12]}"

    @contextmanager
    def writing(self, attempt: str, *, owns: Callable[[str], bool] | None = None) -> Iterator[AttemptFiles]:
        """Yield a local directory whose files become durable under `attempt` (from `new_attempt`) when the block ends
        without an exception.

        In a local store the directory is the attempt itself. Otherwise it is temporary and is uploaded at the end.

        `owns` returns whether this process writes the file with the given name, relative to the attempt. It is needed
        if several processes write to one attempt, since in a local store each sees the incomplete files of the
        others.
        """
        if self.is_local:
            out = AttemptFiles(Path(self.path(attempt)))
            disk.make_directory(out.path)
            with leases.writer_lease(self, attempt):
                yield out
                out.files = disk.file_records(out.path, attempt, out.hashes, owns)
                disk.fsync_files([Path(self.path(record.path)) for record in out.files], out.path)
            return
        with objects.temporary_directory() as scratch, leases.writer_lease(self, attempt):
            out = AttemptFiles(Path(scratch))
            yield out
            records = disk.file_records(out.path, attempt, out.hashes, owns)
            sources = [out.path / Path(record.path).relative_to(attempt) for record in records]
            objects.upload(self.fs, [(s, self.path(r.path), r.bytes) for s, r in zip(sources, records, strict=True)])
            out.files = records

    @contextmanager
    def reading(self, commit: Commit, *, only: Iterable[str] | None = None) -> Iterator[Path]:
        """Yield a local directory with the files of `commit`, after verifying their sizes and hashes. `only` selects
        files by their names relative to the attempt."""
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
            sizes = self.map_requests(lambda file: self.size(file[1].path), wanted)
            for (_, record), size in zip(wanted, sizes, strict=True):
                if size != record.bytes:
                    raise disk.size_mismatch_error(self.path(record.path), record.bytes, size)
            objects.download(
                self.fs, [(self.path(record.path), record, Path(scratch) / name) for name, record in wanted]
            )
            yield Path(scratch)

    # ---- listings ----------------------------------------------------------------------------------------------------

    def committed_names(self, directory: str) -> builtins.list[str]:
        """Return the sorted names of the stages with a commit record directly under a directory. The listing may be out
        of date (`FileStore.list`)."""
        suffix = commit_key("")
        return [name.removesuffix(suffix) for name in self.list(directory) if name.endswith(suffix)]

    def committed_indices(self, prefix: str) -> builtins.list[int]:
        """Return the indices of the commits under a directory such as `runs/x/rollouts`, ascending.

        On NFS and some object stores, a listing may be out of date; a read is not. Rounds are consecutive, so rollouts
        and steps that the listing lacks are looked up one by one. Commits of other kinds may have been deleted since
        the listing, so their records are looked up again.
        """
        listed = {int(name) for name in self.committed_names(prefix) if name.isdigit()}
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
        keys = {index: commit_key(f"{prefix}/{index:06d}") for index in sorted(indices)}
        if self.is_local:
            return {index for index, key in keys.items() if Path(self.path(key)).exists()}
        records = self.map_requests(self.read, keys.values())
        return {index for index, record in zip(keys, records, strict=True) if record is not None}


def origin_roles(store: Store, keys: RunKeys) -> list[str]:
    """Return the roles of the models that a run may have started with: ORIGINS, and `teacher.NAME` of several."""
    names = (name.removesuffix(".json") for name in store.list(keys.prefix) if name.endswith(".json"))
    return [*ORIGINS, *sorted(name for name in names if name.startswith("teacher."))]


def committed_prefixes(store: Store, keys: RunKeys) -> list[str]:
    """Return the store prefixes of a run's committed stages: rollouts, steps, checkpoints, exports, evaluations, then
    regraded rounds. The commit record of a stage is at `commit_key(prefix)`."""
    prefixes = [
        f"{keys.prefix}/{kind}/{index:06d}"
        for kind in ("rollouts", "steps", "checkpoints", "exports")
        for index in store.committed_indices(f"{keys.prefix}/{kind}")
    ]
    for kind in ("evals", "regrades"):
        for index in store.list(f"{keys.prefix}/{kind}"):
            directory = f"{keys.prefix}/{kind}/{index}"
            prefixes += [f"{directory}/{name}" for name in store.committed_names(directory)]
    return prefixes


def read_stages(store: Store, keys: RunKeys, *, skip: Container[str] = ()) -> dict[str, Commit]:
    """Return the commits of a run: prefix of the stage -> commit, in the order of `committed_prefixes`. Commits whose
    keys are in `skip` are not read."""
    prefixes = [prefix for prefix in committed_prefixes(store, keys) if commit_key(prefix) not in skip]
    commits = store.map_requests(store.committed, prefixes)
    return {prefix: commit for prefix, commit in zip(prefixes, commits, strict=True) if commit is not None}


def read_commits(store: Store, keys: RunKeys) -> list[Commit]:
    """Return all commits of a run in the order of their creation."""
    return sorted(read_stages(store, keys).values(), key=lambda commit: commit.created_at)
