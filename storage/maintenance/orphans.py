"""Find and delete orphans: attempts of killed writers, expired checkpoints, journals of finished rounds and others.

A file is an orphan if no commit of *any* run lists it (a fork's commits list files of its parent) and no live writer or
driver uses it (leases.py). Files younger than the caller's limit are skipped, except for those of expired checkpoints
and removed runs.
"""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel

from penstock.storage.commit import JOURNAL, Commit, RunKeys, commit_key, split_stage_key
from penstock.storage.disk import map_in_threads
from penstock.storage.errors import RunError, StoreError
from penstock.storage.failpoints import failpoint
from penstock.storage.file_store import NUM_REQUESTS, StoredFile
from penstock.storage.leases import (
    TTL,
    claim_key,
    describe_lease_holder,
    describe_live_drivers,
    lease_key,
    store_time,
    try_claim_for_deletion,
    withdraw_deletion_claim,
)
from penstock.storage.maintenance.deletion import (
    Tombstone,
    is_checkpoint_used,
    removal_marker_key,
    remove_run,
    tombstone_key,
    unfinished_fork_key,
)
from penstock.storage.store import Store

R = TypeVar("R", bound=BaseModel)

_COMMIT = commit_key("")
_WITHOUT_GRACE = ("expired checkpoint", "removed run")  # kinds without a minimum age
_TEMPORARY = re.compile(r"\.[0-9a-f]{12}\.tmp$")  # temporary files of Store.create on a local disk
_GUARDS = (".lease", ".claim")  # ends of the names of an attempt's lease and claim


@dataclass(frozen=True)
class Orphan:
    """A unit of deletion, one file or the files of one directory, that no commit and no live process needs."""

    kind: str  # from `_Contents.orphan_kind_and_key`, for instance "unfinished attempt"
    key: str  # of the directory or file
    files: tuple[str, ...]
    bytes: int
    modified: float  # modification time of the newest file, seconds since the epoch


def find_orphans(store: Store, run: str | None = None, *, older_than: float, now: float | None = None) -> list[Orphan]:
    """Return all orphans (files that no record needs), the largest first.

    Args:
        store: the store to search.
        run: return only orphans of this run; if not given, of all runs and converted models.
        older_than: minimum age in seconds. It does not apply to expired checkpoints and removed runs.
        now: the current time by the store's clock (`leases.store_time`); by the local clock if not given.

    Raises:
        StoreError: a record cannot be read, so it is unknown which files it needs.
    """
    now = time.time() if now is None else now
    limit, limit_of_probes = now - older_than, now - max(older_than, TTL)  # a probe has no lease
    contents = _Contents(store)
    units: dict[tuple[str, str], list[StoredFile]] = defaultdict(list)
    for key, file in contents.files.items():
        if key not in contents.committed_files and (kind_and_unit := contents.orphan_kind_and_key(key)):
            units[kind_and_unit].append(file)
    orphans = [
        Orphan(
            kind,
            unit,
            tuple(sorted(file.key for file in files)),
            sum(file.bytes for file in files),
            max(file.modified for file in files),
        )
        for (kind, unit), files in units.items()
        if run is None or f"{unit}/".startswith(f"runs/{run}/")
    ]
    limits = dict.fromkeys(_WITHOUT_GRACE, math.inf) | {"probe file": limit_of_probes}
    old = [orphan for orphan in orphans if orphan.modified <= limits.get(orphan.kind, limit)]
    return sorted(old, key=lambda orphan: (-orphan.bytes, orphan.key))


def remove_orphan(store: Store, orphan: Orphan, now: float | None = None) -> bool:
    """Delete an orphan (files that no record needs), unless a process has begun to use it since `find_orphans`. Return
    whether it was deleted."""
    now = store_time(store) if now is None else now
    if orphan.kind == "unfinished attempt":
        return _remove_unfinished_attempt(store, orphan, now)
    in_use = False
    match orphan.kind, orphan.key.split("/"):
        case "removed run" | "half-made fork", [_, run]:
            try:
                remove_run(store, RunKeys(run), only_remains=True)
            except RunError:  # another process is removing it, or has started it again or completed the fork
                return False
            return True
        case "published weights", [_, run, *_]:
            in_use = bool(describe_live_drivers(store, RunKeys(run)))
        case "old lease", _:
            in_use = describe_lease_holder(store, orphan.key, now) is not None
        case "expired checkpoint", [_, run, _, version, _]:
            in_use = is_checkpoint_used(store, RunKeys(run), int(version), orphan.key)
    if not in_use:
        store.delete(orphan.files)
    return not in_use


def _remove_unfinished_attempt(store: Store, orphan: Orphan, now: float) -> bool:
    """Delete an attempt, unless its writer is alive or has committed it (the protocol is described in leases.py)."""
    failpoint("gc-before-condemn")
    if not try_claim_for_deletion(store, orphan.key, now):
        return False
    if not _committed_files(store, orphan.key.rpartition("/")[0]).isdisjoint(orphan.files):
        withdraw_deletion_claim(store, orphan.key)  # the writer has committed it meanwhile
        return False
    failpoint("gc-condemned")
    guards = [lease_key(orphan.key), claim_key(orphan.key)]
    store.delete([key for key in orphan.files if key not in guards])
    store.delete(guards)
    return True


def _committed_files(store: Store, prefix: str) -> set[str]:
    """Return the keys of the files that the commit of `prefix` lists; for the prefix `models`, of all converted models.

    The commit of a model's attempt (`models/attempt-...`) cannot be found by its prefix, which contains a fingerprint
    that is only known after the conversion.
    """
    prefixes = [f"models/{name}" for name in store.committed_names("models")] if prefix == "models" else [prefix]
    commits = map_in_threads(store.committed, prefixes, NUM_REQUESTS)
    return {record.path for commit in commits if commit is not None for record in commit.files}


class _Contents:
    """All files of a store, and which of them its records mark as committed, as expired checkpoints or as unfinished
    forks."""

    def __init__(self, store: Store) -> None:
        self.files = files = {file.key: file for file in store.walk("")}
        # Only records of stages: copies of commit records are also among MLflow's artifacts and in users' files.
        records = [key for key in files if split_stage_key(key) == (key, [])]
        tombstones = _read_records(store, [key for key in records if key.endswith(tombstone_key(""))], Tombstone)
        self.expired = {tombstone.commit.attempt for tombstone in tombstones.values()}  # keys of attempts
        runs = {key.split("/")[1] for key in files if key.startswith("runs/")}
        self.half_made = {  # runs: forks whose creation was not finished
            run for run in runs if unfinished_fork_key(RunKeys(run)) in files and RunKeys(run).record not in files
        }
        commits = [  # without those of checkpoints that have expired in the same run
            commit
            for key, commit in _read_records(store, [key for key in records if key.endswith(_COMMIT)], Commit).items()
            if commit.attempt not in self.expired or tombstone_key(key.removesuffix(_COMMIT)) not in files
        ]
        self.committed_files = {record.path for commit in commits for record in commit.files}
        self.committed = {commit.attempt for commit in commits}  # keys of attempts

    def orphan_kind_and_key(self, key: str) -> tuple[str, str] | None:
        """Return the kind and the key of the orphan to which an uncommitted file belongs, or None if it is not an
        orphan."""
        match key.split("/"):
            case ["runs", run, _, *_] if removal_marker_key(RunKeys(run)) in self.files:
                return "removed run", RunKeys(run).prefix
            case ["runs", run, _, *_] if run in self.half_made:
                return "half-made fork", RunKeys(run).prefix
            case ["runs", _, "fork.json"]:
                return "temporary file", key
            case ["runs", _, "removing.lease"]:
                return "old lease", key
            case ["runs", _, "drivers", name] if name.endswith(".lease"):
                return "old lease", key
            case ["runs", run, "published", weights, _, *_]:  # weights that engines load from disk
                return "published weights", f"{RunKeys(run).prefix}/published/{weights}"
            case [name] if name.startswith(".penstock-probe-"):
                return "probe file", key
        return self._orphan_of_stage(key)

    def _orphan_of_stage(self, key: str) -> tuple[str, str] | None:
        """Return the result of `orphan_kind_and_key` for a file below the prefix of a stage, or a temporary file."""
        prefix, names = split_stage_key(key)
        if names and prefix.endswith(JOURNAL):  # needed until its round is committed
            finished = commit_key(prefix.removesuffix(JOURNAL)) in self.files
            return ("journal of a finished round", prefix) if finished else None
        if _TEMPORARY.search(key):
            return "temporary file", key
        match names:
            case [name] if name.startswith("attempt-") and name.endswith(_GUARDS):
                attempt = f"{prefix}/{name.rpartition('.')[0]}"
                return ("temporary file", key) if attempt in self.committed else ("unfinished attempt", attempt)
            case [name, _, *_] if name.startswith("attempt-"):
                attempt = f"{prefix}/{name.removesuffix('.parts')}"
                return "expired checkpoint" if attempt in self.expired else "unfinished attempt", attempt
        return None


def _read_records(store: Store, keys: list[str], model: type[R]) -> dict[str, R]:
    """Return the records at `keys` by key. Records that were deleted meanwhile are skipped."""

    def read(key: str) -> R | None:
        try:
            return store.read_record(model, key)
        except StoreError as error:
            raise StoreError(
                f"{error}; the files of this record are unknown, so nothing is deleted (details: `penstock verify`)"
            ) from error

    records = map_in_threads(read, keys, NUM_REQUESTS)
    return {key: record for key, record in zip(keys, records, strict=True) if record is not None}
